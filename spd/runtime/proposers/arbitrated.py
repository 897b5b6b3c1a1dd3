"""A model or head that drafts, and prompt lookup that takes its place where its match is long.

Both draft for every slot, and each slot keeps the drafts of one. In a run of copied text, in which the
model would only be in the way, the host asks for more drafts than the model makes: lookup makes those
alone, and what the model's cache misses is brought up once it drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spd.kernels.round.window import RoundWindow
from spd.runtime.proposers.base import Lookup, Proposer
from spd.runtime.round.rows import PromptPart, SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplerClass


class ArbitratedProposer(Proposer):
    """`model` drafts up to `most_drafts` tokens, `lookup` as many or, alone, more."""

    looks_up = True
    by_slot = ("sampler", "model", "lookup")

    def __init__(
        self, model: Proposer, lookup: Lookup, sampler: Sampler, most_drafts: int, *, watches: bool
    ) -> None:
        """watches: whether lookup may draft alone, so that matches matter where no model drafts."""
        self.watches, self.most_drafts = watches, most_drafts
        self.model, self.lookup, self.sampler = model, lookup, sampler
        self.captures, self.draws = model.captures, model.draws

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        self.model.admit(slot, start, view)

    def leave(self, slot: int, end: int, page: int) -> None:
        self.model.leave(slot, end, page)

    def page_parts(self, page: int) -> list[Tensor]:
        return self.model.page_parts(page)

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        self.model.prefill(parts, states)

    def capture(self, window: RoundWindow, states: Tensor) -> None:
        self.model.capture(window, states)

    def draft(self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplerClass) -> None:
        """Propose k tokens a slot: what followed a long match, else the model's; 0: only look for a match."""
        if not 0 < k <= self.most_drafts:
            self.lookup.look_up(k, views, over=False)
            return
        self.model.draft(k, window, views, needs)
        self.lookup.look_up(k, views, over=True)
        self.sampler.make_certain(k)

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        self.model.catch_up(tokens, views)

    def clear(self, pages: list[int]) -> None:
        self.model.clear(pages)
