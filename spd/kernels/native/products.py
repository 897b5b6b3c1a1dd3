"""The compiled C kernels' library and its products: bfloat16 or float32 on CPU, any number of rows alike."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from spd.kernels.linear.few_bits import GroupedWeight
from spd.kernels.native.build import NativeUnavailable

SIDE, DEPTH = 16, 32
"""Rows or columns of a tile, and its depth."""
TILE_BYTES = 2 * SIDE * DEPTH
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, Sequence[type]] = {
    "spd_init": (),
    "spd_pack": (POINTER,) * 2 + (LONG,) * 2 + (INT,) * 2,
    "spd_pack_codes": (*(POINTER,) * 6, *(LONG,) * 3, *(INT,) * 4),
    "spd_linear": (POINTER, POINTER, FLOAT, *(POINTER,) * 4, *(LONG,) * 8, INT, POINTER, INT),
    "spd_norm": (POINTER, POINTER, FLOAT, POINTER, POINTER, LONG, LONG, INT),
    "spd_rotary_store": (*(POINTER,) * 6, FLOAT, *(POINTER,) * 3, *(LONG,) * 5, INT),
    "spd_attend": (*(POINTER,) * 4, LONG, *(POINTER,) * 2, *(LONG,) * 7, FLOAT, FLOAT, LONG, LONG, INT),
    "spd_latent_store": (*(POINTER,) * 7, FLOAT, *(POINTER,) * 2, *(LONG,) * 7, INT),
    "spd_router": (*(POINTER,) * 3, *(LONG,) * 3, INT),
    "spd_route": (*(POINTER,) * 5, *(LONG,) * 6, INT, INT, FLOAT, INT),
    "spd_sample": (*(POINTER,) * 10, *(LONG,) * 5, *(INT,) * 3),
    "spd_lookup": (*(POINTER,) * 6, *(LONG,) * 6, INT),
    "spd_short_conv": (*(POINTER,) * 7, *(LONG,) * 6, INT),
    "spd_delta_rule": (*(POINTER,) * 12, *(LONG,) * 8, INT),
    "spd_gated_norm": (*(POINTER,) * 3, FLOAT, POINTER, *(LONG,) * 4, INT),
    "spd_experts": (*(POINTER,) * 7, *(LONG,) * 5, *(POINTER,) * 4, INT),
}


class Ending(IntEnum):
    """What becomes of a product's sums."""

    ROUNDED = 0
    """To the library's dtype."""
    FLOAT32 = 1
    SILU = 2
    """The first half of the columns are gates of the second half."""
    GELU = 3


CODES = ("int4", "int8", "e2m1", "e4m3")
"""Kinds of codes, numbered from 1."""


