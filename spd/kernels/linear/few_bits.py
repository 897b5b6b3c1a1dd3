"""Weights in four to eight bits with a scale a group of columns: stored packed, multiplied by wider
rows.

All quantized layouts of checkpoints are converted to this form. Activations are not rounded, W4A16
and W8A16, unless it is asked for: see `int8_activations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.capabilities import CODE_BITS, CodeKind

FOUR_BIT_KINDS = tuple(kind for kind, bits in CODE_BITS.items() if bits == 4)
"""Kinds of which a byte holds two codes; codes of others have a byte each until they are packed."""
DEFAULT_ZERO_POINTS = {"int4": 8, "int5": 16, "int6": 32, "int8": 128}
"""The zero point of integer codes where a weight stores none."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values by code of ggml's IQ4_NL and IQ4_XS."""
BYTE_OFFSET = 128
"""The byte of a factored scale or minimum of 0, and of a scale of 1 among exponents."""
QUANT_PARAMETERS = ("scales", "zeros", "minima", "factors", "minimum_factors")
"""The optional tensors of a weight in codes, in the order of kernels' arguments."""
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of a code; the fourth bit is the sign."""
INT8_MAX = 127
STRIP_VALUES = 2**24
"""Values that are computed at a time, in float32."""


@dataclass(frozen=True)
class Codes:
    """A quantized weight [N, K], or one for each expert, [E, N, K].

    scales: float32, bfloat16 or float16 [..., N, K / group], the last group of FP8 blocks partial.
    zeros: uint8, the integer code of 0; None: `DEFAULT_ZERO_POINTS`. columns [K]: factors of the
    columns, such as the weight of the norm before.

    Scales may be uint8: exponents, 2^(byte - 128); or, with factors float16 [..., N, K /
    `SUPER_BLOCK`], (byte - 128) * factor. minima, of the type of scales, are subtracted from a
    group's values after the scale; no code stands for 0 then.
    """

    kind: CodeKind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    columns: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the codes."""
        return self.codes.device


