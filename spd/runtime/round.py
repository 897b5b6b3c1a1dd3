"""One round: verify, sample, accept, commit, draft. A fixed-shape program over static tensors.

Plain decoding is the same round with k = 0. The host decides nothing inside it and reads nothing
from it: what happened is emitted into the state's ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.round_finish import ENDED, VERIFIED
from spd.kernels.round_window import RoundWindow
from spd.runtime.imposed import ImposedAcceptance
from spd.runtime.model_runner import ModelRunner
from spd.runtime.proposers.base import Proposer
from spd.runtime.rows import SlotView
from spd.runtime.sampler import Sampler
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.state import RoundState

Logprobs = tuple[Tensor, Tensor, Tensor]
"""Of the samples [S, R]; the likeliest values and ids [S, R, N]."""


class Round:
    """The device program. Knows slots and tensors; not requests."""

    def __init__(
        self,
        state: RoundState,
        runner: ModelRunner,
        sampler: Sampler,
        proposer: Proposer | None,
        kernels: Kernels,
        imposed: ImposedAcceptance | None = None,
        verify: str = "coupled",
        share: Callable[[Tensor], None] | None = None,
    ) -> None:
        """share: makes a tensor the same on ranks that draft apart."""
        self.state, self.runner, self.sampler, self.proposer = state, runner, sampler, proposer
        self.kernels, self.imposed, self.verify, self.share = kernels, imposed, verify, share
        self.follows = True
        """Whether the proposer keeps up with any slot."""

    def first(self, count: int) -> Round:
        """The same round of the first `count` slots, sharing every tensor; others are left as they are."""
        part = copy(self)
        part.state = self.state.first(count)
        part.sampler = self.sampler.first(part.state)
        part.proposer = self.proposer and self.proposer.first(part.state, part.sampler)
        return part

    @torch.inference_mode()
    def run(
        self, k: int, views: Sequence[SlotView], needs: SamplerClass, num_logprobs: int | None, next_k: int
    ) -> Logprobs | None:
        """Verify the k drafts of every active slot, commit, emit, and draft next_k more.

        views bound each slot's cache through this round's drafting; only kernels in torch's form ask
        for them. Moves the state's counter on by one.
        """
        state, kernels = self.state, self.kernels
        window: RoundWindow = kernels.round_window(
            state.tokens,
            state.length,
            state.draft,
            state.num_drafts,
            state.active,
            state.length_limit,
            state.page_table,
            k,
            self.runner.cache.page_size,
            self.sampler.usable_vocab,
            state.max_len,
            self.runner.trash_slot,
            state.times,
            state.counter,
            state.draft_cap,
        )
        hidden, states = self.runner.forward(window, state.page_table, views, for_head=self.follows)
        if self.proposer is not None and self.follows:
            self.proposer.capture(window, states)
        if kernels.name != "triton":  # on a GPU one more launch would cost more than it tells
            kernels.mark_time(state.times, state.counter, VERIFIED, False)
        sampled, finite, accepted, logprobs = self._sample(hidden, window, views, needs, num_logprobs)
        self._commit(window, sampled, finite, accepted, needs)
        if self.proposer is not None and next_k:
            self.proposer.draft(next_k, window, views, needs)
            if self.share is not None:
                self.share(state.draft[:, :next_k])
        elif self.proposer is not None:
            self.proposer.watch(views)
        kernels.mark_time(state.times, state.counter, ENDED, True)
        return logprobs

    def _sample(
        self,
        hidden: Tensor,
        window: RoundWindow,
        views: Sequence[SlotView],
        needs: SamplerClass,
        num_logprobs: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Logprobs | None]:
        """A token for each row of hidden [S, R, hidden], whether each is finite, accepted, logprobs.

        Coupled, tokens are the target's own draws, and the commit says how many drafts equal them; so too
        where nothing is drawn, for there every rule accepts just that. Else the rule decides.
        """
        coupled, accepted = self.verify == "coupled" or not needs.noise, None
        if coupled and num_logprobs is None:
            drawn = self.sampler.draw_fused(self.runner, hidden, 0, needs)
            if drawn is not None:
                return *drawn, None, None
        logits = self.runner.logits(hidden, views)
        if coupled:
            sampled, finite = self.sampler.sample(logits, window.draft, needs)
        else:
            sampled, finite, accepted = self.sampler.verify(
                logits, window.draft, window.num_drafts, needs, self.verify == "block"
            )
        if num_logprobs is None:
            return sampled, finite, accepted, None
        return sampled, finite, accepted, self._logprobs(logits, sampled, num_logprobs)

    def _commit(
        self,
        window: RoundWindow,
        sampled: Tensor,
        finite: Tensor,
        accepted: Tensor | None,
        needs: SamplerClass,
    ) -> None:
        state, counts = self.state, self.sampler.counts
        if self.imposed is not None and window.draft.shape[1]:
            accepted = self.imposed.accepted(state.length, window.num_drafts, window.draft.shape[1])
        self.kernels.round_commit(
            window.draft,
            window.num_drafts,
            sampled,
            finite,
            state.tokens,
            state.length,
            state.length_limit,
            state.stop_ids,
            state.active,
            counts.generated if counts is not None and needs.penalties else None,
            state.ring,
            state.counter,
            accepted,
            state.times,
            state.match if self.proposer is not None and self.proposer.looks_up else None,
        )

    def _logprobs(self, logits: Tensor, sampled: Tensor, top: int) -> Logprobs:
        """The model's own log-probabilities: of the samples [S, R], and the `top` likeliest ones."""
        scores, sampled = logits.log_softmax(dim=-1), sampled.clamp(min=0)
        values, ids = scores.topk(top, dim=-1) if top else (scores[..., :0], sampled[..., None][..., :0])
        return scores.gather(-1, sampled.unsqueeze(-1)).squeeze(-1), values, ids
