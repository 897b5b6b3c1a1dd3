# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `window`: one launch each, one program a slot.

The clock is the GPU's global timer, and the host's under the interpreter.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from spd.kernels.launch import power_of_two
from spd.kernels.round.window import BEGAN, NUM_TIMES, Paging, RoundTensors, RoundWindow, Rows

_BEGAN = tl.constexpr(BEGAN)
_NUM_TIMES = tl.constexpr(NUM_TIMES)


@triton.jit
def write_time(times, counter, depth, now, chosen, COLUMN, COLUMNS, TIMER):
    """Write the timer, or `now` where there is none, to the round's row, in the chosen program only."""
    at = times + tl.load(counter) % depth * COLUMNS + COLUMN
    if TIMER:
        tl.store(at, cuda.globaltimer(), mask=chosen)
    else:
        tl.store(at, now, mask=chosen)


_VARYING = (
    "tokens_stride",
    "draft_stride",
    "table_stride",
    "table_width",
    "sampled_stride",
    "trash_slot",
    "k",
    "usable_vocab",
    "max_len",
    "limit",
    "width",
    "ahead",
    "step",
    "depth",
    "now",
)
"""What differs between calls of one model, and must therefore not choose a program."""


@triton.jit(do_not_specialize=_VARYING)
def mark_kernel(
    times, counter, depth, now, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, ADVANCE: tl.constexpr,
    TIMER: tl.constexpr,
):  # fmt: skip
    """One program: the time, then the counter."""
    write_time(times, counter, depth, now, True, COLUMN, COLUMNS, TIMER)
    if ADVANCE:
        tl.store(counter, tl.load(counter) + 1)


def timer_and_now(kernel: Any) -> tuple[bool, int]:
    """Whether a kernel can read the GPU's timer, and the time to write where it cannot."""
    compiled = isinstance(kernel, triton.JITFunction)
    return compiled, 0 if compiled else time.perf_counter_ns()


