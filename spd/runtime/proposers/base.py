"""The common parts of proposers: prompt lookup, and the drafting loop of models and heads.

Proposers know the round's state and their own models, but not each other, the engine or the
scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.interface import Kernels
from spd.kernels.round.window import Paging, RoundWindow, Rows
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.proposer import Proposer
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.state import RoundState


class Lookup(NamedTuple):
    """Prompt lookup for matches of the last tokens, from `shortest` to `longest` of them."""

    kernels: Kernels
    shortest: int
    longest: int

    def draft(self, state: RoundState, k: int, views: Sequence[SlotView], *, over: bool) -> None:
        """Draft up to k tokens a slot.

        With `over`, leave other drafts as they are without a match.
        """
        bound = min(max((view.bound for view in views), default=0), state.max_len)
        self.kernels.ngram_lookup(
            state=state,
            k=k,
            ngram_min=self.shortest,
            ngram_max=self.longest,
            bound=bound,
            keep_drafts=over,
        )


class ArbitratedLookup(NamedTuple):
    """Prompt lookup that replaces a model's drafts where its match is long, slot by slot.

    In a run of copied text the model only costs time. There the host requests more drafts than
    `max_model_drafts`: lookup makes them alone, and the model's cache catches up once it drafts
    again.
    """

    lookup: Lookup
    max_model_drafts: int
    tracks_matches: bool
    """True if lookup may draft alone, for which matches are needed in rounds without drafts too."""


class ModelProposer(Proposer):
    """Drafts by models with their own caches, one forward for each token.

    The runners draft one token each, in turn, and the last one drafts all further tokens. The first
    forward of each runner is fed the committed tokens that its cache lacks. With `refeeds` it is
    fed all tokens that the round may have committed: heads read new states of them, and with prompt
    lookup the verified drafts may not have been the model's. The row of a draft is fed by the
    forward that drafts the next token.
    """

    samples_drafts = True
    slot_attributes: tuple[str, ...] = ("state", "sampler")

    def __init__(
        self,
        sampler: Sampler,
        runners: Sequence[ModelRunner],
        limit: int,
        arbitrated_lookup: ArbitratedLookup | None = None,
    ) -> None:
        """limit: number of positions that the models support."""
        self.state = sampler.state
        self.kernels = sampler.kernels
        self.sampler = sampler
        self.runners = list(runners)
        first = runners[0]
        self.lookup: Lookup | None = None
        self.refeeds = self.reads_target_states or arbitrated_lookup is not None
        self.paging = Paging(first.cache.page_size, limit, first.trash_slot)
        if arbitrated_lookup is not None:
            self.lookup = arbitrated_lookup.lookup
            self.max_model_drafts = arbitrated_lookup.max_model_drafts
            self.tracks_matches = arbitrated_lookup.tracks_matches

    def _window(self, width: int, ahead: int, slots: Tensor) -> Rows:
        """Return the rows of the last `width` committed tokens and `ahead` drafts of slots, bool
        [S].

        No row lies before the end of the prefill.
        """
        first = self.state.prompt_length - 1
        cache = self.runners[0].cache
        if cache.recurrent:  # a state's tokens cannot be fed again
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

    def _run(
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
        rows = self._window(width, 0, self.state.occupied)
        for module in range(len(self.runners)):
            self._run(module, rows, views)

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Propose k tokens a slot: those after a long match, or the models' drafts.

        With k = 0 only search for a match.
        """
        model_drafts = self.lookup is None or 0 < k <= self.max_model_drafts
        if model_drafts:
            self._draft(k, window, views, needs)
        if self.lookup is not None:
            self.lookup.draft(self.state, k, views, over=model_drafts)
            if model_drafts:
                self.sampler.make_certain(k)

    def _draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Draft k tokens a slot by the models, fewer where their context ends."""
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
                hidden = self._run(step, self._window(width, step, took_part), views)[:, -1:]
            else:
                hidden = self._run(last, next_rows, views, hidden)
            if step < k:
                tokens = self.sampler.draw_draft(self.runners[min(step, last)], hidden, step, needs)
                next_rows = self.kernels.draft_step(
                    state=self.state, sampled=tokens, step=step, k=k, paging=self.paging
                )

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages of the models' caches."""
        for runner in self.runners:
            runner.cache.zero_pages(pages)
