"""The common parts of proposers: the drafting loop of models and heads.

Proposers know the round's state and their own models, but not each other, the engine or the
scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spd.kernels.round.window import Paging, RoundWindow, Rows
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.proposer import Proposer
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingSteps


class ModelProposer(Proposer):
    """Drafts by models with their own caches, one forward for each token.

    The runners draft one token each, in turn, and the last one drafts all further tokens. The first
    forward of each runner is fed the committed tokens that its cache lacks. With `refeeds` it is
    fed all tokens that the round may have committed: heads read new states of them, and with prompt
    lookup the verified drafts may not have been the model's. The row of a draft is fed by the
    forward that drafts the next token.
    """

    slot_attributes: tuple[str, ...] = ("state", "sampler")

    def __init__(
        self,
        sampler: Sampler,
        runners: Sequence[ModelRunner],
        limit: int,
        *,
        has_lookup: bool = False,
    ) -> None:
        """limit: number of positions that the models support.

        has_lookup: True if prompt lookup drafts beside the models.
        """
        self.state = sampler.state
        self.kernels = sampler.kernels
        self.sampler = sampler
        self.runners = list(runners)
        first = runners[0]
        self.refeeds = self.reads_target_states or has_lookup
        self.paging = Paging(first.cache.page_size, limit, first.trash_slot)

    def _committed_rows(self, width: int, ahead: int, slots: Tensor) -> Rows:
        """Return the rows of the last `width` committed tokens and `ahead` drafts of slots, bool
        [S].

        No row lies before the end of the prefill.
        """
        first = self.state.prompt_length - 1
        cache = self.runners[0].cache
        if cache.has_recurrent_layers:  # the tokens in a written state cannot be fed again
            first = torch.maximum(first, cache.applied[: len(first)])
        rows = self.kernels.committed_window(
            state=self.state,
            width=width,
            chosen=slots,
            paging=self.paging,
            first=first,
            ahead=ahead,
        )
        return rows

    def _run_module(
        self, module: int, rows: Rows, views: Sequence[SlotView], previous: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [S, W, hidden] of rows.

        previous: the states of the row before, [S, 1, hidden], where the last runner continues
        after its own draft.
        """
        raise NotImplementedError

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Feed the tokens that the caches lack, and the one before them.

        A slot that was admitted meanwhile has fewer: its prefilled pages, which may be shared, are
        not written.
        """
        width = tokens + 1 + self.state.max_draft  # a grammar may have replaced verified drafts
        rows = self._committed_rows(width, 0, self.state.occupied)
        for module in range(len(self.runners)):
            self._run_module(module, rows, views)

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Propose k tokens a slot, fewer where the models' context ends."""
        # After the prefill the last prompt token is fed too, though the round committed only one token.
        # A request that ended in this round is fed as well, since later requests may reuse its pages.
        # A grammar's drafts are not the model's own.
        refeeds = self.refeeds or needs.grammar
        width = max(2, window.draft.shape[1] + 1) if refeeds else 2
        took_part = window.valid[:, 0].contiguous()
        last = len(self.runners) - 1
        hidden = torch.empty(0)
        next_rows = None
        for step in range(max(k, last + 1)):
            if next_rows is None or step <= last:
                hidden = self._run_module(
                    step, self._committed_rows(width, step, took_part), views
                )[:, -1:]
            else:
                hidden = self._run_module(last, next_rows, views, hidden)
            if step < k:
                tokens = self.sampler.draw_draft(self.runners[min(step, last)], hidden, step, needs)
                next_rows = self.kernels.draft_step(
                    state=self.state, sampled=tokens, step=step, k=k, paging=self.paging
                )

    def zero_counters(self) -> None:
        """Zero what programs of the models' products share."""
        for runner in self.runners:
            runner.model.zero_counters()

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages of the models' caches."""
        for runner in self.runners:
            runner.cache.zero_pages(pages)
