"""Prompt lookup: propose what followed the longest earlier occurrence of the current suffix.

A fixed-shape program over committed tokens only, so it is the same eager and captured. Among equally
long matches the most recent wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from spd.kernels.dispatch import Kernels
from spd.kernels.round.window import RoundWindow
from spd.runtime.proposers.base import Lookup
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.state import RoundState


class NgramProposer(Lookup):
    """Longest suffix match of ngram_min to ngram_max tokens over each slot's own tokens."""

    draws = False
    by_slot = ("state",)

    def __init__(self, state: RoundState, kernels: Kernels, ngram_min: int, ngram_max: int) -> None:
        self.state, self.kernels = state, kernels
        self.ngram_min, self.ngram_max = ngram_min, ngram_max

    def draft(self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplerClass) -> None:
        """Write up to k tokens that followed the match; none where nothing matches."""
        self.look_up(k, views, over=False)

    def look_up(self, k: int, views: Sequence[SlotView], *, over: bool) -> None:
        bound = min(max((view.bound for view in views), default=0), self.state.max_len)
        self.kernels.ngram_lookup(self.state, k, self.ngram_min, self.ngram_max, bound, over)
