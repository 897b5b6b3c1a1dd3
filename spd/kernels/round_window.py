"""What a round feeds to the target: the last committed token and the drafts, and where their KV goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.round_finish import BEGAN, mark_time


@dataclass(frozen=True)
class RoundWindow:
    """The rows of a verification; S slots, R = k + 1 rows a slot."""

    token_ids: Tensor  # int64 [S, R]
    positions: Tensor  # int64 [S, R]
    valid: Tensor  # bool [S, R] whether the row is fed
    kv_slots: Tensor  # int64 [S, R] page * page_size + offset; the trash slot for rows that are not
    draft: Tensor  # int64 [S, k] with unknown ids made safe to look up
    num_drafts: Tensor  # int64 [S] how many of them lead without a flaw and fit


def kv_slots(page_table: Tensor, positions: Tensor, valid: Tensor, page_size: int, trash_slot: int) -> Tensor:
    """Where the KV of positions [S, R] lies in the pools: int64 [S, R]; the trash slot where not valid."""
    columns = (positions // page_size).clamp(max=page_table.shape[1] - 1)
    slots = page_table.gather(1, columns) * page_size + positions % page_size
    return torch.where(valid, slots, trash_slot)


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
    """The window of every slot: the token at length - 1, then the k drafts.

    tokens int64 [S, T], draft int64 [S, >= k], page_table int64 [S, P], the others [S], lengths at
    least 1. Drafts end at the first id outside 0 to usable_vocab - 1, where the token after them would
    pass length_limit, and after draft_cap of them where that is given, int64 [S]. Positions are at most
    max_len - 1. With times and counter (see `round_finish`) the beginning is marked, in place.
    """
    if times is not None and counter is not None:
        mark_time(times, counter, BEGAN, False)
    draft = draft[:, :k]
    known = (draft >= 0) & (draft < usable_vocab)
    leading = known.long().cumprod(dim=-1).sum(dim=-1)
    room = (length_limit - length - 1).clamp(min=0)
    if draft_cap is not None:
        num_drafts = torch.minimum(num_drafts, draft_cap)
    usable = torch.minimum(torch.minimum(num_drafts.clamp(0, k), leading), room)
    draft = torch.where(known, draft, 0)
    last = (length - 1).unsqueeze(-1)
    offsets = torch.arange(k + 1, device=tokens.device)
    positions = (last + offsets).clamp(max=max_len - 1)
    valid = active.unsqueeze(-1) & (offsets <= usable.unsqueeze(-1))
    window = torch.cat((tokens.gather(1, last), draft), dim=1)
    slots = kv_slots(page_table, positions, valid, page_size, trash_slot)
    return RoundWindow(window, positions, valid, slots, draft, usable)
