# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `skinny_linear`: weights on the matrix unit's long side, tokens on its short one.

A program multiplies BLOCK_N weight rows by BLOCK_T tokens. The token tiles of one weight tile are
adjacent in the grid, (token tiles, weight tiles, parts of K), so that the second reads the weights
from cache. Rows beyond the last load as zeros; weight rows beyond the last read the last one and
are not stored. Only the masks, the grid's first axis and BLOCK_T depend on the number of rows.
BLOCK_T changes the layout of a tile over threads, so nothing may be summed in an order that depends
on the layout: see `pairwise_sum`.

With PDL a launch may begin before the previous kernel has ended, and waits for it before its first
read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spd.kernels.arrivals_triton import last_to_arrive
from spd.kernels.capabilities import SUPER_BLOCK
from spd.kernels.linear.skinny_product_triton import activated, gate_and_up, part_of_k, product
from spd.kernels.linear.weight_operands_triton import (
    per_byte,
    places_of_rows,
    row_pointers,
    row_width,
    rows_of_weight,
    scale_width,
    scaled_columns,
)
from spd.kernels.overlap_triton import prefetch, release, wait
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.philox_triton import (
    NO_RANK,
    draw_rank,
    gumbel4,
    gumbel_at,
    interleave4,
    noisy_logit,
    scaled_logit,
)

STREAM = tl.constexpr(STREAM_TARGET)
_SUPER_BLOCK = tl.constexpr(SUPER_BLOCK)


@triton.jit
def prefetch_weights(weight_rows, k, BLOCK_K, SPLIT_K, CODE, PDL):
    """Prefetch this part's first columns into L2 while the previous kernel ends.

    No kernel writes weights.
    """
    if PDL:
        LINE: tl.constexpr = 128 // (weight_rows.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = (4 * BLOCK_K // per_byte(CODE) + LINE - 1) // LINE
        begin, _ = part_of_k(k, BLOCK_K, SPLIT_K)
        line = begin // per_byte(CODE) + tl.arange(0, LINES) * LINE
        prefetch(weight_rows + tl.minimum(line, row_width(k, BLOCK_K, CODE) - 1)[None, :])


