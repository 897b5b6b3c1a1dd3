"""Prompt lookup: propose what followed the longest earlier occurrence of the current suffix.

A fixed-shape program over committed tokens only, so it is the same eager and captured. Among equally
long matches the most recent wins.
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
    """Prompt lookup over each slot's own tokens, alone."""

    samples_drafts = False
    slot_attributes = ("state",)

    def __init__(self, state: RoundState, lookup: Lookup) -> None:
        self.state = state
        self.lookup = lookup

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Write up to k tokens that followed the match; none where nothing matches."""
        self.lookup.draft(self.state, k, views, over=False)
