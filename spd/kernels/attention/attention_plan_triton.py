# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The chunks of a context on the device, and the kernel that lists what a pass has to attend.

Chunks are ranges of absolute positions: SMALL positions each, twice as many from TWICE_FROM on and
four times as many from LARGE_FROM on. A run is a number of neighbouring chunks of one slot, which
one program attends one after another. How many chunks a run has changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

RUN_COST = tl.constexpr(48.0)
"""Positions that a program attends in the time in which a run begins."""
RUN_STEPS = tl.constexpr(4)
"""Numbers of chunks of a run that are compared: 1, 2, 4, 8."""


@triton.jit
def chunk_of(position, SMALL: tl.constexpr, TWICE_FROM: tl.constexpr, LARGE_FROM: tl.constexpr):
    """Return the chunk that holds a position."""
    small = tl.minimum(position, TWICE_FROM)
    twice = tl.minimum(position, LARGE_FROM) - small
    return small // SMALL + twice // (2 * SMALL) + (position - small - twice) // (4 * SMALL)


@triton.jit
def chunk_begin(chunk, SMALL: tl.constexpr, TWICE_FROM: tl.constexpr, LARGE_FROM: tl.constexpr):
    """Return the first position of a chunk."""
    FEW: tl.constexpr = TWICE_FROM // SMALL
    MANY: tl.constexpr = FEW + (LARGE_FROM - TWICE_FROM) // (2 * SMALL)
    return (chunk + tl.maximum(chunk - FEW, 0) + 2 * tl.maximum(chunk - MANY, 0)) * SMALL


@triton.jit
def chunk_size(position, SMALL: tl.constexpr, TWICE_FROM: tl.constexpr, LARGE_FROM: tl.constexpr):
    """Return the size of the chunk that holds a position."""
    return tl.where(
        position < TWICE_FROM, SMALL, tl.where(position < LARGE_FROM, 2 * SMALL, 4 * SMALL)
    )


@triton.jit
def first_chunk(position, SLIDING, SMALL, TWICE_FROM, LARGE_FROM):
    """Return the chunk that holds the first position that a row attends to."""
    return chunk_of(tl.maximum(position - (SLIDING - 1), 0), SMALL, TWICE_FROM, LARGE_FROM)


@triton.jit
def classes_of_runs(is_slot, first, end, run, FEW: tl.constexpr, MANY: tl.constexpr):
    """Return how many runs, of chunks [first, end) of each slot, begin with a small chunk, with one
    twice as large, and with a large one.

    A slot without chunks has one run, of nothing; what is no slot has none.
    """
    begin = first // run
    stop = tl.where(is_slot, tl.maximum(tl.cdiv(end, run), begin + 1), begin)
    few = tl.cdiv(FEW, run)
    many = tl.cdiv(MANY, run)
    small = tl.minimum(stop, few) - tl.minimum(begin, few)
    below = tl.minimum(stop, many) - tl.minimum(begin, many)
    return small, below - small, stop - begin - below


@triton.jit
def add_class(cost, total, runs, tiles, run_cost, programs):
    """Return cost and total after the slots' runs of run_cost each, no larger than those before.

    Programs take the largest first, so that the last to end has at most one run more than a fair
    part.
    """
    total += tl.sum(runs).to(tl.float32) * tiles * run_cost
    return tl.maximum(cost, tl.ceil(total / (programs * run_cost)) * run_cost), total


