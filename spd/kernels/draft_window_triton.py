# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `draft_window`: one launch each, one program a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.draft_window import DraftWindow
from spd.kernels.launch import Signature, power_of_two
from spd.kernels.round_window_triton import page_slots


@triton.jit
def store_rows(
    out_positions,
    out_valid,
    out_slots,
    at,
    positions,
    inside,
    live,
    first,
    draft_limit,
    table_row,
    table_width,
    limit,
    trash_slot,
    PAGE: tl.constexpr,
):
    """Write rows at `positions`, which may lie outside the limits, to index `at` of the outputs."""
    valid = inside & (positions >= tl.maximum(first, 0)) & (positions < tl.where(live, draft_limit, 0))
    clamped = tl.minimum(tl.maximum(positions, 0), limit - 1)
    slots = page_slots(table_row, clamped, valid, table_width, trash_slot, PAGE)
    tl.store(out_positions + at, clamped, mask=inside)
    tl.store(out_valid + at, valid, mask=inside)
    tl.store(out_slots + at, slots, mask=inside)


_VARYING = (
    *("tokens_stride", "table_stride", "draft_stride", "table_width"),
    *("width", "ahead", "limit", "trash_slot"),
)


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
        out_positions,
        out_valid,
        out_slots,
        at,
        positions,
        inside,
        tl.load(active + s) != 0,
        begin,
        tl.load(draft_limit + s),
        page_table + s * table_stride,
        table_width,
        limit,
        trash_slot,
        PAGE,
    )


def committed_window(
    tokens: Tensor,
    length: Tensor,
    active: Tensor,
    draft_limit: Tensor,
    page_table: Tensor,
    width: int,
    page_size: int,
    limit: int,
    trash_slot: int,
    first: Tensor | None = None,
    draft: Tensor | None = None,
    ahead: int = 0,
) -> DraftWindow:
    """See `draft_window.committed_window`; the last dimension of every tensor has stride 1."""
    slots, rows, device = length.shape[0], width + ahead, length.device
    ids, positions, places = (torch.empty(slots, rows, dtype=torch.int64, device=device) for _ in range(3))
    window = DraftWindow(ids, positions, torch.empty(slots, rows, dtype=torch.bool, device=device), places)
    draft = tokens if draft is None else draft
    committed_kernel[(slots,)](
        tokens,
        length,
        active,
        draft_limit,
        page_table,
        length if first is None else first,
        draft,
        ids,
        positions,
        window.valid,
        places,
        tokens.stride(0),
        page_table.stride(0),
        draft.stride(0),
        page_table.shape[1],
        width,
        ahead,
        limit,
        trash_slot,
        PAGE=page_size,
        ROWS=power_of_two(rows),
        BOUNDED=first is not None,
        num_warps=1,
    )
    return window


_STEPPING = (
    "sampled_stride",
    "table_stride",
    "table_width",
    "draft_stride",
    "step",
    "k",
    "limit",
    "trash_slot",
)


@triton.jit(do_not_specialize=_STEPPING)
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
        out_positions,
        out_valid,
        out_slots,
        s + row,
        size + step + row,
        row == 0,
        live,
        0,
        draft_end,
        page_table + s * table_stride,
        table_width,
        limit,
        trash_slot,
        PAGE,
    )


def draft_step(
    sampled: Tensor,
    length: Tensor,
    active: Tensor,
    draft_limit: Tensor,
    page_table: Tensor,
    step: int,
    page_size: int,
    limit: int,
    trash_slot: int,
    draft_out: Tensor,
    num_drafts_out: Tensor,
    k: int,
) -> DraftWindow:
    """See `draft_window.draft_step`; rows of draft_out and page_table have stride 1."""
    slots, device = length.shape[0], length.device
    positions, places = (torch.empty(slots, 1, dtype=torch.int64, device=device) for _ in range(2))
    window = DraftWindow(sampled, positions, torch.empty(slots, 1, dtype=torch.bool, device=device), places)
    step_kernel[(slots,)](
        sampled,
        length,
        active,
        draft_limit,
        page_table,
        draft_out,
        num_drafts_out,
        positions,
        window.valid,
        places,
        sampled.stride(0),
        page_table.stride(0),
        page_table.shape[1],
        draft_out.stride(0),
        step,
        k,
        limit,
        trash_slot,
        PAGE=page_size,
        num_warps=1,
    )
    return window


def signatures() -> dict[str, Signature]:
    """The usual two rows and a catch-up of seventeen, and the step."""
    names = committed_kernel.arg_names
    types = dict.fromkeys(names[: names.index("tokens_stride")], "*i64")
    types |= {"active": "*i1", "out_valid": "*i1"} | dict.fromkeys(_VARYING, "i32")
    found = {
        f"committed_window_{rows}": Signature(
            committed_kernel,
            types,
            {"PAGE": 64, "ROWS": rows, "BOUNDED": rows > 2},
            {"num_warps": 1},
            unspecialized=_VARYING,
        )
        for rows in (2, 32)
    }
    names = step_kernel.arg_names
    types = dict.fromkeys(names[: names.index("sampled_stride")], "*i64")
    types |= {"active": "*i1", "out_valid": "*i1"} | dict.fromkeys(_STEPPING, "i32")
    found["draft_step"] = Signature(
        step_kernel, types, {"PAGE": 64}, {"num_warps": 1}, unspecialized=_STEPPING
    )
    return found
