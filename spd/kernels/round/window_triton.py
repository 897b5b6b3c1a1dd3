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
    """Write the timer, or `now` without one, to the round's row, in the chosen program only."""
    at = times + tl.load(counter) % depth * COLUMNS + COLUMN
    if TIMER:
        tl.store(at, cuda.globaltimer(), mask=chosen)
    else:
        tl.store(at, now, mask=chosen)


_NOT_SPECIALIZED = (
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
"""Arguments that differ between calls of one model, and so must not specialize a program."""


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def mark_kernel(
    times, counter, depth, now, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, ADVANCE: tl.constexpr,
    TIMER: tl.constexpr,
):  # fmt: skip
    """Write the time, then increment the counter if ADVANCE; one program."""
    write_time(times, counter, depth, now, True, COLUMN, COLUMNS, TIMER)
    if ADVANCE:
        tl.store(counter, tl.load(counter) + 1)


def timer_and_now(kernel: Any) -> tuple[bool, int]:
    """Return (True, 0) if a kernel can read the GPU's timer, else (False, the host's time)."""
    compiled = isinstance(kernel, triton.JITFunction)
    return compiled, 0 if compiled else time.perf_counter_ns()


def mark_time(times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
    """Launch `Kernels.mark_time`; times are contiguous."""
    timer, now = timer_and_now(mark_kernel)
    constants = {"COLUMN": column, "COLUMNS": NUM_TIMES, "ADVANCE": advance, "TIMER": timer}
    mark_kernel[(1,)](times, counter, times.shape[0], now, **constants, num_warps=1)


@triton.jit
def page_slots(table_row, positions, valid, table_width, trash_slot, PAGE: tl.constexpr):
    """Return the pools' slots of positions, which are not negative.

    `trash_slot` where not valid.
    """
    columns = tl.minimum(positions // PAGE, table_width - 1)
    pages = tl.load(table_row + columns, mask=valid, other=0)
    return tl.where(valid, pages * PAGE + positions % PAGE, trash_slot)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def window_kernel(
    tokens, length, draft, num_drafts, active, length_limit, page_table, out_ids, out_positions,
    out_valid, out_slots, out_draft, out_count, times, counter, draft_cap, tokens_stride, draft_stride,
    table_stride, table_width, k, usable_vocab, max_len, trash_slot, depth, now,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TIMER: tl.constexpr,
):  # fmt: skip
    """Write a slot's verification window; lane i is its row i, with draft i - 1."""
    s = tl.program_id(0).to(tl.int64)
    write_time(times, counter, depth, now, s == 0, _BEGAN, _NUM_TIMES, TIMER)
    row = tl.arange(0, ROWS)
    inside = row <= k
    drafted = (row >= 1) & inside
    ids = tl.load(draft + s * draft_stride + row - 1, mask=drafted, other=0)
    size = tl.load(length + s)
    limit = tl.load(length_limit + s)
    proposed = tl.minimum(tl.load(num_drafts + s), tl.load(draft_cap + s))
    is_active = tl.load(active + s) != 0
    last = tl.load(tokens + s * tokens_stride + size - 1)
    is_usable = (ids >= 0) & (ids < usable_vocab)
    leading = tl.min(tl.where(drafted & (is_usable == 0), row - 1, k))
    room = tl.maximum(limit - size - 1, 0)
    count = tl.minimum(tl.minimum(tl.minimum(tl.maximum(proposed, 0), k), leading), room)
    ids = tl.where(is_usable, ids, 0)
    positions = tl.minimum(size - 1 + row, max_len - 1)
    valid = row <= tl.where(is_active, count, -1)
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


def _empty_rows(length: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized positions, their validity, and their slots in the pools."""
    positions = length.new_empty(length.shape[0], width)
    return positions, torch.empty_like(positions, dtype=torch.bool), torch.empty_like(positions)


def round_window(state: RoundTensors, k: int, paging: Paging, usable_vocab: int) -> RoundWindow:
    """Launch `Kernels.round_window`."""
    tokens = state.tokens
    draft = state.draft
    table = state.page_table
    length = state.length
    slots = length.shape[0]
    timer, now = timer_and_now(window_kernel)
    ids = length.new_empty(slots, k + 1)
    positions, valid, kv_slots = _empty_rows(length, k + 1)
    out_draft = length.new_empty(slots, k)
    out_count = torch.empty_like(length)
    window_kernel[(slots,)](
        tokens,
        length,
        draft,
        state.num_drafts,
        state.active,
        state.length_limit,
        table,
        ids,
        positions,
        valid,
        kv_slots,
        out_draft,
        out_count,
        state.times,
        state.counter,
        state.draft_cap,
        tokens.stride(0),
        draft.stride(0),
        table.stride(0),
        table.shape[1],
        k,
        usable_vocab,
        paging.limit,
        paging.trash_slot,
        state.times.shape[0],
        now,
        PAGE=paging.page_size,
        ROWS=power_of_two(k + 1),
        TIMER=timer,
        num_warps=1,
    )
    return RoundWindow(ids, positions, valid, kv_slots, out_draft, out_count)


@triton.jit
def store_rows(
    out_positions, out_valid, out_slots, at, positions, inside, is_active, first, draft_limit, table_row,
    table_width, limit, trash_slot, PAGE: tl.constexpr,
):  # fmt: skip
    """Write rows at `positions`, which may lie outside the limits, to index `at` of the outputs."""
    valid = (
        inside
        & (positions >= tl.maximum(first, 0))
        & (positions < tl.where(is_active, draft_limit, 0))
    )
    clamped = tl.minimum(tl.maximum(positions, 0), limit - 1)
    slots = page_slots(table_row, clamped, valid, table_width, trash_slot, PAGE)
    tl.store(out_positions + at, clamped, mask=inside)
    tl.store(out_valid + at, valid, mask=inside)
    tl.store(out_slots + at, slots, mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def committed_kernel(
    tokens, length, active, draft_limit, page_table, first, draft, out_ids, out_positions, out_valid,
    out_slots, tokens_stride, table_stride, draft_stride, table_width, width, ahead, limit, trash_slot,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Write a slot's committed window; lane i is its row i; `first` is read if BOUNDED."""
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
    """Launch `Kernels.committed_window`."""
    tokens = state.tokens
    length = state.length
    table = state.page_table
    draft = state.draft
    slots = length.shape[0]
    rows = width + ahead
    ids = length.new_empty(slots, rows)
    positions, valid, kv_slots = _empty_rows(length, rows)
    committed_kernel[(slots,)](
        tokens,
        length,
        chosen,
        state.draft_limit,
        table,
        length if first is None else first,
        draft,
        ids,
        positions,
        valid,
        kv_slots,
        tokens.stride(0),
        table.stride(0),
        draft.stride(0),
        table.shape[1],
        width,
        ahead,
        paging.limit,
        paging.trash_slot,
        PAGE=paging.page_size,
        ROWS=power_of_two(rows),
        BOUNDED=first is not None,
        num_warps=1,
    )
    return Rows(ids, positions, valid, kv_slots)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def step_kernel(
    sampled, length, active, draft_limit, page_table, draft_out, num_drafts_out, out_positions,
    out_valid, out_slots, sampled_stride, table_stride, table_width, draft_stride, step, k, limit,
    trash_slot,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Store one slot's draft and the row that follows it."""
    s = tl.program_id(0).to(tl.int64)
    size = tl.load(length + s)
    is_active = tl.load(active + s) != 0
    draft_end = tl.load(draft_limit + s)
    tl.store(draft_out + s * draft_stride + step, tl.load(sampled + s * sampled_stride))
    room = tl.minimum(tl.maximum(draft_end - size + 1, 0), k)
    tl.store(num_drafts_out + s, tl.where(is_active, room, 0), mask=step == k - 1)
    row = tl.arange(0, 1)
    store_rows(
        out_positions, out_valid, out_slots, s + row, size + step + row, row == 0, is_active, 0, draft_end,
        page_table + s * table_stride, table_width, limit, trash_slot, PAGE,
    )  # fmt: skip


def draft_step(state: RoundTensors, sampled: Tensor, step: int, k: int, paging: Paging) -> Rows:
    """Launch `Kernels.draft_step`."""
    length = state.length
    table = state.page_table
    draft = state.draft
    positions, valid, kv_slots = _empty_rows(length, 1)
    step_kernel[(length.shape[0],)](
        sampled,
        length,
        state.active,
        state.draft_limit,
        table,
        draft,
        state.num_drafts,
        positions,
        valid,
        kv_slots,
        sampled.stride(0),
        table.stride(0),
        table.shape[1],
        draft.stride(0),
        step,
        k,
        paging.limit,
        paging.trash_slot,
        PAGE=paging.page_size,
        num_warps=1,
    )
    return Rows(sampled, positions, valid, kv_slots)
