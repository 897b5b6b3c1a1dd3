"""An independent draft model with its own paged cache, sharing the target's page numbers.

A round runs exactly k draft forwards. The first takes every token whose draft KV is missing: the last
two committed ones, or all that the round committed where other drafts than its own may have been verified.
Rejected positions need no undoing: they lie beyond the committed length and are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.round.window import DraftWindow, Places, RoundWindow
from spd.runtime.proposers.base import Proposer
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart, SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.state import RoundState


class DraftModelProposer(Proposer):
    """Drafts by a small model, with the target's noise on the draft's own distribution."""

    method = "draft"
    draws = True
    forwards_a_draft = 1

    def __init__(
        self,
        state: RoundState,
        kernels: Kernels,
        runner: ModelRunner,
        sampler: Sampler,
        draft_limit: int,
        *,
        alone: bool = True,
    ) -> None:
        """alone: whether only its own drafts are verified."""
        self.alone = alone
        self.state, self.kernels, self.runner, self.sampler = state, kernels, runner, sampler
        self.limit = draft_limit
        self.places = Places(runner.cache.page_size, draft_limit, runner.trash_slot)

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Feed the prompts up to the draft model's own context limit."""
        self.runner.write([part.below(self.limit) for part in parts if part.begin < self.limit])

    def clear(self, pages: list[int]) -> None:
        """Zero pages of the draft's cache."""
        self.runner.cache.clear(pages)

    def _committed(self, width: int, slots: Tensor) -> DraftWindow:
        """The rows of the last `width` committed tokens of slots bool [S], from where the prefill ended."""
        first = self.state.prompt_length - 1
        rows: DraftWindow = self.kernels.committed_window(self.state, width, slots, self.places, first)
        return rows

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Feed the tokens that were left out, and the one before them.

        A slot admitted since then has fewer: its prefilled pages, which may be shared, stay as they are.
        """
        state = self.state
        rows = self._committed(tokens + 1 + (0 if self.alone else state.max_draft), state.occupied)
        self.runner.forward(rows, state.page_table, views)

    def draft(self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplerClass) -> None:
        """Propose k tokens a slot, fewer where the draft's context ends."""
        # A request that ended in this round is fed too: later ones find its pages.
        state, width = self.state, 2 if self.alone else max(2, window.draft.shape[1] + 1)
        rows = self._committed(width, window.valid[:, 0].contiguous())
        hidden = self.runner.forward(rows, state.page_table, views).hidden[:, -1:]
        for step in range(k):
            drawn = self.sampler.draw_draft(self.runner, hidden, step, needs)
            rows = self.kernels.draft_step(state, drawn, step, k, self.places)
            if step < k - 1:
                hidden = self.runner.forward(rows, state.page_table, views).hidden
