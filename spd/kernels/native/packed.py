"""Weights as the C kernels read them, and the structures that C functions take as arguments."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.capabilities import CODE_BITS
from spd.kernels.launch import ceil_div
from spd.kernels.linear.few_bits import QUANT_PARAMETERS, GroupedWeight, StackedWeight

SIDE = 16
"""Rows or columns of a tile."""
DEPTH = 32
"""Depth of a tile."""
TILE_BYTES = 2 * SIDE * DEPTH
SUM_BYTES = 4 * SIDE
"""Sums of the rows of a left-side tile."""
LARGE_PAGE = 1 << 21
"""Bytes."""
WEIGHT_FORMAT = "6P3l2i"
"""`PackedWeight.fields` in the notation of the module struct."""
CODES = tuple(CODE_BITS)
"""Kinds of codes, numbered from 1 as in codes.h."""
SCALE_KINDS = (torch.bfloat16, torch.float32, torch.float16)
"""Types of scales that are numbers, numbered from 0; exponents and factored bytes follow."""
EXPONENTS = 3
FACTORED = 4


def c_values(operands: Sequence[Any]) -> list[Any]:
    """Values for C: of a tensor the place where it lies, 0 for None."""
    return [each.data_ptr() if isinstance(each, Tensor) else each or 0 for each in operands]


def pack_structure(form: str, *operands: Any) -> bytes:
    """A structure of C's; it does not keep the tensors."""
    return struct.pack(form, *c_values(operands))


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K], or one for each of some heads or experts, as tiles; gated: its first half are gates.

    Of a weight in codes the tiles are codes, with scales of groups of columns and what else there is.
    """

    tiles: Tensor
    width: int
    depth: int
    gated: bool
    count: int = 1
    kind: int = 0
    group: int = 0
    groups: int = 0
    quant_parameters: Mapping[str, Tensor] = field(default_factory=dict)
    """What stands beside codes, by `QUANT_PARAMETERS`, each [count, blocks, groups, 32]."""
    further_pieces: tuple[PackedWeight, ...] = ()
    """Weights of other forms whose rows follow."""

    @property
    def rows(self) -> int:
        """Return the rows of this weight and of those below it."""
        return self.width + sum(each.width for each in self.further_pieces)

    @property
    def scale_kind(self) -> int:
        """The number that codes.h gives the kind of the scales."""
        scales = self.quant_parameters.get("scales")
        if scales is None:
            return 0
        if scales.dtype in SCALE_KINDS:
            return SCALE_KINDS.index(scales.dtype)
        return FACTORED if "factors" in self.quant_parameters else EXPONENTS

    @cached_property
    def fields(self) -> tuple[Any, ...]:
        """What is handed to C: see codes.h."""
        beside = (self.quant_parameters.get(name) for name in QUANT_PARAMETERS)
        steps = ceil_div(self.depth, DEPTH)
        return (self.tiles, *beside, self.group, self.groups, steps, self.kind, self.scale_kind)


AnyMatrix = Tensor | GroupedWeight | StackedWeight
Epilogue = tuple[int, float, float]
"""What becomes of a product's sums: a number that C knows, a limit and an alpha; see `epilogue_of`."""


class PackedProducts(Protocol):
    """Products of packed weights, which the C kernels have beside the operations of all sets."""

    threads: int
    """How many threads a C function shares its work among."""

    def pack(self, weight: AnyMatrix, *, gated: bool = False) -> PackedWeight:
        """Return a weight [N, K], or several [E, N, K], in tiles filled up with zeros."""
        ...

    def packed_linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        epilogue: Epilogue = ...,
        *,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return x [T, K] Wᵀ + bias float32 [N] + residual [T, N]: [T, N], or [T, N / 2] behind gates.

        norm: float32 [K], scales of an RMS norm of x before the product. Sums are float32, rounded once. Of
        x [T, H, K] each head is multiplied by its own of H weights.
        """
        ...

    def packed_rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """Return rows [T, K] of a weight in codes, each value rounded once; ids: int64 [T]."""
        ...

    def norm(
        self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor:
        """Return the RMS norm of x [T, N] with scales float32 [N], plus residual [T, N], rounded once."""
        ...


def in_column_blocks(part: Tensor, gated: bool) -> Tensor:
    """Return what stands beside codes [E, N, G] as [E, blocks, G, 32], columns of a block as tiles have them.

    gated: the first half of the rows are gates, of which a block has 16 and the 16 rows that go with them.
    Where there are no more rows, zeros stand.
    """
    count, rows, groups = part.shape
    if gated:
        halves = part.view(count, 2, rows // 2, groups)
        padded = F.pad(halves, (0, 0, 0, -(rows // 2) % SIDE))
        blocks = padded.view(count, 2, -1, SIDE, groups).transpose(1, 2)
    else:
        padded = F.pad(part, (0, 0, 0, -rows % (2 * SIDE)))
        blocks = padded.view(count, -1, 2, SIDE, groups)
    return blocks.flatten(2, 3).transpose(2, 3).contiguous()


def in_large_pages(tensor: Tensor) -> Tensor:
    """The tensor, for which large pages are asked of the system: reading it waits less for translations."""
    skipped = -tensor.data_ptr() % mmap.PAGESIZE
    if tensor.nbytes > LARGE_PAGE:
        place = tensor.data_ptr() + skipped
        size = tensor.nbytes - skipped
        ctypes.CDLL(None).madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor


def tile_steps(width: int, depth: int, gated: bool) -> int:
    """How many steps of 32 columns, a gated weight's of 16 and their gates, a weight [width, depth] has."""
    blocks = ceil_div(width // 2, SIDE) if gated else ceil_div(width, 2 * SIDE)
    return blocks * ceil_div(depth, DEPTH)
