"""One round of speculative decoding: a fixed-shape program over static tensors for S slots.

    window  = [last committed token, draft 1 ... draft k]      R = k + 1 rows, at positions length - 1 ...
    hidden  = target(window)                      writes keys and values of all R rows
    logits  = head(hidden)                        [S, R, vocabulary]
    scores  = process(logits)                     bias, penalties, grammar, temperature, top-k, top-p, min-p:
                                                  in each row as if the drafts before it were accepted
    sampled = argmax(scores + Gumbel noise(seed, position))    the target's own token after each row
    n       = the number of leading drafts with draft i = sampled i
    commit    sampled 0 ... n                     n accepted drafts, then the recovered token, or after n = k
                                                  the bonus token; length grows by n + 1
    emit      the tokens and n into a ring, which the host reads `lag` rounds later
    draft     the next k tokens after the last committed one, for the next round: by a model, by prompt
              lookup where the text's end occurred before, or by lookup behind the model's drafts

The emitted tokens are always the target's own samples: drafts change the speed, never the text.
Rejected rows need no clean-up, since cache rows beyond `length` are overwritten before they are
read. Plain decoding is the round with k = 0. The host decides nothing inside of a round and reads
nothing from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spd.kernels.interface import Kernels
from spd.kernels.round.window import ENDED, VERIFIED, Paging, RoundWindow
from spd.runtime.round.imposed_acceptance import ImposedAcceptance
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.proposer import Lookup, Proposer
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.state import RoundState

Logprobs = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities of the samples [S, R]; the likeliest values and ids [S, R, N]."""


class Round:
    """The device program of a round, over slots and tensors. It does not know requests."""

    slot_attributes = ("state", "sampler", "proposer")

    def __init__(
        self,
        state: RoundState,
        runner: ModelRunner,
        sampler: Sampler,
        proposer: Proposer | None,
        kernels: Kernels,
        imposed_acceptance: ImposedAcceptance | None = None,
        verify_rule: str = "coupled",
        share_drafts: Callable[[Tensor], None] | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        """verify_rule: "coupled", "rejection" or "block".

        share_drafts: overwrites the drafts of ranks that draft separately with rank 0's.
        """
        self.state = state
        self.runner = runner
        self.sampler = sampler
        self.proposer = proposer
        self.kernels = kernels
        self.imposed_acceptance = imposed_acceptance
        self.verify_rule = verify_rule
        self.share_drafts = share_drafts
        self.lookup = lookup

    @torch.inference_mode()
    def run(
        self,
        k: int,
        views: Sequence[SlotView],
        needs: SamplingSteps,
        num_logprobs: int | None,
        next_k: int,
        chained: int = 0,
    ) -> Logprobs | None:
        """Verify the k drafts of every active slot, commit, emit, and draft next_k more.

        chained: drafts of a model that lookup continues up to next_k; 0 where one of them drafts.
        These are the lines at the top of this file. views: upper bounds of each slot's cache up to
        the end of this round's drafting, which only kernels in torch's form use. Increments the
        state's counter. Returns the log-probabilities that `num_logprobs` asks for; None without.
        """
        state = self.state
        kernels = self.kernels
        paging = Paging(self.runner.cache.page_size, state.max_len, self.runner.trash_slot)
        window = kernels.round_window(state, k, paging, self.sampler.usable_vocab)
        hidden, states = self.runner.forward(window, state.page_table, views)
        if self.proposer is not None:
            self.proposer.store_target_states(window, states)
        if not kernels.capabilities.reads_no_lengths:  # on a GPU a launch more costs too much
            kernels.mark_time(state.times, state.counter, VERIFIED, False)
        sampled, finite, accepted, logprobs = self._sample_rows(
            hidden, window, views, needs, num_logprobs
        )
        if self.imposed_acceptance is not None and k:
            accepted = self.imposed_acceptance.count_accepted(state.length, window.num_drafts, k)
        self._commit_and_emit(
            window=window, sampled=sampled, finite=finite, accepted=accepted, needs=needs
        )
        model_drafts = chained or self.count_model_drafts(next_k)
        if self.proposer is not None and model_drafts:
            self.proposer.draft(model_drafts, window, views, needs)
            if self.share_drafts is not None:
                self.share_drafts(state.draft[:, :model_drafts])
        if self.lookup is not None and (next_k or self.lookup.may_draft_more):
            self.lookup.draft(state, next_k, model_drafts, views)
            if model_drafts:
                self.sampler.store_certain_distributions(next_k)
        kernels.mark_time(state.times, state.counter, ENDED, True)
        return logprobs

    def count_model_drafts(self, next_k: int) -> int:
        """Return how many of next_k drafts a model makes: all, or where lookup drafts more none."""
        if self.proposer is None or (
            self.lookup is not None and next_k > self.lookup.max_model_drafts
        ):
            return 0
        return next_k

    def _sample_rows(
        self,
        hidden: Tensor,
        window: RoundWindow,
        views: Sequence[SlotView],
        needs: SamplingSteps,
        num_logprobs: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Logprobs | None]:
        """Sample a token for each row of hidden [S, R, hidden], and apply the rule of verification.

        Returns the tokens, which of them are drawn from finite logits, the number of accepted
        drafts, and log-probabilities. With the rule "coupled" the tokens are the target's own
        samples, and the commit counts the drafts that equal them (accepted is None). So it is
        without noise, where all rules accept these drafts. Otherwise the rule decides.
        """
        coupled = self.verify_rule == "coupled" or not needs.noise
        accepted = None
        if coupled and num_logprobs is None:
            fused = self.sampler.draw_fused(self.runner, hidden, 0, needs)
            if fused is not None:
                sampled, finite = fused
                return sampled, finite, None, None
        logits = self.runner.logits(hidden, views)
        if coupled:
            sampled, finite = self.sampler.sample_rows(logits, window.draft, needs)
        else:
            sampled, finite, accepted = self.sampler.verify_drafts(
                logits, window.draft, window.num_drafts, needs, self.verify_rule == "block"
            )
        logprobs = (
            None if num_logprobs is None else self._compute_logprobs(logits, sampled, num_logprobs)
        )
        return sampled, finite, accepted, logprobs

    def _commit_and_emit(
        self,
        window: RoundWindow,
        sampled: Tensor,
        finite: Tensor,
        accepted: Tensor | None,
        needs: SamplingSteps,
    ) -> None:
        """Append the results of `_sample_rows`, advance the lengths, stop slots, and emit."""
        generated = self.sampler.generated if needs.penalties else None
        self.kernels.round_commit(
            state=self.state,
            window=window,
            sampled=sampled,
            finite=finite,
            accepted=accepted,
            generated=generated,
        )

    def _compute_logprobs(self, logits: Tensor, sampled: Tensor, top: int) -> Logprobs:
        """Return the log-probabilities, before any sampling step, of the samples [S, R] and of the
        `top` likeliest tokens.
        """
        scores = logits.log_softmax(dim=-1)
        sampled = sampled.clamp(min=0)
        values, ids = scores.topk(top, dim=-1)
        return scores.gather(-1, sampled.unsqueeze(-1)).squeeze(-1), values, ids
