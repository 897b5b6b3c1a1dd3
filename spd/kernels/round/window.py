"""The input rows of a round: the last committed token and drafts for the target, others for a draft
model.

A draft model's rows are first the committed tokens that are not in its cache, then its drafts one
by one. The device records when a round's parts began and ended: its row of `times` is counter %
depth, and the last mark of a round increments the counter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BEGAN = 0
"""Column of `times`: before verification."""
VERIFIED = 1
"""Column of `times`: after verification."""
COMMITTED = 2
"""Column of `times`: at the commit."""
ENDED = 3
"""Column of `times`: after drafting."""
NUM_TIMES = 4
"""Columns of `times`."""


class RoundTensors(Protocol):
    """The state of S slots that rounds read and write; the last dimension of each has stride 1."""

    tokens: Tensor  # int64 [S, T], T at least any length + k + 1
    length: Tensor  # int64 [S] committed tokens, at least 1
    length_limit: Tensor  # int64 [S]
    draft: Tensor  # int64 [S, >= k]
    num_drafts: Tensor  # int64 [S]
    match: Tensor  # int64 [S] tokens of prompt lookup's match before the drafts, else 0
    draft_limit: Tensor  # int64 [S] positions that the draft model can process
    draft_cap: Tensor  # int64 [S] the maximum of drafts that a round verifies
    page_table: Tensor  # int64 [S, P]
    stop_ids: Tensor  # int64 [S, N]
    active: Tensor  # bool [S]
    ring: Tensor  # int64 [depth, >= S, W], see `read_emission`
    times: Tensor  # int64 [depth, NUM_TIMES], see `mark_time`
    counter: Tensor  # int64 [1]


class Paging(NamedTuple):
    """The mapping of positions to rows of the pools."""

    page_size: int
    limit: int  # positions are clamped to limit - 1
    trash_slot: int  # where entries that must not be stored are written


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass: windows of W ascending positions, one for each of S slots."""

    token_ids: Tensor  # int64 [S, W]
    positions: Tensor  # int64 [S, W]
    valid: Tensor  # bool [S, W] True if the row is computed and its KV stored
    kv_slots: Tensor  # int64 [S, W] page * page_size + offset; the trash slot of invalid rows


@dataclass(frozen=True)
class RoundWindow(Rows):
    """The rows of a verification; W = k + 1."""

    draft: Tensor  # int64 [S, k] with ids outside the vocabulary as 0
    num_drafts: Tensor  # int64 [S] leading drafts inside the vocabulary and the limits


def mark_time(times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
    """Compute `Kernels.mark_time` with the host's time; 0 for tensors on a GPU."""
    now = 0 if times.is_cuda else time.perf_counter_ns()
    times[:, column].index_fill_(0, counter % times.shape[0], now)
    if advance:
        counter += 1


def kv_slots(
    page_table: Tensor, positions: Tensor, valid: Tensor, page_size: int, trash_slot: int
) -> Tensor:
    """Return the pools' slots of positions [S, R]: int64 [S, R]; the trash slot where not valid."""
    columns = (positions // page_size).clamp(max=page_table.shape[1] - 1)
    slots = page_table.gather(1, columns) * page_size + positions % page_size
    return torch.where(valid, slots, trash_slot)


def round_window(state: RoundTensors, k: int, paging: Paging, usable_vocab: int) -> RoundWindow:
    """Compute `Kernels.round_window` by torch."""
    mark_time(state.times, state.counter, BEGAN, False)
    draft = state.draft[:, :k]
    length = state.length
    is_usable = (draft >= 0) & (draft < usable_vocab)
    leading = is_usable.long().cumprod(dim=-1).sum(dim=-1)
    room = (state.length_limit - length - 1).clamp(min=0)
    num_drafts = torch.minimum(state.num_drafts, state.draft_cap)
    usable = torch.minimum(torch.minimum(num_drafts.clamp(0, k), leading), room)
    draft = torch.where(is_usable, draft, 0)
    last = (length - 1).unsqueeze(-1)
    offsets = torch.arange(k + 1, device=length.device)
    positions = (last + offsets).clamp(max=paging.limit - 1)
    valid = state.active.unsqueeze(-1) & (offsets <= usable.unsqueeze(-1))
    window = torch.cat((state.tokens.gather(1, last), draft), dim=1)
    slots = kv_slots(
        page_table=state.page_table,
        positions=positions,
        valid=valid,
        page_size=paging.page_size,
        trash_slot=paging.trash_slot,
    )
    return RoundWindow(window, positions, valid, slots, draft, usable)


def committed_window(
    state: RoundTensors,
    width: int,
    chosen: Tensor,
    paging: Paging,
    first: Tensor | None,
    ahead: int = 0,
) -> Rows:
    """Compute `Kernels.committed_window` by torch."""
    offsets = torch.arange(width + ahead, device=state.length.device)
    positions = state.length.unsqueeze(-1) - width + offsets
    ids = state.tokens.gather(1, positions[:, :width].clamp(min=0))
    if ahead:
        ids = torch.cat((ids, state.draft[:, :ahead]), dim=1)
    return _rows(state, ids, positions, chosen, paging, first)


def draft_step(state: RoundTensors, sampled: Tensor, step: int, k: int, paging: Paging) -> Rows:
    """Compute `Kernels.draft_step` by torch."""
    state.draft[:, step : step + 1] = sampled
    if step == k - 1:
        room = (state.draft_limit - state.length + 1).clamp(0, k)
        state.num_drafts.copy_(torch.where(state.active, room, 0))
    return _rows(state, sampled, state.length.unsqueeze(-1) + step, state.active, paging, None)


def _rows(
    state: RoundTensors,
    ids: Tensor,
    positions: Tensor,
    chosen: Tensor,
    paging: Paging,
    first: Tensor | None,
) -> Rows:
    """Return rows at positions [S, W].

    Those outside the limits or of slots not chosen are invalid.
    """
    valid = chosen.unsqueeze(-1) & (positions >= 0) & (positions < state.draft_limit.unsqueeze(-1))
    if first is not None:
        valid &= positions >= first.unsqueeze(-1)
    clamped = positions.clamp(0, paging.limit - 1)
    slots = kv_slots(
        page_table=state.page_table,
        positions=clamped,
        valid=valid,
        page_size=paging.page_size,
        trash_slot=paging.trash_slot,
    )
    return Rows(ids, clamped, valid, slots)
