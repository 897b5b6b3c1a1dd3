# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Steps of GGUF's blocks: their groups' scales and minima, their values, and their products by tokens.

See `tiled_weight` for the order in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from spd.kernels.capabilities import SUPER_BLOCK
from spd.kernels.linear.few_bits import BYTE_OFFSET
from spd.kernels.linear.tiled_weight import BLOCK_STEP
from spd.kernels.linear.unpack_triton import code_numbers, minus_ones_like
from spd.kernels.linear.weight_operands_triton import (
    code_values,
    load_tokens,
    load_weights,
    per_byte,
    swaps_middle_bytes,
    tile_columns,
    upper_bits,
    upper_byte,
    zero_point,
)

_SUPER_BLOCK = tl.constexpr(SUPER_BLOCK)
_BYTE_OFFSET = tl.constexpr(float(BYTE_OFFSET))
_HALF_MIN = tl.constexpr(0x00200000)
"""The bits of 2 ** -128 in float32: below a normal number's exponent."""


class BlockNumbers(NamedTuple):
    """What scales a step's groups: words, and factors float32; scales where there are none."""

    scales: tl.tensor
    minima: tl.tensor
    factor: tl.tensor
    minimum_factor: tl.tensor


@triton.jit
def float_of_bits(bits):
    """Return the float16 numbers in the lower halves of words, in float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def group_number(word, factor, shift, BITS: tl.constexpr, HAS_FACTOR: tl.constexpr):
    """Return scales or minima of `BITS` bits of words in float32: see `Codes`.

    factor: float32, of bytes that have one. `shift` is where they begin.
    """
    bits = (word >> shift).to(tl.int32)
    if HAS_FACTOR:
        number = factor * ((bits & 255).to(tl.float32) - _BYTE_OFFSET)
    elif BITS == 16:
        number = float_of_bits(bits)
    else:
        exponent = bits & 255
        normal = (exponent - 1) << 23
        number = tl.where(exponent < 2, _HALF_MIN << exponent, normal).to(tl.float32, bitcast=True)
    return number


@triton.constexpr_function
def number_bits(words, group):
    """Return the bits of a scale or minimum, by the type of a step's words."""
    return words.primitive_bitwidth * group // BLOCK_STEP


@triton.jit
def load_block_numbers(weight, start, BLOCK_K: tl.constexpr):
    """Load what scales a step's groups."""
    scales = tl.load(weight.scales + start // BLOCK_K)
    minima = scales
    factor = scales
    minimum_factor = scales
    if weight.minima is not None:
        minima = tl.load(weight.minima + start // BLOCK_K)
    if weight.factors is not None:
        factors = tl.load(weight.factors + start // _SUPER_BLOCK)
        if weight.minima is not None:
            factor = float_of_bits(factors)
            minimum_factor = float_of_bits(factors >> 16)
        else:
            factor = factors.to(tl.float32)
            minimum_factor = factor
    return BlockNumbers(scales, minima, factor, minimum_factor)


@triton.jit
def block_values(weight, column, GROUP_K: tl.constexpr, CODE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the values float32 of columns of a row of GGUF's blocks, as ggml computes them."""
    TILE_K: tl.constexpr = tile_columns(CODE, GROUP_K)
    BITS: tl.constexpr = number_bits(weight.scales.dtype.element_ty, GROUP_K)
    HAS_FACTOR: tl.constexpr = weight.factors is not None
    tile = column // TILE_K
    if per_byte(CODE) == 2:
        byte = column % TILE_K
        if swaps_middle_bytes(CODE):
            byte = byte // 4 * 4 + byte % 2 * 2 + byte // 2 % 2
        code = tl.load(weight.stored + tile // 2 * TILE_K + byte)
        code = code >> (tile % 2 * 4).to(tl.uint8) & 15
    else:
        code = tl.load(weight.stored + column)
    if upper_bits(CODE) > 0:
        upper = tl.load(weight.upper + upper_byte(column, TILE_K, CODE) + column % TILE_K)
        upper = upper >> (tile * upper_bits(CODE) % 8).to(tl.uint8)
        code = code | (upper & ((1 << upper_bits(CODE)) - 1)) << 4
    numbers = load_block_numbers(weight, column, BLOCK_K)
    shift = column % BLOCK_K // GROUP_K * BITS
    value = code_numbers(code, CODE) - zero_point(CODE, weight.minima is not None)
    value *= group_number(numbers.scales, numbers.factor, shift, BITS, HAS_FACTOR)
    if weight.minima is not None:
        value -= group_number(numbers.minima, numbers.minimum_factor, shift, BITS, HAS_FACTOR)
    return value


@triton.jit
def add_block_product(
    total, weight, x, row_t, rows, start, k, GROUP_K: tl.constexpr, CODE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K,
):  # fmt: skip
    """Return total [BLOCK_N, BLOCK_T] plus a step of GGUF's blocks by tokens, group by group.

    A group's sum is scaled, and the sum of its tokens, times its minimum, is taken off. That sum is
    a product by -1, so that tokens are added in the same order as in any product.
    """
    IN_BYTE: tl.constexpr = per_byte(CODE)
    TILE_K: tl.constexpr = tile_columns(CODE, GROUP_K)
    DTYPE: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = number_bits(weight.scales.dtype.element_ty, GROUP_K)
    HAS_FACTOR: tl.constexpr = weight.factors is not None
    numbers = load_block_numbers(weight, start, BLOCK_K)
    zero = tl.full((1, 1), zero_point(CODE, weight.minima is not None), tl.uint8)
    upper = weight.upper
    part = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for tile in tl.static_range(BLOCK_K // TILE_K):
        column = start + tile * TILE_K + tl.arange(0, TILE_K)
        if IN_BYTE == 1:
            codes = load_weights(weight.stored, column, k, EVEN_K)
        elif tile % 2 == 0:
            byte = start // 2 + tile // 2 * TILE_K + tl.arange(0, TILE_K)
            codes = tl.load(weight.stored + byte[None, :], eviction_policy="evict_first")
        if upper_bits(CODE) > 0 and tile * upper_bits(CODE) % 8 == 0:
            byte = upper_byte(start + tile * TILE_K, TILE_K, CODE) + tl.arange(0, TILE_K)
            upper = tl.load(weight.upper[:, None] + byte[None, :])
        tokens = load_tokens(x, weight.columns, row_t, rows, column, k, EVEN_K)
        values = code_values(
            codes, upper, zero, tile % 2 == 1, tile * upper_bits(CODE) % 8, CODE, DTYPE
        )
        part = tl.dot(values, tokens, part, input_precision="ieee")
        shift = tile * TILE_K // GROUP_K * BITS
        if (tile + 1) * TILE_K % GROUP_K == 0:
            scale = group_number(numbers.scales, numbers.factor, shift, BITS, HAS_FACTOR)
            total = tl.fma(part, scale[:, None], total)
            part = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        if weight.minima is not None:
            sums = tl.dot(minus_ones_like(codes, DTYPE), tokens, sums, input_precision="ieee")
            if (tile + 1) * TILE_K % GROUP_K == 0:
                minimum = group_number(
                    numbers.minima, numbers.minimum_factor, shift, BITS, HAS_FACTOR
                )
                total = tl.fma(sums, minimum[:, None], total)
                sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    return total
