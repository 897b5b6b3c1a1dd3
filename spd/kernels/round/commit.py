"""The end of a verification: the committed tokens, the reason why a slot ends, and the host's
record."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.round.window import COMMITTED, RoundTensors, RoundWindow, mark_time

GOING_ON = 0
STOPPED = 1
FULL = 2
FAILED = 3

EMISSION_HEAD = 7
"""Columns before the k + 1 samples and the k drafts: `Emission`'s up to match, with k after
reason."""


class Emission(NamedTuple):
    """The result of one round for one slot, in host values."""

    length: int  # before the round
    num_drafts: int  # drafts that were verified
    accepted: int  # leading drafts that equal the samples
    committed: int  # tokens appended; 0 for an inactive slot
    reason: int  # GOING_ON, STOPPED, FULL or FAILED
    match: int  # tokens of prompt lookup's match before the drafts; 0 where a model drafted
    draft: list[int]  # the k drafts of the window
    sampled: list[int]  # the target's token for each of k + 1 rows


def emission_width(max_k: int) -> int:
    """Return the columns of an emission that can hold max_k drafts."""
    return EMISSION_HEAD + 2 * max_k + 1


def read_emission(row: list[int]) -> Emission:
    """Return one slot's row of the ring, as `round_commit` wrote it, in host values."""
    length, num_drafts, accepted, committed, reason, k, match = row[:EMISSION_HEAD]
    drafts = EMISSION_HEAD + k + 1
    return Emission(
        length=length,
        num_drafts=num_drafts,
        accepted=accepted,
        committed=committed,
        reason=reason,
        match=match,
        draft=row[drafts : drafts + k],
        sampled=row[EMISSION_HEAD:drafts],
    )


def coupled_verify(draft: Tensor, sampled: Tensor, num_drafts: Tensor) -> Tensor:
    """Return the number of leading drafts that equal the target's draws, and are accepted: int64
    [S].

    draft [S, k]; sampled [S, k + 1], the target's token for each row of the window; num_drafts [S],
    how many of the k are valid. The token sampled[s, accepted[s]] is the recovered or bonus token.
    Source: Daliri, Musco & Suresh 2024 (drafter-invariant speculation).
    """
    k = draft.shape[1]
    is_valid = torch.arange(k, device=draft.device) < num_drafts.unsqueeze(-1)
    return ((draft == sampled[:, :k]) & is_valid).long().cumprod(dim=-1).sum(dim=-1)


def round_commit(
    state: RoundTensors,
    window: RoundWindow,
    sampled: Tensor,
    finite: Tensor,
    accepted: Tensor | None = None,
    generated: Tensor | None = None,
) -> None:
    """Compute `Kernels.round_commit` by torch."""
    mark_time(state.times, state.counter, COMMITTED, False)
    draft = window.draft
    num_drafts = window.num_drafts
    tokens = state.tokens
    ring = state.ring
    if accepted is None:
        accepted = coupled_verify(draft, sampled, num_drafts)
    k = draft.shape[1]
    before = state.length.clone()
    count, reason = _decide(sampled, finite, accepted, state)
    rows = torch.arange(k + 1, device=sampled.device)
    is_committed = rows < count.unsqueeze(-1)
    token_columns = (before.unsqueeze(-1) + rows).clamp(max=tokens.shape[1] - 1)
    tokens.scatter_(
        1, token_columns, torch.where(is_committed, sampled, tokens.gather(1, token_columns))
    )
    if generated is not None:
        generated.scatter_add_(1, sampled.clamp(min=0), is_committed.to(generated.dtype))
    state.length.add_(count)
    state.active.logical_and_(reason == GOING_ON)
    columns = (before, num_drafts, accepted, count, reason, torch.full_like(before, k), state.match)
    view = ring[:, : before.shape[0]]
    place = state.counter % ring.shape[0]
    emitted = view.index_select(0, place)
    emitted[0, :, : emission_width(k)] = torch.cat(
        (torch.stack(columns, dim=1), sampled, draft), dim=1
    )
    view.index_copy_(0, place, emitted)


def _decide(
    sampled: Tensor, finite: Tensor, accepted: Tensor, state: RoundTensors
) -> tuple[Tensor, Tensor]:
    """Return the samples that each slot commits, and the reason why it ends: int64 [S] each."""
    num_rows = sampled.shape[1]
    rows = torch.arange(num_rows, device=sampled.device)
    is_reached = rows <= accepted.unsqueeze(-1)
    is_stop = (sampled.unsqueeze(-1) == state.stop_ids.unsqueeze(1)).any(dim=-1)
    first_stop = torch.where(is_stop & is_reached, rows, num_rows).amin(dim=-1)
    first_faulty = torch.where(~finite & is_reached, rows, num_rows).amin(dim=-1)
    count = torch.minimum(torch.minimum(accepted, first_stop) + 1, first_faulty)
    count = torch.where(state.active, count, 0)
    reason = torch.where(state.length + count >= state.length_limit, FULL, GOING_ON)
    reason = torch.where((first_stop <= accepted) & (first_stop < first_faulty), STOPPED, reason)
    reason = torch.where((first_faulty <= accepted) & (first_faulty <= first_stop), FAILED, reason)
    return count, torch.where(state.active, reason, GOING_ON)