def mark_time(times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
    timer, now = timer_and_now(mark_kernel)
    constants = {"COLUMN": column, "COLUMNS": NUM_TIMES, "ADVANCE": advance, "TIMER": timer}
    mark_kernel[(1,)](times, counter, times.shape[0], now, **constants, num_warps=1)


@triton.jit
def page_slots(table_row, positions, valid, table_width, trash_slot, PAGE: tl.constexpr):
    """Where the KV of positions that are not negative lies; `trash_slot` where not valid."""
    columns = tl.minimum(positions // PAGE, table_width - 1)
    pages = tl.load(table_row + columns, mask=valid, other=0)
    return tl.where(valid, pages * PAGE + positions % PAGE, trash_slot)


@triton.jit(do_not_specialize=_VARYING)
def window_kernel(
    tokens, length, draft, num_drafts, active, length_limit, page_table, out_ids, out_positions,
    out_valid, out_slots, out_draft, out_count, times, counter, draft_cap, tokens_stride, draft_stride,
    table_stride, table_width, k, usable_vocab, max_len, trash_slot, depth, now,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TIMER: tl.constexpr,
):  # fmt: skip
    """Lane i is row i of the slot's window; draft i - 1 stands in it."""
    s = tl.program_id(0).to(tl.int64)
    write_time(times, counter, depth, now, s == 0, _BEGAN, _NUM_TIMES, TIMER)
    row = tl.arange(0, ROWS)
    inside = row <= k
    drafted = (row >= 1) & inside
    ids = tl.load(draft + s * draft_stride + row - 1, mask=drafted, other=0)
    size = tl.load(length + s)
    limit = tl.load(length_limit + s)
    proposed = tl.minimum(tl.load(num_drafts + s), tl.load(draft_cap + s))
    live = tl.load(active + s) != 0
    last = tl.load(tokens + s * tokens_stride + size - 1)
    known = (ids >= 0) & (ids < usable_vocab)
    leading = tl.min(tl.where(drafted & (known == 0), row - 1, k))
    room = tl.maximum(limit - size - 1, 0)
    count = tl.minimum(tl.minimum(tl.minimum(tl.maximum(proposed, 0), k), leading), room)
    ids = tl.where(known, ids, 0)
    positions = tl.minimum(size - 1 + row, max_len - 1)
    valid = row <= tl.where(live, count, -1)
    slots = page_slots(
        page_table + s * table_stride, positions, valid, table_width, trash_slot, PAGE
    )
    at = s * (k + 1) + row
    tl.store(out_ids + at, tl.where(row == 0, last, ids), mask=inside)
    tl.store(out_positions + at, positions, mask=inside)
    tl.store(out_valid + at, valid, mask=inside)
    tl.store(out_slots + at, slots, mask=inside)
    tl.store(out_draft + s * k + row - 1, ids, mask=drafted)
    tl.store(out_count + s, count)


def _empty(length: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for positions, whether they are valid, and their slots in the pools."""
    positions, places = (length.new_empty(length.shape[0], width) for _ in range(2))
    return positions, torch.empty_like(positions, dtype=torch.bool), places


def round_window(state: RoundTensors, k: int, paging: Paging, usable_vocab: int) -> RoundWindow:
    tokens = state.tokens
    draft = state.draft
    table = state.page_table
    length = state.length
    slots = length.shape[0]
    timer, now = timer_and_now(window_kernel)
    ids = length.new_empty(slots, k + 1)
    room = _empty(length, k + 1)
    window = RoundWindow(ids, *room, length.new_empty(slots, k), torch.empty_like(length))
    inputs = (tokens, length, draft, state.num_drafts, state.active, state.length_limit, table)
    clock = (state.times, state.counter, state.draft_cap)
    strides = (tokens.stride(0), draft.stride(0), table.stride(0), table.shape[1])
    sizes = (k, usable_vocab, paging.limit, paging.trash_slot, state.times.shape[0], now)
    constants = {"PAGE": paging.page_size, "ROWS": power_of_two(k + 1), "TIMER": timer}
    window_kernel[(slots,)](
        *inputs, *vars(window).values(), *clock, *strides, *sizes, **constants, num_warps=1
    )
    return window


@triton.jit
def store_rows(
    out_positions, out_valid, out_slots, at, positions, inside, live, first, draft_limit, table_row,
    table_width, limit, trash_slot, PAGE: tl.constexpr,
):  # fmt: skip
    """Write rows at `positions`, which may lie outside the limits, to index `at` of the outputs."""
    valid = (
        inside & (positions >= tl.maximum(first, 0)) & (positions < tl.where(live, draft_limit, 0))
    )
    clamped = tl.minimum(tl.maximum(positions, 0), limit - 1)
    slots = page_slots(table_row, clamped, valid, table_width, trash_slot, PAGE)
    tl.store(out_positions + at, clamped, mask=inside)
    tl.store(out_valid + at, valid, mask=inside)
    tl.store(out_slots + at, slots, mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def committed_kernel(
    tokens, length, active, draft_limit, page_table, first, draft, out_ids, out_positions, out_valid,
    out_slots, tokens_stride, table_stride, draft_stride, table_width, width, ahead, limit, trash_slot,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Lane i is row i of the slot's window; `first` is read where BOUNDED."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    inside = row < width + ahead
    drafted = inside & (row >= width)
    positions = tl.load(length + s) - width + row
    ids = tl.load(tokens + s * tokens_stride + tl.maximum(positions, 0), mask=row < width, other=0)
    ids += tl.load(draft + s * draft_stride + row - width, mask=drafted, other=0)
    at = s * (width + ahead) + row
    begin = tl.load(first + s) if BOUNDED else 0
    tl.store(out_ids + at, ids, mask=inside)
    store_rows(
        out_positions, out_valid, out_slots, at, positions, inside, tl.load(active + s) != 0, begin,
        tl.load(draft_limit + s), page_table + s * table_stride, table_width, limit, trash_slot, PAGE,
    )  # fmt: skip


def committed_window(
    state: RoundTensors,
    width: int,
    chosen: Tensor,
    paging: Paging,
    first: Tensor | None,
    ahead: int = 0,
) -> Rows:
    tokens = state.tokens
    length = state.length
    table = state.page_table
    draft = state.draft
    slots = length.shape[0]
    rows = width + ahead
    window = Rows(length.new_empty(slots, rows), *_empty(length, rows))
    inputs = (
        tokens,
        length,
        chosen,
        state.draft_limit,
        table,
        length if first is None else first,
        draft,
    )
    strides = (tokens.stride(0), table.stride(0), draft.stride(0), table.shape[1])
    sizes = (width, ahead, paging.limit, paging.trash_slot)
    constants = {"PAGE": paging.page_size, "ROWS": power_of_two(rows), "BOUNDED": first is not None}
    committed_kernel[(slots,)](
        *inputs, *vars(window).values(), *strides, *sizes, **constants, num_warps=1
    )
    return window


@triton.jit(do_not_specialize=_VARYING)
def step_kernel(
    sampled, length, active, draft_limit, page_table, draft_out, num_drafts_out, out_positions,
    out_valid, out_slots, sampled_stride, table_stride, table_width, draft_stride, step, k, limit,
    trash_slot,
    PAGE: tl.constexpr,
):  # fmt: skip
    """One slot's draft and the row that follows it."""
    s = tl.program_id(0).to(tl.int64)
    size = tl.load(length + s)
    live = tl.load(active + s) != 0
    draft_end = tl.load(draft_limit + s)
    tl.store(draft_out + s * draft_stride + step, tl.load(sampled + s * sampled_stride))
    room = tl.minimum(tl.maximum(draft_end - size + 1, 0), k)
    tl.store(num_drafts_out + s, tl.where(live, room, 0), mask=step == k - 1)
    row = tl.arange(0, 1)
    store_rows(
        out_positions, out_valid, out_slots, s + row, size + step + row, row == 0, live, 0, draft_end,
        page_table + s * table_stride, table_width, limit, trash_slot, PAGE,
    )  # fmt: skip


def draft_step(state: RoundTensors, sampled: Tensor, step: int, k: int, paging: Paging) -> Rows:
    length = state.length
    table = state.page_table
    draft = state.draft
    room = _empty(length, 1)
    inputs = (sampled, length, state.active, state.draft_limit, table, draft, state.num_drafts)
    strides = (sampled.stride(0), table.stride(0), table.shape[1], draft.stride(0))
    sizes = (step, k, paging.limit, paging.trash_slot)
    step_kernel[(length.shape[0],)](
        *inputs, *room, *strides, *sizes, PAGE=paging.page_size, num_warps=1
    )
    return Rows(sampled, *room)
