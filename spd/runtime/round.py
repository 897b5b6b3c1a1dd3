"""One round: verify, sample, accept, commit, draft. A fixed-shape program over static tensors.

Plain decoding is the same round with k = 0. The host decides nothing inside it and reads nothing
from it: what happened is emitted as tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.coupled_verify import coupled_verify
from spd.runtime.model_runner import ModelRunner, SlotView
from spd.runtime.proposers.base import Proposer
from spd.runtime.sampler import Sampler
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.state import RoundState

GOING_ON, STOPPED, FULL, FAILED = 0, 1, 2, 3


@dataclass(frozen=True)
class RoundOutput:
    """What one round emits; the first dimension is the slot, R = k + 1."""

    length: Tensor  # [S] before the round
    draft: Tensor  # [S, k] the drafts that were fed
    num_drafts: Tensor  # [S] how many of them entered verification
    sampled: Tensor  # [S, R] the target's token for every row
    accepted: Tensor  # [S] leading drafts that equal the samples
    committed: Tensor  # [S] tokens appended; 0 for a silent slot
    reason: Tensor  # [S] GOING_ON, STOPPED, FULL or FAILED
    logprobs: tuple[Tensor, Tensor, Tensor] | None  # of the samples [S, R]; top values, ids [S, R, N]
    draft_forwards: int
    seconds: tuple[float, float, float]  # draft, verify, rest: host clock


class Round:
    """The device program. Knows slots and tensors; not requests."""

    def __init__(
        self,
        state: RoundState,
        runner: ModelRunner,
        sampler: Sampler,
        proposer: Proposer | None,
        clock: Callable[[], None],
    ) -> None:
        self.state, self.runner, self.sampler, self.proposer = state, runner, sampler, proposer
        self.clock = clock

    def _now(self) -> float:
        self.clock()
        return time.perf_counter()

    @torch.inference_mode()
    def run(
        self, k: int, views: Sequence[SlotView], needs: SamplerClass, num_logprobs: int | None, next_k: int
    ) -> RoundOutput:
        """Verify the k drafts of every active slot, commit, and draft next_k more.

        views bound each slot's cache through this round's drafting.
        """
        began = self._now()
        state = self.state
        draft, num_drafts = self._usable_drafts(k)
        last = state.tokens.gather(1, (state.length - 1).unsqueeze(-1))
        offsets = torch.arange(k + 1, device=state.device)
        positions = (state.length - 1).unsqueeze(-1) + offsets
        valid = state.active.unsqueeze(-1) & (offsets <= num_drafts.unsqueeze(-1))
        window = torch.cat((last, draft), dim=1)
        hidden = self.runner.forward(
            window, positions.clamp(max=state.max_len - 1), valid, state.page_table, views
        )
        logits = self.runner.logits(hidden)
        verified = self._now()
        processed = self.sampler.process(logits, draft, needs)
        sampled = self.sampler.draw(processed, positions + 1, needs)
        accepted = coupled_verify(draft, sampled, num_drafts)
        finite = processed.gather(-1, sampled.unsqueeze(-1)).squeeze(-1).isfinite()
        length = state.length.clone()
        committed, reason = self._commit(sampled, accepted, finite)
        logprobs = self._logprobs(logits, sampled, num_logprobs) if num_logprobs is not None else None
        sampled_at = self._now()
        forwards = 0
        if self.proposer is not None:
            forwards = self.proposer.draft(next_k, views, needs) if next_k else self.proposer.skip(views)
        ended = self._now()
        seconds = (ended - sampled_at, verified - began, sampled_at - verified)
        return RoundOutput(
            length, draft, num_drafts, sampled, accepted, committed, reason, logprobs, forwards, seconds
        )

    def _usable_drafts(self, k: int) -> tuple[Tensor, Tensor]:
        """The k drafts with ids made safe to look up, and how many lead without a flaw and fit."""
        state = self.state
        draft = state.draft[:, :k].clone()
        known = (draft >= 0) & (draft < self.sampler.usable_vocab)
        leading = known.long().cumprod(dim=-1).sum(dim=-1)
        room = (state.length_limit - state.length - 1).clamp(min=0)
        num_drafts = torch.minimum(torch.minimum(state.num_drafts.clamp(0, k), leading), room)
        return torch.where(known, draft, 0), num_drafts

    def _commit(self, sampled: Tensor, accepted: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Append accepted + 1 tokens, fewer at a stop id, a limit or a row without finite logits."""
        state = self.state
        rows = torch.arange(sampled.shape[1], device=state.device)
        none = sampled.shape[1]

        def first(flags: Tensor) -> Tensor:
            return torch.where(flags, rows, none).amin(dim=-1)

        stop = first(state.is_stop(sampled) & (rows <= accepted.unsqueeze(-1)))
        bad = first(~finite & (rows <= accepted.unsqueeze(-1)))
        count = torch.minimum(torch.minimum(accepted, stop) + 1, bad)
        count = torch.where(state.active, count, 0)
        new_length = state.length + count
        reason = torch.where(new_length >= state.length_limit, FULL, GOING_ON)
        reason = torch.where((stop <= accepted) & (stop < bad), STOPPED, reason)
        reason = torch.where((bad <= accepted) & (bad < stop), FAILED, reason)
        reason = torch.where(state.active, reason, GOING_ON)
        kept = rows < count.unsqueeze(-1)
        where = torch.where(kept, state.length.unsqueeze(-1) + rows, state.tokens.shape[1] - 1)
        state.tokens.scatter_(1, where, sampled)
        if self.sampler.counts is not None:
            self.sampler.counts.commit(sampled, kept)
        state.length.copy_(new_length)
        state.active &= reason == GOING_ON
        return count, reason

    def _logprobs(self, logits: Tensor, sampled: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """The model's own log-probabilities: of the samples [S, R], and the `top` likeliest ones."""
        scores = logits.log_softmax(dim=-1)
        values, ids = scores.topk(top, dim=-1) if top else (scores[..., :0], sampled[..., None][..., :0])
        return scores.gather(-1, sampled.unsqueeze(-1)).squeeze(-1), values, ids
