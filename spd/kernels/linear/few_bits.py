"""Weights in four or eight bits with a scale a group of columns: kept packed, multiplied by wider rows.

Every layout that checkpoints have comes to this form. Activations are not rounded: W4A16 and W8A16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

CodeKind = Literal["int4", "int8", "e2m1", "e4m3"]
MIDDLE = {"int4": 8, "int8": 128}
"""The zero point of integers where none is kept."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of a code; the fourth is the sign."""
STRIP = 2**24
"""Values that are made at a time, in float32."""


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [N, K] as codes, or one an expert, [E, N, K].

    codes: uint8 [..., N, K], or [..., N, K / 2] of two codes, that of the even column in the low half.
    scales: float32 or bfloat16 [..., N, K / group], the last group of FP8 blocks partial. zeros: uint8 too,
    the integer code that stands for 0; None: `MIDDLE`. columns [K]: factors of the columns, such as the
    weight of the norm before.
    """

    kind: CodeKind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    columns: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(N, K), behind the number of experts if there are any."""
        each = 2 if self.kind in ("int4", "e2m1") else 1
        return torch.Size((*self.codes.shape[:-1], each * self.codes.shape[-1]))

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What belongs to its rows."""
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)

    def each(self, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
        """Its parts changed alike."""
        codes, scales, *zeros = map(change, self.parts)
        return replace(self, codes=codes, scales=scales, zeros=zeros[0] if zeros else None)

    def expert(self, number: int) -> GroupedWeight:
        """One of several weights."""
        return self.each(lambda part: part[number])

    def arranged(self, order: list[int]) -> GroupedWeight:
        """Its rows in another order."""
        return self.each(lambda part: part[order])

    def stacked(self, count: int) -> GroupedWeight:
        """Rows [E * N, K] as so many weights."""
        return self.each(lambda part: part.view(count, -1, part.shape[-1]))

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The weight [..., N, K] in a dtype, each value rounded once."""
        rows, width = self.codes.flatten(0, -2), self.shape[-1]
        scales = self.scales.flatten(0, -2)
        zeros = None if self.zeros is None else self.zeros.flatten(0, -2)
        whole = torch.empty(rows.shape[0], width, dtype=dtype, device=rows.device)
        step = max(1, STRIP // width)
        for first in range(0, rows.shape[0], step):
            part = slice(first, first + step)
            codes = unpaired(rows[part]) if self.kind in ("int4", "e2m1") else rows[part]
            own = None if zeros is None else zeros[part]
            made = values(self.kind, codes, scales[part], own, self.group)
            whole[part] = made if self.columns is None else made * self.columns.float()
        return whole.view(self.shape)


def unpaired(codes: Tensor) -> Tensor:
    """Codes uint8 [..., K] of two in a byte [..., K / 2]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def paired(codes: Tensor) -> Tensor:
    """Two codes in a byte: see `unpaired`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def decoded(kind: CodeKind, codes: Tensor) -> Tensor:
    """What codes uint8 stand for in float32, but for zero points: exact, in bfloat16 too."""
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "e2m1":
        table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)
        return table[codes.long()]
    return codes.float()


def values(kind: CodeKind, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Tensor:
    """The weight float32 [N, K] of unpaired codes [N, K] with scales and zeros [N, K / group]."""
    made, width = decoded(kind, codes), codes.shape[-1]
    if zeros is not None:
        made -= zeros.float().repeat_interleave(group, -1)[..., :width]
    elif kind in MIDDLE:
        made -= MIDDLE[kind]
    return made.mul_(scales.float().repeat_interleave(group, -1)[..., :width])


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times a weight [N, K] plus bias [N]: [T, N] in x's type, summed in float32.

    Torch form: by the plain weight, in float32. Kernels scale each group's sum, in ascending order of groups.
    """
    return F.linear(x.float(), weight.plain(torch.float32), None if bias is None else bias.float()).to(
        x.dtype
    )