class Weight(ctypes.Structure):
    """A packed weight as the C files know it: codes.h."""

    _fields_ = (
        *((name, POINTER) for name in ("tiles", "scales", "zeros")),
        *((name, LONG) for name in ("group", "groups", "steps")),
        *((name, INT) for name in ("kind", "wide")),
    )


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K], or one for each of some heads or experts, as tiles; gated: see `Ending.SILU`.

    Of a weight in codes the tiles are codes, with scales and perhaps zeros of groups of so many columns.
    """

    tiles: Tensor
    width: int
    depth: int
    gated: bool
    count: int = 1
    kind: int = 0
    group: int = 0
    groups: int = 0
    scales: Tensor | None = None
    zeros: Tensor | None = None

    @cached_property
    def described(self) -> Weight:
        """What is handed to C: it points into these tensors."""
        wide = self.scales is not None and self.scales.dtype == torch.float32
        parts = (address(each) for each in (self.tiles, self.scales, self.zeros))
        return Weight(*parts, self.group, self.groups, tiles_of(self.depth, DEPTH), self.kind, int(wide))

    @property
    def address(self) -> int:
        return ctypes.addressof(self.described)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def tiles_of(count: int, size: int) -> int:
    return -(-count // size)


class AmxRefused(NativeUnavailable):
    """The processor has it, and programs may not use it."""


class CompiledLibrary:
    """The kernels of one compiled library, for one thread at a time: they share room for a product's rows."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """dtype is that of the file's elements. Raises NativeUnavailable."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"the compiled library cannot be loaded: {error}") from error
        for name, kinds in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(kinds), INT if name == "spd_init" else None
        chosen = library.spd_init()
        if chosen < 0:
            raise AmxRefused("the system does not grant AMX")
        self.instructions = ("AVX2", "AVX512", "AVX512-BF16", "AMX")[chosen]
        self.dtype = dtype
        self.library, self._scratch = library, torch.empty(0)
        self._linear, self._attend = library.spd_linear, library.spd_attend
        self.threads = torch.get_num_threads()

    def pack(self, weight: Tensor, *, gated: bool = False) -> PackedWeight:
        """A weight [N, K], or several [E, N, K], in tiles filled up with zeros."""
        width, depth = weight.shape[-2:]
        every = weight.reshape(-1, width, depth)
        blocks = tiles_of(width // 2, SIDE) if gated else tiles_of(width, 2 * SIDE)
        size = blocks * tiles_of(depth, DEPTH) * 2 * SIDE * DEPTH
        tiles = torch.empty(every.shape[0], size, dtype=self.dtype)
        for own, one in zip(tiles, every, strict=True):
            source = one.to(self.dtype).contiguous()
            self.library.spd_pack(source.data_ptr(), own.data_ptr(), width, depth, int(gated), self.threads)
        return PackedWeight(tiles, width, depth, gated, every.shape[0])

    def pack_codes(self, weight: GroupedWeight, *, gated: bool = False) -> PackedWeight:
        """A weight [N, K] in codes, or several [E, N, K]; groups are 16, multiples of 32, or a whole row."""
        (width, depth), groups = weight.shape[-2:], weight.scales.shape[-1]
        group = weight.group if groups > 1 else tiles_of(depth, DEPTH) * DEPTH
        every = weight if len(weight.shape) == 3 else weight.each(lambda part: part[None])
        blocks = tiles_of(width // 2, SIDE) if gated else tiles_of(width, 2 * SIDE)
        count, kind = every.shape[0], 1 + CODES.index(weight.kind)
        step = SIDE * DEPTH if weight.kind in ("int4", "e2m1") else 2 * SIDE * DEPTH
        tiles = torch.empty(count, blocks * tiles_of(depth, DEPTH) * step, dtype=torch.uint8)
        beside = [
            torch.empty(count, blocks * groups * 2 * SIDE, dtype=each.dtype) for each in every.parts[1:]
        ]
        for number in range(count):
            own = [part.contiguous() for part in every.expert(number).parts]
            to = [tiles[number], *(each[number] for each in beside)]
            sources, targets = ([each.data_ptr() for each in parts] for parts in (own, to))
            self.library.spd_pack_codes(
                *[*sources, None][:3], *[*targets, None][:3], width, depth, groups, int(gated), kind,
                int(weight.scales.dtype == torch.float32), self.threads,
            )  # fmt: skip
        return PackedWeight(tiles, width, depth, gated, count, kind, group, groups, *beside)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        ending: Ending = Ending.ROUNDED,
        *,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [T, K] times W, plus bias float32 [N] and residual [T, N]: [T, N], or [T, N / 2] with a gate.

        x is RMS-normed first where the scales norm float32 [K] are given. Summed in float32, rounded once.
        """
        rows = x.shape[0]
        width = weight.width // 2 if weight.gated else weight.width
        kind = torch.float32 if ending is Ending.FLOAT32 else self.dtype
        y = torch.empty(rows, width, dtype=kind)
        scratch = self.room(tiles_of(rows, SIDE) * tiles_of(weight.depth, DEPTH))
        x = x.contiguous()
        self._linear(
            x.data_ptr(), address(norm), epsilon, weight.address, address(bias),
            address(residual), y.data_ptr(), rows, 1, weight.depth, weight.width, weight.depth, 0, width,
            0, ending, scratch, self.threads,
        )  # fmt: skip
        return y

    def room(self, tiles: int) -> int:
        """The address of room for so many left-side tiles, of float32 where products are."""
        if self._scratch.shape[0] < tiles * SIDE * DEPTH:
            self._scratch = torch.empty(tiles * SIDE * DEPTH)
        return self._scratch.data_ptr()

    def pack_heads(self, weight: Tensor) -> PackedWeight:
        """A weight for each head [H, A, B], as `head_linear` takes it."""
        return self.pack(weight.transpose(1, 2))

    def head_linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """See `spd.kernels.latent.mla_attention`; weight comes from `pack_heads`."""
        rows, heads, depth = x.shape
        assert x.stride(2) == 1 and heads == weight.count
        y = torch.empty(rows, heads, weight.width, dtype=self.dtype)
        self._linear(
            x.data_ptr(), None, 0.0, weight.address, None, None, y.data_ptr(), rows, heads, depth,
            weight.width, x.stride(0), x.stride(1), y.stride(0), y.stride(1), Ending.ROUNDED,
            self.room(heads * tiles_of(rows, SIDE) * tiles_of(depth, DEPTH)), self.threads,
        )  # fmt: skip
        return y

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
        """The RMS norm of x [T, N] with scales weight float32 [N], plus residual [T, N]; rounded once."""
        x, y = x.contiguous(), torch.empty(x.shape, dtype=self.dtype)
        self.library.spd_norm(
            x.data_ptr(), weight.data_ptr(), epsilon, address(residual), y.data_ptr(), x.shape[0],
            x.shape[1], self.threads,
        )  # fmt: skip
        return y

    def rms_norm_rows(self, x: Tensor, squares: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """See `spd.kernels.linear.skinny_linear`; no squares are needed."""
        return self.norm(x, weight.float(), epsilon)
