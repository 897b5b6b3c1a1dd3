"""An independent draft model with its own paged cache, sharing the target's page numbers.

A round runs exactly k draft forwards. The first takes every token whose draft KV is missing: the last
two committed ones, or more after rounds that did not draft. Rejected positions need no undoing: they
lie beyond the committed length and are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spd.runtime.model_runner import ModelRunner, SlotView
from spd.runtime.sampler import Sampler
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.spans import Run, clip_runs
from spd.runtime.state import RoundState

CATCH_UP = 16
"""Rounds without drafting after which the cache is brought up in one pass."""


class DraftModelProposer:
    """Drafts by a small model, with the target's noise on the draft's own distribution."""

    method = "draft"

    def __init__(self, state: RoundState, runner: ModelRunner, sampler: Sampler, draft_limit: int) -> None:
        self.state, self.runner, self.sampler = state, runner, sampler
        self.draft_limit: int | None = draft_limit
        self.limit = draft_limit
        self.behind = 0

    def prefill(self, token_ids: Tensor, start: int, end: int, runs: Sequence[Run], view: SlotView) -> None:
        """Feed the prompt up to the draft model's own context limit."""
        end = min(end, self.limit)
        if start < end:
            self.runner.prefill(token_ids, start, end, clip_runs(runs, end), view)

    def clear(self, pages: list[int]) -> None:
        """Zero pages of the draft's cache."""
        self.runner.cache.clear(pages)

    def _forward(self, tokens: Tensor, positions: Tensor, views: Sequence[SlotView]) -> Tensor:
        """Hidden states [S, Q, hidden]; rows outside the limit or of silent slots write nothing."""
        state = self.state
        valid = state.active.unsqueeze(-1) & (positions >= 0) & (positions < state.draft_limit.unsqueeze(-1))
        clamped = positions.clamp(0, self.limit - 1)
        return self.runner.forward(tokens, clamped, valid, state.page_table, views)

    def _committed_window(self, width: int) -> tuple[Tensor, Tensor]:
        """The last `width` committed tokens and their positions, [S, width]; some may be negative."""
        positions = self.state.length.unsqueeze(-1) - width + torch.arange(width, device=self.state.device)
        return self.state.tokens.gather(1, positions.clamp(min=0)), positions

    def skip(self, views: Sequence[SlotView]) -> int:
        """Count a round without drafts; every 16 of them, feed what was committed meanwhile."""
        self.behind += 1
        if self.behind < CATCH_UP:
            return 0
        self._forward(*self._committed_window(self.behind + 1), views)
        self.behind = 0
        return 1

    def draft(self, k: int, views: Sequence[SlotView], needs: SamplerClass) -> int:
        """Propose k tokens a slot, fewer where the draft's context ends."""
        state = self.state
        tokens, positions = self._committed_window(2 + self.behind)
        self.behind = 0
        last = state.length.unsqueeze(-1)
        for step in range(k):
            hidden = self._forward(tokens, positions, views)[:, -1:]
            at = last + step
            tokens = self.sampler.draw_draft(self.runner.logits(hidden), at, needs)
            positions = at
            state.draft[:, step : step + 1] = tokens
        room = (state.draft_limit - state.length + 1).clamp(0, k)
        state.num_drafts.copy_(torch.where(state.active, room, 0))
        return k
