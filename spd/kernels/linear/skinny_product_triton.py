# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The loops of the skinny kernels: a tile of weight rows times a tile of tokens, along K.

Weights of eight bits become the tokens' type on their way to the matrix unit, which is exact, and their
scales meet the float32 sums: after the loop where a row has one scale, after each step where it has one for
each GROUP_K columns (a multiple of the step, and one for GROUP_N rows together).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_weights(weight_rows, column, k, EVEN_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K]; every weight is read once, so it should leave the cache first."""
    at = weight_rows + column[None, :]
    if EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=column[None, :] < k, other=0.0, eviction_policy="evict_first")


@triton.jit
def row_begins(x, row, k):
    """Where rows of k values each begin [1, T]; all of them together may be more than 2**31 values."""
    return x + row[None, :].to(tl.int64) * k


@triton.jit
def load_tokens(x, columns, row_t, rows, column, k, EVEN_K: tl.constexpr):
    """[BLOCK_K, BLOCK_T], times the columns' own scales where there are any."""
    at = row_begins(x, row_t, k) + column[:, None]
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
    """Where each of a tile's weight rows begins [BLOCK_N, 1], from row `first` to the last of n."""
    row = tl.minimum(tl.arange(0, BLOCK_N), n - 1 - first)
    return w + first.to(tl.int64) * k + row[:, None] * k


@triton.jit
def part_of_k(k, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """First and last column, exclusive, of this program's part: whole blocks but for the very last."""
    if SPLIT_K == 1:
        return 0, k
    size = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = tl.program_id(2) * size
    return begin, tl.minimum(begin + size, k)


@triton.jit
def scale_rows(scale, first, n, k, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the scales of a tile's weight rows begin [BLOCK_N], as `rows_of_weight`."""
    row = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
    if GROUP_K == 0:
        at = scale + row
    else:
        at = scale + row // GROUP_N * tl.cdiv(k, GROUP_K)
    return at


@triton.jit
def take(total, weights, tokens, scales, start, GROUP_K: tl.constexpr):
    """total [BLOCK_N, BLOCK_T] plus weights times tokens, times the rows' scales of this step."""
    if scales is None:
        total = tl.dot(weights, tokens, total, input_precision="ieee")
    elif GROUP_K == 0:
        total = tl.dot(weights.to(tokens.dtype), tokens, total, input_precision="ieee")
    else:
        step = tl.dot(weights.to(tokens.dtype), tokens, input_precision="ieee")
        total += step * tl.load(scales + start // GROUP_K)[:, None]
    return total


@triton.jit
def scaled(total, scales, GROUP_K: tl.constexpr):
    """total [BLOCK_N, BLOCK_T] times the scale of each row, where a row has but one."""
    if scales is not None and GROUP_K == 0:
        total *= tl.load(scales)[:, None]
    return total


@triton.jit
def product(
    weight_rows, scale, columns, x, first, row_t, rows, n, k,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_T]: weight rows times tokens row_t, over this part of K."""
    begin, end = part_of_k(k, BLOCK_K, SPLIT_K)
    scales = scale
    if scale is not None:
        scales = scale_rows(scale, first, n, k, GROUP_N, GROUP_K, BLOCK_N)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        weights = load_weights(weight_rows, column, k, EVEN_K)
        tokens = load_tokens(x, columns, row_t, rows, column, k, EVEN_K)
        total = take(total, weights, tokens, scales, start, GROUP_K)
    return scaled(total, scales, GROUP_K)


@triton.jit
def gate_and_up(
    w, scale, columns, x, first, row_t, rows, n, k,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_T] each: gate rows from `first` on, and the up rows n below them.

    A tile that is too short for the matrix unit alone is multiplied with its partner, as one.
    """
    begin, end = part_of_k(k, BLOCK_K, SPLIT_K)
    if BLOCK_N >= 64:
        gate_rows = rows_of_weight(w, first, n, k, BLOCK_N)
        up_rows = rows_of_weight(w, n + first, 2 * n, k, BLOCK_N)
        gate_scales = scale
        up_scales = scale
        if scale is not None:
            gate_scales = scale_rows(scale, first, n, k, GROUP_N, GROUP_K, BLOCK_N)
            up_scales = scale_rows(scale, n + first, 2 * n, k, GROUP_N, GROUP_K, BLOCK_N)
        gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for start in range(begin, end, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            tokens = load_tokens(x, columns, row_t, rows, column, k, EVEN_K)
            weights = load_weights(gate_rows, column, k, EVEN_K)
            gate = take(gate, weights, tokens, gate_scales, start, GROUP_K)
            weights = load_weights(up_rows, column, k, EVEN_K)
            up = take(up, weights, tokens, up_scales, start, GROUP_K)
        gate = scaled(gate, gate_scales, GROUP_K)
        up = scaled(up, up_scales, GROUP_K)
    else:
        lane = tl.arange(0, 2 * BLOCK_N)
        row = tl.minimum(first + lane % BLOCK_N, n - 1) + lane // BLOCK_N * n
        both_rows = w + row[:, None].to(tl.int64) * k
        scales = scale
        if scale is not None:
            scales += row if GROUP_K == 0 else row // GROUP_N * tl.cdiv(k, GROUP_K)
        both = tl.zeros((2 * BLOCK_N, BLOCK_T), dtype=tl.float32)
        for start in range(begin, end, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            weights = load_weights(both_rows, column, k, EVEN_K)
            tokens = load_tokens(x, columns, row_t, rows, column, k, EVEN_K)
            both = take(both, weights, tokens, scales, start, GROUP_K)
        both = scaled(both, scales, GROUP_K)
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N, BLOCK_T)), (1, 2, 0)))
    return gate, up