@triton.jit
def prefetch_scales(weight, first, n, k, GROUP_K, CODE, BLOCK_N, BLOCK_K, SPLIT_K, PDL):
    """Prefetch what scales a tile's first columns, as `prefetch_weights` does."""
    if PDL and weight.scales is not None:
        row = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1)
        scales_at, factors_at, _ = places_of_rows(weight, row, k, GROUP_K, CODE, BLOCK_K)
        column, _ = part_of_k(k, BLOCK_K, SPLIT_K)
        place = 0
        if GROUP_K > 0:
            width = scale_width(weight.scales, k, GROUP_K, BLOCK_K)
            numbered = scaled_columns(weight.scales.dtype, GROUP_K, BLOCK_K)
            place = tl.minimum(column // numbered, width - 1)
        prefetch(weight.scales + scales_at + place)
        if weight.zeros is not None:
            prefetch(weight.zeros + scales_at + place)
        if weight.minima is not None:
            prefetch(weight.minima + scales_at + place)
        if weight.factors is not None:
            prefetch(weight.factors + factors_at + column // _SUPER_BLOCK)


@triton.jit
def load_squares(squares, row_t, rows, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load the partial sums of rows [BLOCK_T, BLOCK_P], added up where they are more than
    BLOCK_P."""
    part = tl.arange(0, BLOCK_P)
    at = squares + row_t[:, None] * PARTS + part[None, :]
    inside = (row_t[:, None] < rows) & (part[None, :] < PARTS)
    total = tl.load(at, mask=inside, other=0.0)
    for start in tl.static_range(BLOCK_P, PARTS, BLOCK_P):
        inside = (row_t[:, None] < rows) & (start + part[None, :] < PARTS)
        total += tl.load(at + start, mask=inside, other=0.0)
    return total


@triton.jit
def pairwise_sum(x):
    """Return the sums [T] along the last axis of x [T, P], P a power of two up to 1024, pairwise.

    The order is explicit, for that of `tl.sum` depends on the layout of x over threads. Two
    summands have only one order. For products, the launch must disable fused multiply-add as well.
    """
    for _ in tl.static_range(10):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def norm_scale(partial_squares, k, epsilon):
    """Return 1 / root mean square of every row [T] from its partial sums [T, P]."""
    return tl.rsqrt(pairwise_sum(partial_squares) / k + epsilon)


@triton.jit
def store_partials(total, partials, tile, row_t, rows, SLOTS: tl.constexpr, SLOT, BLOCK_N, BLOCK_T):
    """Write this part's sums to slot SLOT of the tile's SLOTS in the workspace, token by token."""
    token = tl.arange(0, BLOCK_T)
    at = (
        (tile * SLOTS + SLOT) * (BLOCK_N * BLOCK_T)
        + tl.arange(0, BLOCK_N)[:, None]
        + token[None, :] * BLOCK_N
    )
    tl.store(partials + at, total, mask=row_t[None, :] < rows)


@triton.jit
def sum_partials(
    partials, tile, row_t, rows, FIRST: tl.constexpr, SLOTS, STEP: tl.constexpr, BLOCK_N, BLOCK_T
):
    """Return the sum of the tile's slots FIRST, FIRST + STEP, ..., always in that order."""
    token = tl.arange(0, BLOCK_T)
    at = partials + tile * SLOTS * (BLOCK_N * BLOCK_T)
    at += tl.arange(0, BLOCK_N)[:, None] + token[None, :] * BLOCK_N
    mask = row_t[None, :] < rows
    total = tl.load(at + FIRST * BLOCK_N * BLOCK_T, mask=mask, other=0.0, cache_modifier=".cg")
    for slot in tl.static_range(FIRST + STEP, SLOTS, STEP):
        total += tl.load(at + slot * BLOCK_N * BLOCK_T, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    weight, x, y, bias, squares, residual, squares_out, partials, counters, rows, n, k, y_stride,
    epsilon,
    GROUP_K: tl.constexpr, CODE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store y = x Wᵀ, scaled by the norm if squares is not None, plus bias, plus residual.

    It also stores the squares of y. Rows of y may be columns of wider ones, y_stride apart.
    """
    first = tl.program_id(1) * BLOCK_N
    weight_rows = rows_of_weight(weight.stored, first, n, row_width(k, BLOCK_K, CODE), BLOCK_N)
    prefetch_weights(weight_rows, k, BLOCK_K, SPLIT_K, CODE, PDL)
    prefetch_scales(weight, first, n, k, GROUP_K, CODE, BLOCK_N, BLOCK_K, SPLIT_K, PDL)
    wait(PDL)
    row_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row_n = first + tl.arange(0, BLOCK_N)
    mask = (row_t[None, :] < rows) & (row_n[:, None] < n)
    # Loaded before the product, so that only the weights have to be waited for.
    if squares is not None:
        partial_squares = load_squares(squares, row_t, rows, PARTS, BLOCK_P)
    if bias is not None:
        shift = tl.load(bias + row_n, mask=row_n < n, other=0.0)
    if residual is not None:
        stream = tl.load(row_pointers(residual, row_t, n) + row_n[:, None], mask=mask, other=0.0)
    total = product(
        weight_rows, weight, None, x, first, row_t, rows, n, k,
        GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
    )  # fmt: skip
    release(PDL)
    if SPLIT_K > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        store_partials(
            total, partials, tile, row_t, rows, SPLIT_K, tl.program_id(2), BLOCK_N, BLOCK_T
        )
        if not last_to_arrive(counters, tile, SPLIT_K):
            return
        total = sum_partials(partials, tile, row_t, rows, 0, SPLIT_K, 1, BLOCK_N, BLOCK_T)
    if squares is not None:
        total *= norm_scale(partial_squares, k, epsilon)[None, :]
    if bias is not None:
        total += shift.to(tl.float32)[:, None]
    if residual is not None:
        total += stream.to(tl.float32)
    rounded = total.to(y.dtype.element_ty)
    tl.store(row_pointers(y, row_t, y_stride) + row_n[:, None], rounded, mask=mask)
    if squares_out is not None:
        value = tl.where(mask, rounded.to(tl.float32), 0.0)
        at_squares = squares_out + row_t * tl.num_programs(1) + tl.program_id(1)
        tl.store(at_squares, pairwise_sum(tl.trans(value * value)), mask=row_t < rows)


@triton.jit(do_not_specialize=["rows"])
def gate_up_kernel(
    weight, x, y, bias, squares, partials, counters, rows, n, k, epsilon,
    GROUP_K: tl.constexpr, CODE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store y [T, n] = `activated` of the normed x; weight rows 0..n are gates, n..2n inputs."""
    first = tl.program_id(1) * BLOCK_N
    row_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row_n = first + tl.arange(0, BLOCK_N)
    if bias is not None:
        gate_shift = tl.load(bias + row_n, mask=row_n < n, other=0.0)
        up_shift = tl.load(bias + n + row_n, mask=row_n < n, other=0.0)
    width = row_width(k, BLOCK_K, CODE)
    prefetch_weights(
        rows_of_weight(weight.stored, first, n, width, BLOCK_N), k, BLOCK_K, SPLIT_K, CODE, PDL
    )
    prefetch_weights(
        rows_of_weight(weight.stored, n + first, 2 * n, width, BLOCK_N),
        k,
        BLOCK_K,
        SPLIT_K,
        CODE,
        PDL,
    )
    prefetch_scales(weight, first, n, k, GROUP_K, CODE, BLOCK_N, BLOCK_K, SPLIT_K, PDL)
    prefetch_scales(weight, n + first, 2 * n, k, GROUP_K, CODE, BLOCK_N, BLOCK_K, SPLIT_K, PDL)
    wait(PDL)
    partial_squares = load_squares(squares, row_t, rows, PARTS, BLOCK_P)
    gate, up = gate_and_up(
        weight, None, x, first, row_t, rows, n, k,
        GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, SPLIT_K, EVEN_K,
    )  # fmt: skip
    release(PDL)
    if SPLIT_K > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        slot = tl.program_id(2) * 2
        store_partials(gate, partials, tile, row_t, rows, 2 * SPLIT_K, slot, BLOCK_N, BLOCK_T)
        store_partials(up, partials, tile, row_t, rows, 2 * SPLIT_K, slot + 1, BLOCK_N, BLOCK_T)
        if not last_to_arrive(counters, tile, SPLIT_K):
            return
        gate = sum_partials(partials, tile, row_t, rows, 0, 2 * SPLIT_K, 2, BLOCK_N, BLOCK_T)
        up = sum_partials(partials, tile, row_t, rows, 1, 2 * SPLIT_K, 2, BLOCK_N, BLOCK_T)
    scale = norm_scale(partial_squares, k, epsilon)[None, :]
    gate *= scale
    up *= scale
    if bias is not None:
        gate += gate_shift.to(tl.float32)[:, None]
        up += up_shift.to(tl.float32)[:, None]
    value = activated(gate, up, ACT, LIMIT, ALPHA)
    mask = (row_t[None, :] < rows) & (row_n[:, None] < n)
    tl.store(row_pointers(y, row_t, n) + row_n[:, None], value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "step", "window"])
def head_kernel(
    weight, x, logits, ranks, seed, position, step, temperature, window, ids, usable,
    rows, n, k,
    GROUP_K: tl.constexpr, CODE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store logits [T, n], or if logits is None the rank of each tile's draw [T, tiles].

    Weight row n is that of token n, or of ids[n] below `usable` if ids is not None. Row t belongs
    to slot t // window, and draws at position[slot] + step + t % window. The launch must disable
    fused multiply-add, so that the draw is compiled as written.
    """
    first = tl.program_id(1) * BLOCK_N
    row_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row_n = first + tl.arange(0, BLOCK_N)
    weight_rows = rows_of_weight(weight.stored, first, n, row_width(k, BLOCK_K, CODE), BLOCK_N)
    prefetch_weights(weight_rows, k, BLOCK_K, 1, CODE, PDL)
    prefetch_scales(weight, first, n, k, GROUP_K, CODE, BLOCK_N, BLOCK_K, 1, PDL)
    wait(PDL)
    if logits is None:
        slot = row_t // window
        heat = tl.load(temperature + slot, mask=row_t < rows, other=0.0)
        token = row_n
        is_drawable = row_n < n
        if ids is not None:
            token = tl.load(ids + row_n, mask=is_drawable, other=0).to(tl.int32)
            is_drawable = is_drawable & (token < usable)
    score = product(
        weight_rows, weight, None, x, first, row_t, rows, n, k,
        GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, 1, EVEN_K,
    )  # fmt: skip
    release(PDL)
    if logits is not None:
        mask = (row_t[None, :] < rows) & (row_n[:, None] < n)
        tl.store(row_pointers(logits, row_t, n) + row_n[:, None], score, mask=mask)
    else:
        if tl.max(heat, 0) > 0:
            key = tl.load(seed + slot, mask=row_t < rows, other=0)[None, :]
            row_position = tl.load(position + slot, mask=row_t < rows, other=0)
            row_position = (row_position + step + row_t % window)[None, :]
            if ids is not None:
                noise = gumbel_at(key, row_position, STREAM, token[:, None])
            else:
                groups = first // 4 + tl.arange(0, BLOCK_N // 4)[:, None]
                noise0, noise1, noise2, noise3 = gumbel4(key, row_position, STREAM, groups)
                noise = interleave4(noise0, noise1, noise2, noise3)
            score = noisy_logit(scaled_logit(score, heat[None, :]), noise, heat[None, :])
        rank = tl.where(is_drawable[:, None], draw_rank(score, token[:, None]), NO_RANK)
        at = row_t * tl.num_programs(1) + tl.program_id(1)
        tl.store(ranks + at, tl.max(rank, 0), mask=row_t < rows)
