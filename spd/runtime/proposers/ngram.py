"""Prompt lookup: propose what followed the longest earlier occurrence of the current suffix.

A fixed-shape program over committed tokens only, so it is the same eager and captured. Among equally
long matches the most recent wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spd.runtime.model_runner import SlotView
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.spans import Run
from spd.runtime.state import RoundState


class NgramProposer:
    """Longest suffix match of ngram_min to ngram_max tokens over each slot's own tokens."""

    method = "ngram"
    draft_limit: int | None = None

    def __init__(self, state: RoundState, ngram_min: int, ngram_max: int) -> None:
        self.state, self.ngram_min, self.ngram_max = state, ngram_min, ngram_max

    def prefill(self, token_ids: Tensor, start: int, end: int, runs: Sequence[Run], view: SlotView) -> None:
        """Nothing to prefill: the tokens are the cache."""

    def skip(self, views: Sequence[SlotView]) -> int:
        """Nothing to catch up."""
        return 0

    def clear(self, pages: list[int]) -> None:
        """No cache."""

    def draft(self, k: int, views: Sequence[SlotView], needs: SamplerClass) -> int:
        """Write up to k tokens that followed the match; none where nothing matches."""
        state = self.state
        width = min(max((view.bound for view in views), default=0), state.max_len)
        if width < 2:
            state.num_drafts.zero_()
            return 0
        tokens = state.tokens[:, :width]
        ends = torch.arange(width, device=tokens.device)
        last = (state.length - 1).unsqueeze(-1)
        matching = (ends < last) & state.active.unsqueeze(-1)
        suffix = torch.zeros_like(tokens)
        for back in range(min(self.ngram_max, width)):
            current = tokens.gather(1, (last - back).clamp(0, width - 1))
            shifted = tokens if back == 0 else torch.nn.functional.pad(tokens, (back, 0), value=-1)[:, :width]
            matching = matching & (shifted == current) & (last >= back)
            suffix += matching
        # The longest suffix first, then the most recent end: one number orders both.
        best = (suffix * (width + 1) + ends).argmax(dim=-1, keepdim=True)
        found = suffix.gather(1, best).squeeze(-1) >= self.ngram_min
        follow = best + 1 + torch.arange(k, device=tokens.device)
        state.draft[:, :k] = tokens.gather(1, follow.clamp(max=width - 1))
        available = (last - best).squeeze(-1).clamp(max=k)
        state.num_drafts.copy_(torch.where(found & state.active, available, 0))
        return 0
