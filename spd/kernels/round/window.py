"""What a round feeds: to the target the last committed token and the drafts, to a draft model what it lacks.

A draft model is fed first the committed tokens that it has not seen, then its own drafts one by one. The
device itself writes down when a round's parts began and ended: its row of `times` is counter % depth, and the
last mark of a round moves the counter on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BEGAN = 0
VERIFIED = 1
COMMITTED = 2
ENDED = 3
"""Columns of `times`: before verification, after it, at the commit, after drafting."""
NUM_TIMES = 4


class RoundTensors(Protocol):
    """The state of S slots that rounds read and write; the last dimension of each has stride 1."""

    tokens: Tensor  # int64 [S, T], T at least any length + k + 1
    length: Tensor  # int64 [S] committed tokens, at least 1
    length_limit: Tensor  # int64 [S]
    draft: Tensor  # int64 [S, >= k]
    num_drafts: Tensor  # int64 [S]
    match: Tensor  # int64 [S] tokens of the match that a lookup took the drafts from, else 0
    draft_limit: Tensor  # int64 [S] positions that the drafter takes
    draft_cap: Tensor  # int64 [S] how many drafts of a round are verified at most
    page_table: Tensor  # int64 [S, P]
    stop_ids: Tensor  # int64 [S, N]
    active: Tensor  # bool [S]
    ring: Tensor  # int64 [depth, >= S, W], see `read_emission`
    times: Tensor  # int64 [depth, NUM_TIMES], see `mark_time`
    counter: Tensor  # int64 [1]


class Paging(NamedTuple):
    """How positions become rows of the pools."""

    page_size: int
    limit: int  # positions are cut to limit - 1
    trash_slot: int  # takes what is not to be kept


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass: windows of W ascending positions, one for each of S slots."""

    token_ids: Tensor  # int64 [S, W]
    positions: Tensor  # int64 [S, W]
    valid: Tensor  # bool [S, W] whether the row is fed and its KV kept
    kv_slots: Tensor  # int64 [S, W] page * page_size + offset; the trash slot for rows that are not


@dataclass(frozen=True)
class RoundWindow(Rows):
    """The rows of a verification; W = k + 1."""

    draft: Tensor  # int64 [S, k] with unknown ids made safe to look up
    num_drafts: Tensor  # int64 [S] how many of them lead without a flaw and fit


def mark_time(times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
    """Compute `Kernels.mark_time` with the host's time, 0 for tensors on a GPU."""
    now = 0 if times.is_cuda else time.perf_counter_ns()
    times[:, column].index_fill_(0, counter % times.shape[0], now)
    if advance:
        counter += 1


def kv_slots(
    page_table: Tensor, positions: Tensor, valid: Tensor, page_size: int, trash_slot: int
) -> Tensor:
    """Where the KV of positions [S, R] lies in the pools: int64 [S, R]; the trash slot where not valid."""
    columns = (positions // page_size).clamp(max=page_table.shape[1] - 1)
    slots = page_table.gather(1, columns) * page_size + positions % page_size
    return torch.where(valid, slots, trash_slot)


def round_window(state: RoundTensors, k: int, paging: Paging, usable_vocab: int) -> RoundWindow:
    """Compute `Kernels.round_window` by torch."""
    mark_time(state.times, state.counter, BEGAN, False)
    draft = state.draft[:, :k]
    length = state.length
    known = (draft >= 0) & (draft < usable_vocab)
    leading = known.long().cumprod(dim=-1).sum(dim=-1)
    room = (state.length_limit - length - 1).clamp(min=0)
    num_drafts = torch.minimum(state.num_drafts, state.draft_cap)
    usable = torch.minimum(torch.minimum(num_drafts.clamp(0, k), leading), room)
    draft = torch.where(known, draft, 0)
    last = (length - 1).unsqueeze(-1)
    offsets = torch.arange(k + 1, device=length.device)
    positions = (last + offsets).clamp(max=paging.limit - 1)
    valid = state.active.unsqueeze(-1) & (offsets <= usable.unsqueeze(-1))
    window = torch.cat((state.tokens.gather(1, last), draft), dim=1)
    slots = kv_slots(state.page_table, positions, valid, paging.page_size, paging.trash_slot)
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
    """Rows at positions [S, W]; those outside the limits or of slots that are not chosen are not valid."""
    valid = chosen.unsqueeze(-1) & (positions >= 0) & (positions < state.draft_limit.unsqueeze(-1))
    if first is not None:
        valid &= positions >= first.unsqueeze(-1)
    clamped = positions.clamp(0, paging.limit - 1)
    slots = kv_slots(state.page_table, clamped, valid, paging.page_size, paging.trash_slot)
    return Rows(ids, clamped, valid, slots)
