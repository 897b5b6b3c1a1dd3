# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The loops of the skinny kernels: a tile of weight rows times a tile of tokens, along K.

Weights in int8 are converted to the tokens' type before the matrix unit, which is exact, and the
scales of their rows multiply the float32 sums after the loop.

CODE is the kind of a `TiledWeight`'s bytes; None: the weights are numbers. Byte j of a step of
four-bit codes holds columns j and j + BLOCK_K / 2: each half is a separate tile, so nothing is
shuffled. GROUP_K is such a half, or a multiple of the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spd.kernels.linear.norm_gate import GELU_CUBE_FACTOR, GELU_SCALE
from spd.kernels.linear.unpack_triton import unpack_codes, uses_packed_instructions

_GELU_CUBE_FACTOR = tl.constexpr(GELU_CUBE_FACTOR)
_TANH_SCALE = tl.constexpr(2 * GELU_SCALE)
"""The scale of gelu's tanh as a sigmoid: tanh(x) is 2 * sigmoid(2 * x) - 1."""


@triton.constexpr_function
def per_byte(code):
    """Return the number of codes in a byte."""
    return 2 if code in ("int4", "e2m1") else 1


@triton.jit
def load_weights(weight_rows, column, k, EVEN_K: tl.constexpr):
    """Load weights [BLOCK_N, BLOCK_K], each read once and so the first to be evicted from the
    cache."""
    at = weight_rows + column[None, :]
    if EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=column[None, :] < k, other=0.0, eviction_policy="evict_first")


