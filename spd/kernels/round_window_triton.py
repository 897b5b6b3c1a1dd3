# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `round_window`: one launch, one program a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import Signature, power_of_two
from spd.kernels.round_finish import BEGAN, NUM_TIMES
from spd.kernels.round_finish_triton import timer_and_now, write_time
from spd.kernels.round_window import RoundWindow

_BEGAN = tl.constexpr(BEGAN)
_NUM_TIMES = tl.constexpr(NUM_TIMES)


@triton.jit
def page_slots(table_row, positions, valid, table_width, trash_slot, PAGE: tl.constexpr):
    """Where the KV of positions that are not negative lies; `trash_slot` where not valid."""
    columns = tl.minimum(positions // PAGE, table_width - 1)
    pages = tl.load(table_row + columns, mask=valid, other=0)
    return tl.where(valid, pages * PAGE + positions % PAGE, trash_slot)


_VARYING = (
    *("tokens_stride", "draft_stride", "table_stride", "table_width", "k", "usable_vocab", "max_len"),
    *("trash_slot", "depth", "now"),
)


@triton.jit(do_not_specialize=_VARYING)
def window_kernel(
    tokens, length, draft, num_drafts, active, length_limit, page_table, out_ids, out_positions,
    out_valid, out_slots, out_draft, out_count, times, counter, draft_cap, tokens_stride, draft_stride,
    table_stride, table_width, k, usable_vocab, max_len, trash_slot, depth, now,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TIMED: tl.constexpr, TIMER: tl.constexpr,
):  # fmt: skip
    """Lane i is row i of the slot's window; draft i - 1 stands in it."""
    s = tl.program_id(0).to(tl.int64)
    if TIMED:
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
    slots = page_slots(page_table + s * table_stride, positions, valid, table_width, trash_slot, PAGE)
    at = s * (k + 1) + row
    tl.store(out_ids + at, tl.where(row == 0, last, ids), mask=inside)
    tl.store(out_positions + at, positions, mask=inside)
    tl.store(out_valid + at, valid, mask=inside)
    tl.store(out_slots + at, slots, mask=inside)
    tl.store(out_draft + s * k + row - 1, ids, mask=drafted)
    tl.store(out_count + s, count)


def round_window(
    tokens: Tensor,
    length: Tensor,
    draft: Tensor,
    num_drafts: Tensor,
    active: Tensor,
    length_limit: Tensor,
    page_table: Tensor,
    k: int,
    page_size: int,
    usable_vocab: int,
    max_len: int,
    trash_slot: int,
    times: Tensor | None = None,
    counter: Tensor | None = None,
    draft_cap: Tensor | None = None,
) -> RoundWindow:
    """See `round_window.round_window`; the last dimension of every tensor has stride 1."""
    slots, device = length.shape[0], length.device
    timed = times is not None and counter is not None
    timer, now = timer_and_now(window_kernel) if timed else (False, 0)
    ids, positions, places = (torch.empty(slots, k + 1, dtype=torch.int64, device=device) for _ in range(3))
    window = RoundWindow(
        token_ids=ids,
        positions=positions,
        valid=torch.empty(slots, k + 1, dtype=torch.bool, device=device),
        kv_slots=places,
        draft=torch.empty(slots, k, dtype=torch.int64, device=device),
        num_drafts=torch.empty(slots, dtype=torch.int64, device=device),
    )
    window_kernel[(slots,)](
        tokens,
        length,
        draft,
        num_drafts,
        active,
        length_limit,
        page_table,
        ids,
        positions,
        window.valid,
        places,
        window.draft,
        window.num_drafts,
        times if timed else length,
        counter if timed else length,
        num_drafts if draft_cap is None else draft_cap,
        tokens.stride(0),
        draft.stride(0),
        page_table.stride(0),
        page_table.shape[1],
        k,
        usable_vocab,
        max_len,
        trash_slot,
        times.shape[0] if times is not None else 1,
        now,
        PAGE=page_size,
        ROWS=power_of_two(k + 1),
        TIMED=timed,
        TIMER=timer,
        num_warps=1,
    )
    return window


def signatures() -> dict[str, Signature]:
    """Plain decoding, a usual and the widest window, the last one timed."""
    names = window_kernel.arg_names
    first = names.index("tokens_stride")
    types = dict.fromkeys(names[:first], "*i64") | {"active": "*i1", "out_valid": "*i1"}
    types |= dict.fromkeys(_VARYING, "i32")
    return {
        f"round_window_{rows}": Signature(
            window_kernel,
            types,
            {"PAGE": 64, "ROWS": rows, "TIMED": rows > 1, "TIMER": rows > 1},
            {"num_warps": 1},
            unspecialized=_VARYING,
        )
        for rows in (1, 8, 32)
    }
