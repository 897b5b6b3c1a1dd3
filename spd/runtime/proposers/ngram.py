"""Prompt lookup: the drafts are the tokens after the longest earlier occurrence of the current
suffix.

It is a fixed-shape program over committed tokens and drafts, so it is the same eager and captured.
Of equally long matches the most recent is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spd.kernels.interface import Kernels
from spd.runtime.round.rows import SlotView
from spd.runtime.round.state import RoundState


class NgramLookup(NamedTuple):
    """Prompt lookup for matches of the last tokens, from `shortest` to `longest` of them.

    Beside a model it replaces the drafts of a slot whose text ends with a match: there the model
    only costs time. Of another slot it continues the drafts where the text with them ends with one.
    """

    kernels: Kernels
    shortest: int
    longest: int
    max_model_drafts: int = 0
    """Drafts of a model in a round at most; in rounds with more lookup drafts alone."""
    may_draft_more: bool = False
    """True if it may draft more than the model: it then searches in all rounds."""

    def draft(
        self, state: RoundState, k: int, model_drafts: int, views: Sequence[SlotView]
    ) -> None:
        """Draft up to k tokens a slot, where a model has drafted `model_drafts`.

        A slot without a match has the model's drafts, or none.
        """
        bound = min(max((view.bound for view in views), default=0), state.max_len)
        self._search(state, k, bound, keep=model_drafts > 0)
        if model_drafts and self.may_draft_more:
            self._search(state, k, bound, keep=True, behind=model_drafts)

    def _search(
        self, state: RoundState, k: int, bound: int, *, keep: bool, behind: int = 0
    ) -> None:
        """Run one search; see `Kernels.ngram_lookup`."""
        self.kernels.ngram_lookup(
            state=state,
            k=k,
            ngram_min=self.shortest,
            ngram_max=self.longest,
            bound=bound,
            keep_drafts=keep,
            behind=behind,
        )
