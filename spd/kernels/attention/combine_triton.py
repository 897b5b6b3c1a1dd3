# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The sums of a row's chunks combined, by the last program of a tile or by a kernel of its own."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from spd.kernels.arrivals_triton import last_to_arrive
from spd.kernels.attention.attention_plan_triton import chunk_of, first_chunk
from spd.kernels.overlap_triton import wait_and_release

LOG2_E = math.log2(math.e)
"""Softmax weights are computed by exp2, so that the scale of scores includes this factor."""
_LOG2_E = tl.constexpr(LOG2_E)
EMPTY_MAXIMUM = tl.constexpr(-1.0e30)
"""The maximum of no scores: finite, so that a row without keys subtracts without NaN."""
UNROLLED = tl.constexpr(4)
"""Chunks whose values are loaded at the same time."""


INTERPRETED = triton.knobs.runtime.interpret
"""True if kernels run in the interpreter, which has no assembler."""


@triton.constexpr_function
def is_interpreted():
    """Return `INTERPRETED`."""
    return INTERPRETED


@triton.jit
def store_in_place(pointers, values, mask):
    """Store float32 values from the threads that hold them.

    A store of Triton's moves values between threads first, for which a loop's shared memory would
    have to be larger by a tile.
    """
    if is_interpreted():
        tl.store(pointers, values, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [pointers.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_last_keys(row_last, token, mask, position):
    """Load the last keys of rows at their tokens; their positions where row_last is None."""
    end = position
    if row_last is not None:
        end = tl.load(row_last + token, mask=mask, other=-1).to(tl.int32)
    return end


@triton.jit
def weighted_sum(
    partial, stats, first, begin, end, maximum, count, chunk_rows, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the weighted sums [R, BLOCK_D] of `count` chunks, from begin [R] on, before end [R].

    first: each row of the first chunk; the same of the next is chunk_rows behind. maximum: what
    weights are relative to.
    """
    column = tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros((first.shape[0], BLOCK_D), tl.float32)
    for index in tl.range(0, count, loop_unroll_factor=UNROLLED):
        chunk = begin + index
        inside = chunk < end
        at = first + chunk.to(tl.int64) * chunk_rows
        peak = tl.load(stats + at * 2, mask=inside, other=EMPTY_MAXIMUM, cache_modifier=".cg")
        weight = tl.where(inside, tl.exp2(peak - maximum), 0.0)
        values = partial + at[:, None] * D + column
        x = tl.load(values, mask=inside[:, None] & (column < D), other=0.0, cache_modifier=".cg")
        total += weight[:, None] * x
    return total


@triton.jit
def combine_rows(
    partial, stats, positions, valid, row_last, sinks, out, slot, head, row, queries, max_chunks,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, SMALL: tl.constexpr, TWICE_FROM: tl.constexpr, LARGE_FROM: tl.constexpr,
    SLIDING: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of a key head's rows [R], BLOCK at a time; an invalid row gives zeros.

    Other programs have stored them, so loads go past the first-level cache.
    """
    rows = queries * GROUPS
    is_row = row < rows
    column = tl.arange(0, BLOCK_D)[None, :]
    token = slot * queries + row // GROUPS
    query_head = head * GROUPS + row % GROUPS
    position = tl.load(positions + token, mask=is_row, other=0).to(tl.int32)
    end = load_last_keys(row_last, token, is_row, position)
    reached = tl.minimum(chunk_of(end, SMALL, TWICE_FROM, LARGE_FROM) + 1, max_chunks)
    chunks = tl.where(tl.load(valid + token, mask=is_row, other=0) != 0, reached, 0)
    maximum = tl.full(row.shape, EMPTY_MAXIMUM, tl.float32)
    total = tl.zeros(row.shape, tl.float32)
    if sinks is not None:
        maximum = tl.load(sinks + query_head, mask=is_row, other=0.0) * _LOG2_E
        total += 1.0
    acc = tl.zeros((row.shape[0], BLOCK_D), tl.float32)
    begin = tl.zeros(row.shape, tl.int32)
    if SLIDING is not None:
        begin = first_chunk(position, SLIDING, SMALL, TWICE_FROM, LARGE_FROM)
    count = tl.max(chunks - begin, 0)
    first = (slot * max_chunks * K + head) * rows + row
    for start in range(0, count, BLOCK):
        chunk = (begin + start)[:, None] + tl.arange(0, BLOCK)[None, :]
        inside = chunk < chunks[:, None]
        of_chunk = stats + (first[:, None] + chunk.to(tl.int64) * (K * rows)) * 2
        peak = tl.load(of_chunk, mask=inside, other=EMPTY_MAXIMUM, cache_modifier=".cg")
        sums = tl.load(of_chunk + 1, mask=inside, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(peak, 1))
        weights = tl.where(inside, tl.exp2(peak - new_maximum[:, None]), 0.0)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights * sums, 1)
        block = weighted_sum(
            partial, stats, first, begin + start, chunks, new_maximum,
            tl.minimum(count - start, BLOCK), K * rows, D, BLOCK_D,
        )  # fmt: skip
        acc = acc * rescale[:, None] + block
        maximum = new_maximum
    acc = acc / tl.where(chunks > 0, total, 1.0)[:, None]
    to = out + (token * (K * GROUPS) + query_head)[:, None] * D + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=is_row[:, None] & (column < D))


@triton.jit
def combine_last(
    arrived, runs, partial, stats, positions, valid, row_last, sinks, out, slot, head, first_row, queries,
    max_chunks,
    K, GROUPS, D, TILE, ROWS: tl.constexpr, BLOCK, BLOCK_D, SMALL, TWICE_FROM, LARGE_FROM, SLIDING,
):  # fmt: skip
    """Combine the chunks of a key head's TILE rows from first_row on, ROWS at a time, in the
    program that ends the last of their runs.

    arrived, runs: pointers to the number of those that have ended, and of all.
    """
    if last_to_arrive(arrived, 0, tl.load(runs)):
        for start in range(first_row, tl.minimum(first_row + TILE, queries * GROUPS), ROWS):
            combine_rows(
                partial, stats, positions, valid, row_last, sinks, out, slot, head,
                start + tl.arange(0, ROWS), queries, max_chunks, K, GROUPS, D, BLOCK, BLOCK_D, SMALL,
                TWICE_FROM, LARGE_FROM, SLIDING,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["queries", "max_chunks"],
    do_not_specialize_on_alignment=["positions", "valid", "row_last"],
)
def combine_chunks_kernel(
    partial, stats, positions, valid, row_last, sinks, out, queries, max_chunks,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr, TWICE_FROM: tl.constexpr,
    LARGE_FROM: tl.constexpr, SLIDING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of ROWS rows of a key head: see `combine_rows`."""
    wait_and_release(PDL)
    slot = (tl.program_id(0) // K).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    combine_rows(
        partial, stats, positions, valid, row_last, sinks, out, slot, tl.program_id(0) % K, row,
        queries, max_chunks, K, GROUPS, D, BLOCK, BLOCK_D, SMALL, TWICE_FROM, LARGE_FROM, SLIDING,
    )  # fmt: skip