@triton.jit
def row_pointers(x, row, k):
    """Return pointers to rows of k values each [1, T]; all rows may have more than 2**31 values."""
    return x + row[None, :].to(tl.int64) * k


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
def part_of_k(k, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Return the columns [begin, end) of this program's part: full blocks except for the last."""
    if SPLIT_K == 1:
        return 0, k
    size = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = tl.program_id(2) * size
    return begin, tl.minimum(begin + size, k)


@triton.jit
def row_parameters(parameters, row, k, GROUP_K: tl.constexpr):
    """Return pointers to the scales or zeros of weight rows; None where there are none."""
    if parameters is not None:
        return parameters + row if GROUP_K == 0 else parameters + row * tl.cdiv(k, GROUP_K)


@triton.jit
def row_width(k, BLOCK_K: tl.constexpr, CODE: tl.constexpr):
    """Return the stride of weight rows: codes of four bits are two a byte, in full steps."""
    if per_byte(CODE) == 2:
        width = tl.cdiv(k, BLOCK_K) * (BLOCK_K // 2)
    else:
        width = k
    return width


@triton.jit
def code_values(codes, zeros, HIGH: tl.constexpr, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values of codes uint8 [N, K], exact in a type; zeros uint8 [N, 1], or None for 8
    or 128.

    HIGH: codes are the upper half of each byte, else the lower one, where a byte holds two.
    """
    if CODE != "int8" and uses_packed_instructions(DTYPE):
        if zeros is None:
            zeros = tl.full((1, 1), 8, tl.uint8)
        number = unpack_codes(codes, zeros, CODE, HIGH, DTYPE)
    elif CODE == "int4" or CODE == "int8":
        if CODE == "int4":
            codes = codes >> 4 if HIGH else codes & 15
        number = codes.to(tl.float32)
        if zeros is None:
            number -= 8.0 if CODE == "int4" else 128.0
        else:
            number -= zeros.to(tl.float32)
    elif CODE == "e2m1":
        codes = codes >> 4 if HIGH else codes
        twice = (
            0xC8643210 >> ((codes & 7).to(tl.uint32) * 4)
        ) & 15  # each magnitude's double in four bits
        number = twice.to(tl.float32) * 0.5
        number = tl.where((codes & 8) != 0, -number, number)
    else:
        size = (codes & 127).to(tl.int32)
        number = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        number = tl.where(
            size < 8, size.to(tl.float32) * 0.001953125, number
        )  # below 2**-6 no leading 1
        number = tl.where(codes >= 128, -number, number)
    return number.to(DTYPE)


@triton.jit
def load_group(parameters, group, k, GROUP_K: tl.constexpr):
    """Load a group's scales or zeros [BLOCK_N, 1].

    0 beyond the last group, where there are no columns.
    """
    if parameters is not None:
        inside = tl.full((1,), group, tl.int32) < tl.cdiv(k, GROUP_K)
        return tl.load(parameters + group, mask=inside, other=0)[:, None]


@triton.jit
def add_code_product(
    total,
    weight_rows,
    scales,
    zeros,
    columns,
    x,
    row_t,
    rows,
    start,
    k,
    GROUP_K,
    CODE,
    BLOCK_K,
    EVEN_K,
):
    """Return total [BLOCK_N, BLOCK_T] plus a step of codes by tokens.

    Each group's sum is scaled in order.
    """
    HALF: tl.constexpr = BLOCK_K // per_byte(CODE)
    DTYPE: tl.constexpr = x.dtype.element_ty
    column = start + tl.arange(0, HALF)
    tokens = load_tokens(x, columns, row_t, rows, column, k, EVEN_K)
    if per_byte(CODE) == 2:
        high_tokens = load_tokens(x, columns, row_t, rows, column + HALF, k, EVEN_K)
    group = start // GROUP_K
    zero = load_group(zeros, group, k, GROUP_K)
    scale = load_group(scales, group, k, GROUP_K).to(tl.float32)
    if per_byte(CODE) == 2:
        byte = start // 2 + tl.arange(0, HALF)
        codes = tl.load(weight_rows + byte[None, :], eviction_policy="evict_first")
        part = tl.dot(code_values(codes, zero, False, CODE, DTYPE), tokens, input_precision="ieee")
        if GROUP_K < BLOCK_K:
            total += part * scale
            zero = load_group(zeros, group + 1, k, GROUP_K)
            scale = load_group(scales, group + 1, k, GROUP_K).to(tl.float32)
            part = tl.dot(
                code_values(codes, zero, True, CODE, DTYPE), high_tokens, input_precision="ieee"
            )
        else:
            part = tl.dot(
                code_values(codes, zero, True, CODE, DTYPE),
                high_tokens,
                part,
                input_precision="ieee",
            )
    else:
        codes = load_weights(weight_rows, column, k, EVEN_K)
        part = tl.dot(code_values(codes, zero, False, CODE, DTYPE), tokens, input_precision="ieee")
    return total + part * scale


@triton.jit
def multiply_rows(
    weight_rows, scales, zeros, columns, x, row_t, rows, k,
    GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
):  # fmt: skip
    """Return float32 [BLOCK_N, BLOCK_T]: weight rows times tokens row_t, over this part of K."""
    begin, end = part_of_k(k, BLOCK_K, SPLIT_K)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        if CODE is None:
            column = start + tl.arange(0, BLOCK_K)
            weights = load_weights(weight_rows, column, k, EVEN_K)
            tokens = load_tokens(x, columns, row_t, rows, column, k, EVEN_K)
            total = tl.dot(weights.to(tokens.dtype), tokens, total, input_precision="ieee")
        else:
            total = add_code_product(
                total, weight_rows, scales, zeros, columns, x, row_t, rows, start, k,
                GROUP_K, CODE, BLOCK_K, EVEN_K,
            )  # fmt: skip
    if scales is not None and GROUP_K == 0:
        total *= tl.load(scales)[:, None]
    return total


@triton.jit
def product(
    weight_rows, scale, zero, columns, x, first, row_t, rows, n, k,
    GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
):  # fmt: skip
    """Return `multiply_rows` of a tile's weight rows, from `first` on."""
    row = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
    scales = row_parameters(scale, row, k, GROUP_K)
    zeros = row_parameters(zero, row, k, GROUP_K)
    return multiply_rows(
        weight_rows, scales, zeros, columns, x, row_t, rows, k,
        GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
    )  # fmt: skip


@triton.jit
def gate_and_up(
    w, scale, zero, columns, x, first, row_t, rows, n, k,
    GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
):  # fmt: skip
    """Return the products of gate rows from `first` on and of the up rows n below: [BLOCK_N,
    BLOCK_T] each.

    Two tiles too short for the matrix unit are multiplied as one. Weights of tall ones have 16 bits
    or more.
    """
    width = row_width(k, BLOCK_K, CODE)
    if BLOCK_N >= 64:
        begin, end = part_of_k(k, BLOCK_K, SPLIT_K)
        gate_rows = rows_of_weight(w, first, n, width, BLOCK_N)
        up_rows = rows_of_weight(w, n + first, 2 * n, width, BLOCK_N)
        gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for start in range(begin, end, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            tokens = load_tokens(x, columns, row_t, rows, column, k, EVEN_K)
            gate = tl.dot(
                load_weights(gate_rows, column, k, EVEN_K), tokens, gate, input_precision="ieee"
            )
            up = tl.dot(
                load_weights(up_rows, column, k, EVEN_K), tokens, up, input_precision="ieee"
            )
    else:
        lane = tl.arange(0, 2 * BLOCK_N)
        row = tl.minimum(first + lane % BLOCK_N, n - 1) + lane // BLOCK_N * n
        both_rows = w + row[:, None].to(tl.int64) * width
        scales = row_parameters(scale, row, k, GROUP_K)
        zeros = row_parameters(zero, row, k, GROUP_K)
        both = multiply_rows(
            both_rows, scales, zeros, columns, x, row_t, rows, k,
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
