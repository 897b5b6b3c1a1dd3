"""Weights in the layout of the C kernels, and structures as arguments of C functions."""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.capabilities import CODE_BITS
from spd.kernels.launch import ceil_div
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.few_bits import QUANT_PARAMETERS, GroupedWeight, StackedWeight

TILE_SIDE = 16
"""Rows or columns of a tile."""
TILE_DEPTH = 32
"""Depth of a tile."""
TILE_BYTES = 2 * TILE_SIDE * TILE_DEPTH
SUM_BYTES = 4 * TILE_SIDE
"""Bytes of the row sums of a left-side tile."""
LARGE_PAGE = 1 << 21
"""Bytes of a large page."""
WEIGHT_FORMAT = "6P3l2il"
"""`PackedWeight.fields` in the notation of the module struct."""
CODE_KINDS = tuple(CODE_BITS)
"""The kinds of codes, numbered from 1 as in codes.h."""
SCALE_KINDS = (torch.bfloat16, torch.float32, torch.float16)
"""The dtypes of scales that are numbers, numbered from 0; exponents and factored bytes follow."""
EXPONENTS = 3
FACTORED = 4


Operand = Tensor | float | None
"""A member of a C structure: a tensor's address, a number, or 0 for None."""


def pack_structure(form: str, *operands: Operand) -> bytes:
    """Return a C structure of operands; it holds no references to the tensors."""
    values = [
        operand.data_ptr() if isinstance(operand, Tensor) else operand or 0 for operand in operands
    ]
    return struct.pack(form, *values)


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K], or one for each of several heads or experts, as tiles; gated: half of it are
    gates.

    The tiles of a quantized weight are codes, with `quant_parameters` of groups of columns.
    """

    tiles: Tensor
    width: int
    depth: int
    gated: bool
    count: int = 1
    kind: int = 0
    group: int = 0
    groups: int = 0
    rounds_rows: bool = False
    """True if rows are rounded to eight bits before products."""
    quant_parameters: Mapping[str, Tensor] = field(default_factory=dict)
    """Scales and the like of codes, by `QUANT_PARAMETERS`, each [count, blocks, groups, 32]."""
    further_pieces: tuple[PackedWeight, ...] = ()
    """Weights of other forms, whose rows follow."""

    @property
    def rows(self) -> int:
        """Return the rows of this weight and of its further pieces."""
        return self.width + sum(piece.width for piece in self.further_pieces)

    @property
    def scale_kind(self) -> int:
        """Return the number of the scales' kind in codes.h."""
        scales = self.quant_parameters.get("scales")
        if scales is None:
            return 0
        if scales.dtype in SCALE_KINDS:
            return SCALE_KINDS.index(scales.dtype)
        return FACTORED if "factors" in self.quant_parameters else EXPONENTS

    @cached_property
    def fields(self) -> tuple[Operand, ...]:
        """Return the members of the weight's C structure: see codes.h."""
        parameters = (self.quant_parameters.get(name) for name in QUANT_PARAMETERS)
        steps = ceil_div(self.depth, TILE_DEPTH)
        sizes = (self.group, self.groups, steps)
        return (self.tiles, *parameters, *sizes, self.kind, self.scale_kind, self.rounds_rows)


AnyMatrix = Tensor | GroupedWeight | StackedWeight
Epilogue = tuple[int, float, float]
"""An epilogue of a product's sums: C's number of it, a limit and an alpha; see `epilogue_of`."""
ROUNDED: Epilogue = (0, math.inf, 1.0)
"""Sums are rounded to the library's dtype."""
FLOAT32: Epilogue = (1, math.inf, 1.0)
"""Sums stay float32."""


def epilogue_of(act: Activation) -> Epilogue:
    """Return an activation of a product's sums as an epilogue."""
    number = ("relu2", "silu", "gelu", "swiglu").index(act.kind)
    return 2 + number, math.inf if act.limit is None else act.limit, act.alpha


class PackedProducts(Protocol):
    """Products of packed weights, which only the C kernels have."""

    threads: int
    """The number of threads of a C function."""

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
        """Return x [T, K] Wᵀ + bias float32 [N] + residual [T, N]: [T, N], or [T, N / 2] behind
        gates.

        norm: float32 [K], scales of an RMS norm of x before the product. Sums are float32, rounded
        once. Of x [T, H, K] each head is multiplied by its own of H weights.
        """
        ...

    def packed_rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """Return rows [T, K] of a weight in codes, each value rounded once; ids: int64 [T]."""
        ...

    def norm(
        self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor:
        """Return the RMS norm of x [T, N] with scales float32 [N], plus residual [T, N], rounded
        once."""
        ...


def in_column_blocks(part: Tensor, gated: bool) -> Tensor:
    """Return quantization parameters [E, N, G] as [E, blocks, G, 32], in the order of a block's
    columns.

    gated: the first half of the rows are gates; a block has 16 of them and their 16 input rows.
    Rows are padded with zeros.
    """
    count, rows, groups = part.shape
    if gated:
        halves = part.view(count, 2, rows // 2, groups)
        padded = F.pad(halves, (0, 0, 0, -(rows // 2) % TILE_SIDE))
        blocks = padded.view(count, 2, -1, TILE_SIDE, groups).transpose(1, 2)
    else:
        padded = F.pad(part, (0, 0, 0, -rows % (2 * TILE_SIDE)))
        blocks = padded.view(count, -1, 2, TILE_SIDE, groups)
    return blocks.flatten(2, 3).transpose(2, 3).contiguous()


def advise_large_pages(tensor: Tensor) -> Tensor:
    """Request large pages for a tensor, so that reads miss the TLB less often; return it."""
    skipped = -tensor.data_ptr() % mmap.PAGESIZE
    if tensor.nbytes > LARGE_PAGE:
        address = tensor.data_ptr() + skipped
        size = tensor.nbytes - skipped
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE
        )
    return tensor


def tile_steps(width: int, depth: int, gated: bool) -> int:
    """Return the steps of 32 columns (16 and their gates if gated) of a weight [width, depth]."""
    blocks = ceil_div(width // 2, TILE_SIDE) if gated else ceil_div(width, 2 * TILE_SIDE)
    return blocks * ceil_div(depth, TILE_DEPTH)
