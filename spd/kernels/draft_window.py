"""What a draft model is fed: first the committed tokens it has not seen, then its own drafts one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.round_window import kv_slots


@dataclass(frozen=True)
class DraftWindow:
    """The rows of one draft forward; S slots, W rows a slot."""

    token_ids: Tensor  # int64 [S, W]
    positions: Tensor  # int64 [S, W] within the draft's context
    valid: Tensor  # bool [S, W] whether the row's KV is kept
    kv_slots: Tensor  # int64 [S, W] page * page_size + offset; the trash slot for rows that are not


def _rows(
    token_ids: Tensor,
    positions: Tensor,
    active: Tensor,
    draft_limit: Tensor,
    page_table: Tensor,
    page_size: int,
    limit: int,
    trash_slot: int,
    first: Tensor | None = None,
) -> DraftWindow:
    """Rows at positions [S, W]; those outside the limits or of silent slots are not valid."""
    valid = active.unsqueeze(-1) & (positions >= 0) & (positions < draft_limit.unsqueeze(-1))
    if first is not None:
        valid &= positions >= first.unsqueeze(-1)
    clamped = positions.clamp(0, limit - 1)
    slots = kv_slots(page_table, clamped, valid, page_size, trash_slot)
    return DraftWindow(token_ids, clamped, valid, slots)


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
    """The last `width` committed tokens of every slot, at positions length - width to length - 1.

    tokens int64 [S, T], page_table int64 [S, P], the others [S]. Rows before the text, from draft_limit
    on or of silent slots are not valid, nor those before the positions first int64 [S]; positions are cut
    to 0 to limit - 1. The first `ahead` of draft int64 [S, >= ahead] follow the committed tokens.
    """
    offsets = torch.arange(width + ahead, device=tokens.device)
    positions = length.unsqueeze(-1) - width + offsets
    ids = tokens.gather(1, positions[:, :width].clamp(min=0))
    if draft is not None and ahead:
        ids = torch.cat((ids, draft[:, :ahead]), dim=1)
    return _rows(ids, positions, active, draft_limit, page_table, page_size, limit, trash_slot, first)


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
    """Keep the draft of one step, and return the window of one row that draws the next.

    sampled int64 [S, 1] goes to draft_out[:, step], in place, and is the row's token (its memory may be
    shared), at position length + step. After the last of k steps num_drafts_out [S] is written too: how
    many of the k have their predecessor below draft_limit, none in silent slots.
    """
    draft_out[:, step : step + 1] = sampled
    if step == k - 1:
        room = (draft_limit - length + 1).clamp(0, k)
        num_drafts_out.copy_(torch.where(active, room, 0))
    positions = length.unsqueeze(-1) + step
    return _rows(sampled, positions, active, draft_limit, page_table, page_size, limit, trash_slot)
