"""Prompt lookup: the drafts are the tokens after the longest earlier occurrence of the current
suffix.

It is a fixed-shape program over committed tokens only, so it is the same eager and captured. Of
equally long matches the most recent is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from spd.kernels.round.window import RoundWindow
from spd.runtime.proposers.base import Lookup
from spd.runtime.round.proposer import Proposer
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.state import RoundState


class NgramProposer(Proposer):
    """Prompt lookup over each slot's tokens, without a model."""

    samples_drafts = False
    slot_attributes = ("state",)

    def __init__(self, state: RoundState, lookup: Lookup) -> None:
        self.state = state
        self.lookup = lookup

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Write up to k tokens that followed the match; none without a match."""
        self.lookup.draft(self.state, k, views, over=False)