@dataclass(frozen=True)
class GroupedWeight(Codes):
    """A weight of codes uint8 [..., N, K], or [..., N, K / 2] with the even column in the low
    half."""

    minima: Tensor | None = None
    factors: Tensor | None = None
    minimum_factors: Tensor | None = None
    rounds_rows: bool = False
    """True if rows are rounded to eight bits before products; see `int8_activations`."""

    @property
    def shape(self) -> torch.Size:
        """Return (N, K), or (E, N, K) of experts."""
        codes_per_byte = 2 if self.kind in FOUR_BIT_KINDS else 1
        return torch.Size((*self.codes.shape[:-1], codes_per_byte * self.codes.shape[-1]))

    @property
    def quant_parameters(self) -> dict[str, Tensor]:
        """Return the tensors of `QUANT_PARAMETERS` that are not None, by name."""
        stored = {name: getattr(self, name) for name in QUANT_PARAMETERS}
        return {name: part for name, part in stored.items() if part is not None}

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return all tensors that have a row for each row of the weight."""
        return (self.codes, *self.quant_parameters.values())

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
        """Return the weight with `change` applied to each of its tensors with rows."""
        changed: dict[str, Any] = {
            name: change(part) for name, part in self.quant_parameters.items()
        }
        return replace(self, codes=change(self.codes), **changed)

    def select(self, number: int | slice) -> GroupedWeight:
        """Return one of several weights, or some rows of one."""
        return self.map_tensors(lambda part: part[number])

    def as_experts(self, count: int) -> GroupedWeight:
        """Return rows [E * N, K] as `count` weights, [E, N, K]."""
        return self.map_tensors(lambda part: part.view(count, -1, part.shape[-1]))

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., N, K] in a dtype, each value rounded once."""
        rows = self.map_tensors(lambda part: part.flatten(0, -2))
        width = self.shape[-1]
        values = torch.empty(rows.shape[0], width, dtype=dtype, device=self.device)
        step = max(1, STRIP_VALUES // width)
        for first in range(0, rows.shape[0], step):
            strip = rows.select(slice(first, first + step))
            strip_values = strip._values()
            values[first : first + step] = (
                strip_values if self.columns is None else strip_values * self.columns.float()
            )
        return values.view(self.shape)

    def _values(self) -> Tensor:
        """Return rows [N, K] in float32, as ggml's reference computes them where scales have
        factors."""
        codes = unpack_nibbles(self.codes) if self.kind in FOUR_BIT_KINDS else self.codes
        scales = decode_scales(self.scales, self.factors)
        if self.minima is None:
            return dequantize(self.kind, codes, scales, self.zeros, self.group)
        values = decode_codes(self.kind, codes) * scales.repeat_interleave(self.group, -1)
        minima = decode_scales(self.minima, self.minimum_factors)
        return values.sub_(minima.repeat_interleave(self.group, -1))


@dataclass(frozen=True)
class StackedWeight:
    """Weights [N, K] of different forms, concatenated by rows."""

    pieces: tuple[GroupedWeight, ...]

    @property
    def shape(self) -> torch.Size:
        """Return (N, K)."""
        rows = sum(piece.shape[0] for piece in self.pieces)
        return torch.Size((rows, self.pieces[0].shape[1]))

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in a dtype, each value rounded once."""
        return torch.cat([piece.plain(dtype) for piece in self.pieces])


def unpack_nibbles(codes: Tensor) -> Tensor:
    """Return codes uint8 [..., K] of bytes [..., K / 2] that hold two each."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes in a byte: see `unpaired`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def decode_scales(numbers: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return scales or minima [N, G] in float32.

    factors: float16 [N, K / `SUPER_BLOCK`]. See `Codes`.
    """
    if numbers.dtype != torch.uint8:
        return numbers.float()
    offsets = numbers.float() - BYTE_OFFSET
    if factors is None:
        return torch.exp2(offsets)
    return factors.float().repeat_interleave(numbers.shape[-1] // factors.shape[-1], -1) * offsets


def decode_codes(kind: CodeKind, codes: Tensor) -> Tensor:
    """Return the values of codes uint8 in float32, before zero points: exact, in bfloat16 too."""
    if kind == "iq4":
        return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=codes.device)[codes.long()]
    if kind == "mx4":
        return 2 * decode_codes("e2m1", codes)
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "e2m1":
        negative = tuple(-value for value in E2M1_MAGNITUDES)
        table = torch.tensor(E2M1_MAGNITUDES + negative, device=codes.device)
        return table[codes.long()]
    return codes.float()


def dequantize(
    kind: CodeKind, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int
) -> Tensor:
    """Return the weight float32 [N, K] of codes [N, K], one a byte, with scales and zeros [N, K /
    group]."""
    values = decode_codes(kind, codes)
    width = codes.shape[-1]
    if zeros is not None:
        values -= zeros.float().repeat_interleave(group, -1)[..., :width]
    elif kind in DEFAULT_ZERO_POINTS:
        values -= DEFAULT_ZERO_POINTS[kind]
    return values.mul_(scales.float().repeat_interleave(group, -1)[..., :width])


def row_magnitudes(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each row of weight [..., N, K]: float32 [..., N]."""
    rows = weight.flatten(0, -2)
    strips = torch.split(rows, max(1, STRIP_VALUES // rows.shape[1]))
    return torch.cat([strip.float().abs().amax(dim=1) for strip in strips]).view(weight.shape[:-1])


def quantize_int8(weight: Tensor, row_max: Tensor | None = None) -> GroupedWeight:
    """Quantize weight [..., N, K] to int8 with one scale a row: its largest magnitude / 127, ties
    to even.

    row_max: float32 [..., N], the `row_magnitudes` of full rows, where weight holds parts of rows.
    A scale is a bfloat16 number, so that it is exact in products of any type; each value's error is
    at most half its row's scale. A row of zeros has the scale 1. Equal weights give equal bits
    everywhere: nothing is summed.
    """
    max_magnitudes = row_magnitudes(weight) if row_max is None else row_max
    scales = (max_magnitudes.flatten() / INT8_MAX).to(torch.bfloat16).float()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # NaN stays
    rows = weight.flatten(0, -2)
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=weight.device)
    step = max(1, STRIP_VALUES // rows.shape[1])
    for first in range(0, rows.shape[0], step):
        strip = slice(first, first + step)
        rounded = torch.round(rows[strip].float() / scales[strip, None]).clamp_(-INT8_MAX, INT8_MAX)
        codes[strip].copy_(rounded.add_(DEFAULT_ZERO_POINTS["int8"]))
    scales = scales.view(*weight.shape[:-1], 1)
    return GroupedWeight("int8", codes.view(weight.shape), scales, None, weight.shape[-1])


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] times a weight [N, K] plus bias [N]: [T, N] in x's dtype, summed in float32.

    Torch form: by the dequantized weight, in float32. Kernels scale each group's sum, in ascending
    order of groups.
    """
    assert not weight.rounds_rows
    bias32 = None if bias is None else bias.float()
    return F.linear(x.float(), weight.plain(torch.float32), bias32).to(x.dtype)
