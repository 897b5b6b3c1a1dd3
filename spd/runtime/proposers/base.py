"""What proposers share: prompt lookup, and the drafting loop of models and heads.

Proposers know the round's state and their own model; never each other, the engine or the scheduler.
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
    """Prompt lookup: what followed where the last tokens, from `shortest` to `longest`, came before."""

    kernels: Kernels
    shortest: int
    longest: int

    def draft(self, state: RoundState, k: int, views: Sequence[SlotView], *, over: bool) -> None:
        """Draft up to k tokens a slot; `over` other drafts only where it finds some."""
        bound = min(max((view.bound for view in views), default=0), state.max_len)
        self.kernels.ngram_lookup(state, k, self.shortest, self.longest, bound, over)


class ArbitratedLookup(NamedTuple):
    """Prompt lookup that takes a model's place where its match is long: each slot keeps the drafts of one.

    In a run of copied text the model would only be in the way. The host asks for more drafts than it makes:
    lookup makes those alone, and what the model's cache misses is brought up once it drafts again.
    """

    lookup: Lookup
    max_model_drafts: int  # of the model
    tracks_matches: (
        bool  # whether lookup may draft alone, so that matches matter where no model drafts
    )


class ModelProposer(Proposer):
    """Drafts by models with caches of their own, one forward a token.

    The runners draft one token each, in turn; the last one drafts all that follow. The first forward of each
    feeds the committed tokens that its cache lacks, or everything that the round may have committed where
    `refeeds`: heads read new states of it, and beside lookup others' drafts were verified. A draft's own row
    is fed by the forward that drafts the next.
    """

    samples_drafts = True
    slot_attributes: tuple[str, ...] = ("state", "sampler")

    def __init__(
        self,
        sampler: Sampler,
        runners: Sequence[ModelRunner],
        limit: int,
        beside: ArbitratedLookup | None = None,
    ) -> None:
        """limit: positions that the models take."""
        self.state = sampler.state
        self.kernels = sampler.kernels
        self.sampler = sampler
        self.runners = list(runners)
        first = runners[0]
        self.lookup = None
        self.refeeds = self.reads_target_states or beside is not None
        self.paging = Paging(first.cache.page_size, limit, first.trash_slot)
        if beside is not None:
            self.lookup, self.max_model_drafts, self.tracks_matches = beside

    def _window(self, width: int, ahead: int, slots: Tensor) -> Rows:
        """The last `width` committed tokens of slots bool [S], from where the prefill ended, and drafts."""
        first = self.state.prompt_length - 1
        cache = self.runners[0].cache
        if cache.recurrent:  # what a state has taken in cannot be fed again
            first = torch.maximum(first, cache.applied[: len(first)])
        rows = self.kernels.committed_window(self.state, width, slots, self.paging, first, ahead)
        return rows

    def _run(
        self, module: int, rows: Rows, views: Sequence[SlotView], made: Tensor | None = None
    ) -> Tensor:
        """Hidden states [S, W, hidden] of rows.

        made: those of the row before [S, 1, hidden], where the last runner goes on from its own draft.
        """
        raise NotImplementedError

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Feed the tokens that were left out, and the one before them.

        A slot admitted since then has fewer: its prefilled pages, which may be shared, stay as they are.
        """
        width = tokens + 1 + (self.state.max_draft if self.refeeds else 0)
        rows = self._window(width, 0, self.state.occupied)
        for module in range(len(self.runners)):
            self._run(module, rows, views)

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Propose k tokens a slot: what followed a long match, else the models'; 0: only look for a match."""
        drafts = self.lookup is None or 0 < k <= self.max_model_drafts
        if drafts:
            self._draft(k, window, views, needs)
        if self.lookup is not None:
            self.lookup.draft(self.state, k, views, over=drafts)
            if drafts:
                self.sampler.make_certain(k)

    def _draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Propose k tokens a slot, fewer where the models' context ends."""
        # After the prefill the last prompt token is fed too, though the round committed one token only.
        # A request that ended in this round is fed as well: later ones find its pages.
        width = max(2, window.draft.shape[1] + 1) if self.refeeds else 2
        took_part = window.valid[:, 0].contiguous()
        last = len(self.runners) - 1
        made = torch.empty(0)
        following = None
        for step in range(max(k, last + 1)):
            if following is None or step <= last:
                made = self._run(step, self._window(width, step, took_part), views)[:, -1:]
            else:
                made = self._run(last, following, views, made)
            if step < k:
                drawn = self.sampler.draw_draft(self.runners[min(step, last)], made, step, needs)
                following = self.kernels.draft_step(self.state, drawn, step, k, self.paging)

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages of the models' caches."""
        for runner in self.runners:
            runner.cache.zero_pages(pages)
