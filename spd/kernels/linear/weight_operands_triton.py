# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The operands of products, as kernels take them: pointers to a weight and to tokens, and their values.

CODE is the kind of a `TiledWeight`'s bytes; None: the weights are numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.capabilities import CODE_BITS, SUPER_BLOCK
from spd.kernels.linear.few_bits import DEFAULT_ZERO_POINTS
from spd.kernels.linear.tiled_weight import PAIRED_KINDS, SWAPPED_KINDS, UPPER_TILE
from spd.kernels.linear.unpack_triton import code_numbers, unpack_codes, uses_packed_instructions

_SUPER_BLOCK = tl.constexpr(SUPER_BLOCK)


class WeightOperands(NamedTuple):
    """The tensors of a weight, None where there are none.

    A kernel has pointers in their place: to a tensor, or to some of its rows.
    """

    stored: Tensor
    upper: Tensor | None = None
    scales: Tensor | None = None
    zeros: Tensor | None = None
    minima: Tensor | None = None
    factors: Tensor | None = None
    columns: Tensor | None = None


@triton.constexpr_function
def per_byte(code):
    """Return the number of codes in a byte, upper bits aside."""
    return 2 if code in PAIRED_KINDS else 1


@triton.constexpr_function
def swaps_middle_bytes(code):
    """True if the middle two of every four bytes of codes are swapped: see `tiled_weight`."""
    return code in SWAPPED_KINDS


@triton.constexpr_function
def upper_bits(code):
    """Return the bits of a code that stand apart from the lower four."""
    return CODE_BITS[code] - 4 if code in ("int5", "int6") else 0


@triton.constexpr_function
def tile_columns(code, group):
    """Return the columns of blocks that one product multiplies: see `block_tile`."""
    return UPPER_TILE if code in ("int5", "int6") else group


@triton.constexpr_function
def is_blocked(scales):
    """True if scales are words of a step's, by the type of pointers to them."""
    return scales.element_ty in (tl.int32, tl.int64)


@triton.constexpr_function
def scaled_columns(scales, group, step):
    """Return the columns that one number of a row's scales is for, by the type of pointers to
    them."""
    return step if is_blocked(scales) else max(1, group)


@triton.constexpr_function
def zero_point(code, has_minima):
    """Return the zero point of codes where the weight stores none."""
    if has_minima or code not in DEFAULT_ZERO_POINTS:
        return 0
    return DEFAULT_ZERO_POINTS[code]


@triton.jit
def row_pointers(x, row, k):
    """Return pointers to rows of k values each [1, T]; all rows may have more than 2**31 values."""
    return x + row[None, :].to(tl.int64) * k


@triton.jit
def load_weights(weight_rows, column, k, EVEN_K: tl.constexpr):
    """Load weights [BLOCK_N, BLOCK_K], each read once and so the first to be evicted from the
    cache."""
    at = weight_rows + column[None, :]
    if EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=column[None, :] < k, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_tokens(x, columns, row_t, rows, column, k, EVEN_K: tl.constexpr):
    """Load tokens [BLOCK_K, BLOCK_T], multiplied by the columns' factors if not None."""
    at = row_pointers(x, row_t, k) + column[:, None]
    if EVEN_K:
        tokens = tl.load(at, mask=row_t[None, :] < rows, other=0.0)
    else:
        tokens = tl.load(at, mask=(row_t[None, :] < rows) & (column[:, None] < k), other=0.0)
    if columns is not None:
        factor = tl.load(columns + column, mask=column < k, other=0.0).to(tl.float32)
        tokens = (tokens.to(tl.float32) * factor[:, None]).to(tokens.dtype)
    return tokens


@triton.jit
def rows_of_weight(w, first, n, k, BLOCK_N: tl.constexpr):
    """Return pointers to a tile's weight rows [BLOCK_N, 1], from row `first` on, at most the last
    of n."""
    row = tl.minimum(tl.arange(0, BLOCK_N), n - 1 - first)
    return w + first.to(tl.int64) * k + row[:, None] * k


@triton.jit
def row_width(k, BLOCK_K: tl.constexpr, CODE: tl.constexpr):
    """Return the stride of weight rows: codes of four bits are two a byte, in full steps."""
    if per_byte(CODE) == 2:
        width = tl.cdiv(k, BLOCK_K) * (BLOCK_K // 2)
    else:
        width = k
    return width


@triton.jit
def upper_byte(column, TILE_K: tl.constexpr, CODE: tl.constexpr):
    """Return the first of the bytes that hold the upper bits of a column's tile, and of others."""
    return column // (TILE_K * (8 // upper_bits(CODE))) * TILE_K


@triton.jit
def scale_width(scales, k, GROUP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the stride of the rows of scales, and of zeros or minima."""
    if GROUP_K == 0:
        width = 1
    elif is_blocked(scales.dtype):
        width = tl.cdiv(k, BLOCK_K)
    else:
        width = tl.cdiv(k, GROUP_K)
    return width


@triton.jit
def places_of_rows(weight, row, k, GROUP_K: tl.constexpr, CODE: tl.constexpr, BLOCK_K):
    """Return how far from a weight's first one rows have their scales, factors and upper bits.

    Zeros and minima have their places as scales do. The operands at these places are put together
    where they are used, for no function of Triton before 3.7 returns a tuple with a None.
    """
    scales_at = row
    factors_at = row
    upper_at = row
    if weight.scales is not None:
        scales_at = row * scale_width(weight.scales, k, GROUP_K, BLOCK_K)
    if weight.factors is not None:
        factors_at = row * tl.cdiv(k, _SUPER_BLOCK)
    if weight.upper is not None:
        TILE_K: tl.constexpr = tile_columns(CODE, GROUP_K)
        beyond = k + TILE_K * (8 // upper_bits(CODE)) - 1
        upper_at = row * upper_byte(beyond, TILE_K, CODE)
    return scales_at, factors_at, upper_at


@triton.jit
def code_values(
    codes, upper, zeros, HIGH: tl.constexpr, UPPER_SHIFT: tl.constexpr, CODE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the values of codes uint8 [N, K], exact in a type; zeros uint8, broadcast to them.

    HIGH: codes are the upper half of each byte, else the lower one, where a byte holds two. upper:
    uint8 [N, K], in which the upper bits of codes begin at UPPER_SHIFT; None where there are none.
    """
    if CODE != "int8" and uses_packed_instructions(DTYPE):
        number = unpack_codes(codes, zeros, upper, CODE, HIGH, UPPER_SHIFT, DTYPE)
    else:
        if swaps_middle_bytes(CODE):
            fours: tl.constexpr = (codes.shape[0], codes.shape[1] // 4, 2, 2)
            codes = tl.reshape(tl.permute(tl.reshape(codes, fours), (0, 1, 3, 2)), codes.shape)
        if per_byte(CODE) == 2:
            codes = codes >> 4 if HIGH else codes & 15
        if upper is not None:
            codes = codes | (upper >> UPPER_SHIFT & ((1 << upper_bits(CODE)) - 1)) << 4
        number = code_numbers(codes, CODE)
        if CODE != "e2m1" and CODE != "e4m3":
            number -= zeros.to(tl.float32)
    return number.to(DTYPE)