@triton.jit
def time_of_runs(
    is_slot, first, end, tiles, programs, RUN: tl.constexpr, SMALL: tl.constexpr,
    FEW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Return the time of all slots' runs of RUN chunks, in positions of one program."""
    small, twice, large = classes_of_runs(is_slot, first, end, RUN, FEW, MANY)
    SIZE: tl.constexpr = RUN * SMALL
    cost, total = add_class(0.0, 0.0, large, tiles, RUN_COST + 4 * SIZE, programs)
    cost, total = add_class(cost, total, twice, tiles, RUN_COST + 2 * SIZE, programs)
    cost, total = add_class(cost, total, small, tiles, RUN_COST + SIZE, programs)
    return cost


@triton.jit
def chunks_per_run(
    is_slot, first, end, tiles, programs, MAX_RUN: tl.constexpr, SMALL: tl.constexpr,
    FEW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Return the number of chunks of a run with which the slots' chunks take the least time.

    tiles: programs that each chunk occupies.
    """
    best = 1
    best_cost = time_of_runs(is_slot, first, end, tiles, programs, 1, SMALL, FEW, MANY)
    for step in tl.static_range(1, RUN_STEPS):
        if 2**step <= MAX_RUN:
            cost = time_of_runs(is_slot, first, end, tiles, programs, 2**step, SMALL, FEW, MANY)
            best = tl.where(cost < best_cost, 2**step, best)
            best_cost = tl.minimum(cost, best_cost)
    return best


@triton.jit
def seen_chunks(
    positions, valid, row_last, is_slot, queries, max_chunks, SMALL: tl.constexpr,
    TWICE_FROM: tl.constexpr, LARGE_FROM: tl.constexpr, SLIDING: tl.constexpr,
):  # fmt: skip
    """Return each slot's last position, -1 if none, and the chunks [first, end) that its rows
    see."""
    SLOTS: tl.constexpr = is_slot.shape[0]
    last_positions = tl.full((SLOTS,), -1, tl.int32)
    first_positions = tl.full((SLOTS,), 2**31 - 1, tl.int32)
    for q in range(queries):
        at = tl.arange(0, SLOTS) * queries + q
        is_valid = tl.load(valid + at, mask=is_slot, other=0) != 0
        ends = positions if row_last is None else row_last
        end = tl.load(ends + at, mask=is_valid, other=-1).to(tl.int32)
        last_positions = tl.maximum(last_positions, end)
        if SLIDING is not None:
            begin = tl.load(positions + at, mask=is_valid, other=2**31 - 1).to(tl.int32)
            first_positions = tl.minimum(first_positions, begin)
    reached = tl.minimum(chunk_of(last_positions, SMALL, TWICE_FROM, LARGE_FROM) + 1, max_chunks)
    end = tl.where(last_positions >= 0, reached, 0)
    first = tl.zeros((SLOTS,), tl.int32)
    if SLIDING is not None:
        skipped = first_chunk(first_positions, SLIDING, SMALL, TWICE_FROM, LARGE_FROM)
        first = tl.minimum(skipped, end)
    return last_positions, first, end


@triton.jit
def list_runs(
    items, slot, run, begin, stop, first_small, first_twice, first_large, BLOCK: tl.constexpr,
    FEW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Store a slot's runs [begin, stop), those of each size from its place on."""
    few = tl.maximum(begin, tl.minimum(stop, tl.cdiv(FEW, run)))
    many = tl.maximum(begin, tl.minimum(stop, tl.cdiv(MANY, run)))
    for start in range(begin, stop, BLOCK):
        index = start + tl.arange(0, BLOCK)
        at = tl.where(
            index < few,
            first_small + index - begin,
            tl.where(index < many, first_twice + index - few, first_large + index - many),
        )
        tl.store(items + at, (slot << 16) | (index * run), mask=index < stop)


@triton.jit(
    do_not_specialize=["slots", "queries", "max_chunks", "tiles", "programs"],
    do_not_specialize_on_alignment=["positions", "valid", "row_last"],
)
def plan_attention_kernel(
    positions, valid, row_last, last, runs, items, counts, arrived, slots, queries, max_chunks,
    tiles, programs,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, MAX_RUN: tl.constexpr, SMALL: tl.constexpr,
    TWICE_FROM: tl.constexpr, LARGE_FROM: tl.constexpr, SLIDING: tl.constexpr,
):  # fmt: skip
    """List one slot's runs by their first chunks, and zero its counters.

    Large chunks of all slots come first, then those half as large, so that no program ends on a
    large one. A slot without chunks has a run too, whose program writes its zeros.
    """
    FEW: tl.constexpr = TWICE_FROM // SMALL
    MANY: tl.constexpr = FEW + (LARGE_FROM - TWICE_FROM) // (2 * SMALL)
    slot = tl.program_id(0)
    slot_ids = tl.arange(0, SLOTS)
    is_slot = slot_ids < slots
    last_positions, first, end = seen_chunks(
        positions, valid, row_last, is_slot, queries, max_chunks, SMALL, TWICE_FROM, LARGE_FROM,
        SLIDING,
    )  # fmt: skip
    run = chunks_per_run(is_slot, first, end, tiles, programs, MAX_RUN, SMALL, FEW, MANY)
    small, twice, large = classes_of_runs(is_slot, first, end, run, FEW, MANY)
    is_before = slot_ids < slot
    first_large = tl.sum(tl.where(is_before, large, 0))
    first_twice = tl.sum(large) + tl.sum(tl.where(is_before, twice, 0))
    first_small = tl.sum(large + twice) + tl.sum(tl.where(is_before, small, 0))
    is_own = slot_ids == slot
    begin = tl.sum(tl.where(is_own, first, 0)) // run
    stop = begin + tl.sum(tl.where(is_own, small + twice + large, 0))
    list_runs(
        items, slot, run, begin, stop, first_small, first_twice, first_large, BLOCK, FEW, MANY
    )  # fmt: skip
    tl.store(last + slot, tl.sum(tl.where(is_own, last_positions, 0)))
    tl.store(runs + slot, stop - begin)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        tl.store(arrived + slot * tiles + tile, 0, mask=tile < tiles)
    if slot == 0:
        tl.store(counts, tl.sum(small + twice + large))
        tl.store(counts + 1, run)
        tl.store(counts + 2, 0)
