"""Weights as the C kernels read them, and the structures that C functions take as arguments."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from spd.kernels.launch import ceil_div
from spd.kernels.linear.few_bits import GroupedWeight

SIDE = 16
"""Rows or columns of a tile."""
DEPTH = 32
"""Depth of a tile."""
TILE_BYTES = 2 * SIDE * DEPTH
LARGE_PAGE = 1 << 21
"""Bytes."""
WEIGHT = "3P3l2i"
"""`PackedWeight.fields` in the notation of the module struct."""
CODES = ("int4", "int8", "e2m1", "e4m3")  # kinds of codes, numbered from 1


def numbers(given: Sequence[Any]) -> list[Any]:
    """Values for C: of a tensor the place where it lies, 0 for None."""
    return [each.data_ptr() if isinstance(each, Tensor) else each or 0 for each in given]


def packed(form: str, *given: Any) -> bytes:
    """A structure of C's; it does not keep the tensors."""
    return struct.pack(form, *numbers(given))


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K], or one for each of some heads or experts, as tiles; gated: its first half are gates.

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
    def fields(self) -> tuple[Any, ...]:
        """What is handed to C: see codes.h."""
        wide = self.scales is not None and self.scales.dtype == torch.float32
        parts = (self.tiles, self.scales, self.zeros)
        return (*parts, self.group, self.groups, ceil_div(self.depth, DEPTH), self.kind, wide)


SumEnding = tuple[int, float, float]
"""What becomes of a product's sums: a number that C knows, a limit and an alpha; see `ending_of`."""


class PackedProducts(Protocol):
    """Products of packed weights, which the C kernels have beside the operations of all sets."""

    threads: int
    """How many threads a C function shares its work among."""

    def pack(self, weight: Tensor | GroupedWeight, *, gated: bool = False) -> PackedWeight:
        """Return a weight [N, K], or several [E, N, K], in tiles filled up with zeros."""
        ...

    def packed_linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        ending: SumEnding = ...,
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

    def norm(
        self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor:
        """Return the RMS norm of x [T, N] with scales float32 [N], plus residual [T, N], rounded once."""
        ...


def in_large_pages(tensor: Tensor) -> Tensor:
    """The tensor, for which large pages are asked of the system: reading it waits less for translations."""
    skipped = -tensor.data_ptr() % mmap.PAGESIZE
    if tensor.nbytes > LARGE_PAGE:
        place, size = tensor.data_ptr() + skipped, tensor.nbytes - skipped
        ctypes.CDLL(None).madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor


def tile_steps(width: int, depth: int, gated: bool) -> int:
    """How many steps of 32 columns, a gated weight's of 16 and their gates, a weight [width, depth] has."""
    blocks = ceil_div(width // 2, SIDE) if gated else ceil_div(width, 2 * SIDE)
    return blocks * ceil_div(depth, DEPTH)
