# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The loops of the skinny kernels: a tile of weight rows times a tile of tokens, along K.

Weights in int8 are converted to the tokens' type before the matrix unit, which is exact, and the
scales of their rows multiply the float32 sums after the loop.

CODE is the kind of a `TiledWeight`'s bytes; None: the weights are numbers. Byte j of a run of
four-bit codes holds the columns j and half a run behind it: each half is a separate tile, so
nothing is shuffled. GROUP_K is such a half, or a multiple of the step, which is a run. A step of
GGUF's blocks has several groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spd.kernels.linear.block_product_triton import add_block_product
from spd.kernels.linear.norm_gate import GELU_CUBE_FACTOR, GELU_SCALE
from spd.kernels.linear.weight_operands_triton import (
    WeightOperands,
    code_values,
    is_blocked,
    load_tokens,
    load_weights,
    per_byte,
    places_of_rows,
    row_width,
    rows_of_weight,
    zero_point,
)

_GELU_CUBE_FACTOR = tl.constexpr(GELU_CUBE_FACTOR)
_TANH_SCALE = tl.constexpr(2 * GELU_SCALE)
"""The scale of gelu's tanh as a sigmoid: tanh(x) is 2 * sigmoid(2 * x) - 1."""


@triton.jit
def part_of_k(k, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Return the columns [begin, end) of this program's part: full blocks except for the last."""
    if SPLIT_K == 1:
        return 0, k
    size = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = tl.program_id(2) * size
    return begin, tl.minimum(begin + size, k)


@triton.jit
def load_group(parameters, group, k, GROUP_K: tl.constexpr):
    """Load a group's scales or zeros [BLOCK_N, 1].

    0 beyond the last group, where there are no columns.
    """
    inside = tl.full((1,), group, tl.int32) < tl.cdiv(k, GROUP_K)
    return tl.load(parameters + group, mask=inside, other=0)[:, None]


@triton.jit
def load_zeros(zeros, group, k, GROUP_K: tl.constexpr, CODE: tl.constexpr):
    """Load a group's zero points uint8 [BLOCK_N, 1], or return the default one [1, 1]."""
    if zeros is None:
        return tl.full((1, 1), zero_point(CODE, False), tl.uint8)
    else:
        return load_group(zeros, group, k, GROUP_K)


@triton.constexpr_function
def columns_at_once(code, group, step):
    """Return the columns of a step that share a half of their bytes and a scale."""
    return step // 2 if per_byte(code) == 2 or group < step else step


@triton.jit
def load_scale(weight, group, k, GROUP_K: tl.constexpr):
    """Load a group's scales in float32 [BLOCK_N, 1]."""
    return load_group(weight.scales, group, k, GROUP_K).to(tl.float32)


@triton.jit
def add_code_product(
    total, weight, x, row_t, rows, start, k, GROUP_K, CODE: tl.constexpr, BLOCK_K, EVEN_K
):
    """Return total [BLOCK_N, BLOCK_T] plus a step of codes by tokens.

    A step has a group or a part of one, or a group in each half. Each group's sum is scaled in
    order.
    """
    HALF: tl.constexpr = columns_at_once(CODE, GROUP_K, BLOCK_K)
    DTYPE: tl.constexpr = x.dtype.element_ty
    column = start + tl.arange(0, HALF)
    group = start // GROUP_K
    zero = load_zeros(weight.zeros, group, k, GROUP_K, CODE)
    scale = load_scale(weight, group, k, GROUP_K)
    tokens = load_tokens(x, weight.columns, row_t, rows, column, k, EVEN_K)
    if per_byte(CODE) == 2:
        byte = start // 2 + tl.arange(0, HALF)
        codes = tl.load(weight.stored + byte[None, :], eviction_policy="evict_first")
    else:
        codes = load_weights(weight.stored, column, k, EVEN_K)
    values = code_values(codes, None, zero, False, 0, CODE, DTYPE)
    part = tl.dot(values, tokens, input_precision="ieee")
    if HALF < BLOCK_K:
        tokens = load_tokens(x, weight.columns, row_t, rows, column + HALF, k, EVEN_K)
        if per_byte(CODE) == 1:
            codes = load_weights(weight.stored, column + HALF, k, EVEN_K)
        if GROUP_K < BLOCK_K:
            total = tl.fma(part, scale, total)
            zero = load_zeros(weight.zeros, group + 1, k, GROUP_K, CODE)
            scale = load_scale(weight, group + 1, k, GROUP_K)
        values = code_values(codes, None, zero, per_byte(CODE) == 2, 0, CODE, DTYPE)
        if GROUP_K < BLOCK_K:
            part = tl.dot(values, tokens, input_precision="ieee")
        else:
            part = tl.dot(values, tokens, part, input_precision="ieee")
    return tl.fma(part, scale, total)


@triton.jit
def multiply_rows(
    weight_rows, weight, base, row, x, row_t, rows, k,
    GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
):  # fmt: skip
    """Return float32 [BLOCK_N, BLOCK_T]: weight rows times tokens row_t, over this part of K.

    weight_rows points to the values of rows `row` from `base` on, 64 bits wide, None for 0.
    """
    scales_at, factors_at, upper_at = places_of_rows(weight, row, k, GROUP_K, CODE, BLOCK_K)
    if base is not None:
        base_at, factors_base, upper_base = places_of_rows(weight, base, k, GROUP_K, CODE, BLOCK_K)
        scales_at += base_at
        factors_at += factors_base
        upper_at += upper_base
    weight = WeightOperands(
        weight_rows,
        weight.upper + upper_at if weight.upper is not None else None,
        weight.scales + scales_at if weight.scales is not None else None,
        weight.zeros + scales_at if weight.zeros is not None else None,
        weight.minima + scales_at if weight.minima is not None else None,
        weight.factors + factors_at if weight.factors is not None else None,
        weight.columns,
    )
    begin, end = part_of_k(k, BLOCK_K, SPLIT_K)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        if CODE is None:
            column = start + tl.arange(0, BLOCK_K)
            weights = load_weights(weight.stored, column, k, EVEN_K)
            tokens = load_tokens(x, weight.columns, row_t, rows, column, k, EVEN_K)
            total = tl.dot(weights.to(tokens.dtype), tokens, total, input_precision="ieee")
        elif is_blocked(weight.scales.dtype):
            total = add_block_product(
                total,
                weight,
                x,
                row_t,
                rows,
                start,
                k,
                GROUP_K,
                CODE,
                BLOCK_N,
                BLOCK_T,
                BLOCK_K,
                EVEN_K,
            )
        else:
            total = add_code_product(
                total, weight, x, row_t, rows, start, k, GROUP_K, CODE, BLOCK_K, EVEN_K
            )
    if weight.scales is not None and GROUP_K == 0:
        total *= tl.load(weight.scales)[:, None]
    return total


@triton.jit
def product(
    weight_rows, weight, base, x, first, row_t, rows, n, k,
    GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
):  # fmt: skip
    """Return `multiply_rows` of a tile's weight rows, from `first` on; weight_rows points to their
    values."""
    row = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
    return multiply_rows(
        weight_rows, weight, base, row, x, row_t, rows, k,
        GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
    )  # fmt: skip


@triton.jit
def gate_and_up(
    weight, base, x, first, row_t, rows, n, k,
    GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
):  # fmt: skip
    """Return the products of gate rows from `first` on and of the up rows n below: [BLOCK_N,
    BLOCK_T] each.

    base: see `multiply_rows`.

    Two tiles too short for the matrix unit are multiplied as one. Weights of tall ones have 16 bits
    or more.
    """
    width = row_width(k, BLOCK_K, CODE)
    stored = weight.stored
    if base is not None:
        stored += base * width
    if BLOCK_N >= 64:
        begin, end = part_of_k(k, BLOCK_K, SPLIT_K)
        gate_rows = rows_of_weight(stored, first, n, width, BLOCK_N)
        up_rows = rows_of_weight(stored, n + first, 2 * n, width, BLOCK_N)
        gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for start in range(begin, end, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            tokens = load_tokens(x, weight.columns, row_t, rows, column, k, EVEN_K)
            gate = tl.dot(
                load_weights(gate_rows, column, k, EVEN_K), tokens, gate, input_precision="ieee"
            )
            up = tl.dot(
                load_weights(up_rows, column, k, EVEN_K), tokens, up, input_precision="ieee"
            )
    else:
        lane = tl.arange(0, 2 * BLOCK_N)
        row = tl.minimum(first + lane % BLOCK_N, n - 1) + lane // BLOCK_N * n
        both_rows = stored + row[:, None].to(tl.int64) * width
        both = multiply_rows(
            both_rows, weight, base, row, x, row_t, rows, k,
            GROUP_K, CODE, 2 * BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
        )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N, BLOCK_T)), (1, 2, 0)))
    return gate, up


@triton.jit
def activated(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return a gated `Activation` in float32; NaN stays NaN."""
    if ACT == "swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
    if ACT == "gelu":
        exponent = (gate + gate * gate * gate * _GELU_CUBE_FACTOR) * _TANH_SCALE
    else:
        exponent = gate * ALPHA if ALPHA != 1.0 else gate
    activated_gate = gate / (1.0 + tl.exp(-exponent))
    if LIMIT is not None:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if ACT == "swiglu":
            up += 1.0
        else:
            activated_gate = tl.where(activated_gate > LIMIT, LIMIT, activated_gate)
    return activated_gate * up
