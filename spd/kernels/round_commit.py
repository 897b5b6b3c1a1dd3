"""The end of a verification: which tokens are kept, why a slot ends, and what the host will read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.coupled_verify import coupled_verify
from spd.kernels.round_finish import COMMITTED, mark_time

GOING_ON, STOPPED, FULL, FAILED = 0, 1, 2, 3

EMISSION_HEAD = 7
"""Columns before the drafts: length before the round, num_drafts, accepted, committed, reason, k, match."""
NUM_DRAFTS, ACCEPTED, MATCH = 1, 2, 6


class Emission(NamedTuple):
    """What one round did to one slot, in host values."""

    length: int  # before the round
    num_drafts: int  # how many drafts entered verification
    accepted: int  # leading drafts that equal the samples
    committed: int  # tokens appended; 0 for a silent slot
    reason: int  # GOING_ON, STOPPED, FULL or FAILED
    match: int  # tokens of the match that prompt lookup took the drafts from; 0 where a model drafted
    draft: list[int]  # the k drafts that were fed
    sampled: list[int]  # the target's token for each of k + 1 rows


def emission_width(max_k: int) -> int:
    """Columns of an emission that may hold max_k drafts: head, drafts, samples."""
    return EMISSION_HEAD + 2 * max_k + 1


def emission_max_k(width: int) -> int:
    """How many drafts an emission of that many columns may hold."""
    return (width - EMISSION_HEAD - 1) // 2


def first_sample(width: int) -> int:
    """The column in which the samples of an emission of that many columns begin."""
    return EMISSION_HEAD + emission_max_k(width)


def read_emission(row: list[int]) -> Emission:
    """One slot's row of the ring, as `round_commit` wrote it, in host values."""
    length, num_drafts, accepted, committed, reason, k, match = row[:EMISSION_HEAD]
    samples = first_sample(len(row))
    draft, sampled = row[EMISSION_HEAD : EMISSION_HEAD + k], row[samples : samples + k + 1]
    return Emission(length, num_drafts, accepted, committed, reason, match, draft, sampled)


def round_commit(
    draft: Tensor,
    num_drafts: Tensor,
    sampled: Tensor,
    finite: Tensor,
    tokens: Tensor,
    length: Tensor,
    length_limit: Tensor,
    stop_ids: Tensor,
    active: Tensor,
    generated: Tensor | None,
    ring: Tensor,
    counter: Tensor,
    accepted: Tensor | None = None,
    times: Tensor | None = None,
    match: Tensor | None = None,
) -> None:
    """Append accepted + 1 samples, fewer at a stop id or a row that is not finite, and say so in the ring.

    draft int64 [S, k] and num_drafts int64 [S] are the window's; sampled int64 and finite bool [S, k + 1];
    stop_ids int64 [S, N]. Written in place: tokens int64 [S, T] from column length on (T at least length
    + k + 1), length and active [S], generated int32 [S, V] (plus one a committed token), and columns of
    ring int64 [depth, >= S, W] at counter % depth, W at least emission_width(k); see `read_emission`. The
    counter int64 [1] stays. accepted int64 [S], 0 to k, comes from another rule than coupled verification;
    samples beyond it may be no tokens at all.
    With times int64 [depth, NUM_TIMES] the commit is marked there. match int64 [S] says of which match
    the drafts are, 0 for none; without it none is.
    """
    if times is not None:
        mark_time(times, counter, COMMITTED, False)
    if accepted is None:
        accepted = coupled_verify(draft, sampled, num_drafts)
    k = draft.shape[1]
    before = length.clone()
    count, reason = _decide(sampled, finite, accepted, length, length_limit, stop_ids, active)
    rows = torch.arange(k + 1, device=sampled.device)
    kept = rows < count.unsqueeze(-1)
    where = (before.unsqueeze(-1) + rows).clamp(max=tokens.shape[1] - 1)
    tokens.scatter_(1, where, torch.where(kept, sampled, tokens.gather(1, where)))
    if generated is not None:
        generated.scatter_add_(1, sampled.clamp(min=0), kept.to(generated.dtype))
    length += count
    active &= reason == GOING_ON
    match = torch.zeros_like(before) if match is None else match
    columns = (before, num_drafts, accepted, count, reason, torch.full_like(before, k), match)
    view, place = ring[:, : before.shape[0]], counter % ring.shape[0]
    emitted = view.index_select(0, place)
    samples = first_sample(ring.shape[2])
    emitted[0, :, : EMISSION_HEAD + k] = torch.cat((torch.stack(columns, dim=1), draft), dim=1)
    emitted[0, :, samples : samples + k + 1] = sampled
    view.index_copy_(0, place, emitted)


def _decide(
    sampled: Tensor,
    finite: Tensor,
    accepted: Tensor,
    length: Tensor,
    length_limit: Tensor,
    stop_ids: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor]:
    """How many samples each slot keeps, and the reason why it ends: int64 [S] each."""
    none = sampled.shape[1]
    rows = torch.arange(none, device=sampled.device)
    reached = rows <= accepted.unsqueeze(-1)
    stops = (sampled.unsqueeze(-1) == stop_ids.unsqueeze(1)).any(dim=-1)
    stop = torch.where(stops & reached, rows, none).amin(dim=-1)
    bad = torch.where(~finite & reached, rows, none).amin(dim=-1)
    count = torch.minimum(torch.minimum(accepted, stop) + 1, bad)
    count = torch.where(active, count, 0)
    reason = torch.where(length + count >= length_limit, FULL, GOING_ON)
    reason = torch.where((stop <= accepted) & (stop < bad), STOPPED, reason)
    reason = torch.where((bad <= accepted) & (bad <= stop), FAILED, reason)
    return count, torch.where(active, reason, GOING_ON)
