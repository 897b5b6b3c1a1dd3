"""Drafting by an independent draft model with its own paged cache, which shares the target's page
numbers.

A round runs exactly k draft forwards. The first is fed every token whose draft KV is missing.
Rejected positions are not rolled back: they lie beyond the committed length and are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spd.kernels.round.window import Rows
from spd.runtime.proposers.base import ModelProposer
from spd.runtime.round.rows import PromptPart, SlotView


class DraftModelProposer(ModelProposer):
    """Drafts by a small model, from its own distribution with the target's noise."""

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        """Begin a slot, with recurrent states as of `start`."""
        self.runners[0].admit(slot, start)

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Feed the prompts up to the draft model's context limit."""
        limit = self.paging.limit
        self.runners[0].write_prompt_parts(
            [part.below(limit) for part in parts if part.begin < limit]
        )

    def _run_module(
        self, module: int, rows: Rows, views: Sequence[SlotView], previous: Tensor | None = None
    ) -> Tensor:
        """Run the draft model over rows, write their entries, and return hidden states [S, W,
        hidden].
        """
        output = self.runners[module].forward(
            rows,
            self.state.page_table,
            views,
            prefix_committed=previous is None,  # tokens after the model's own draft may be rejected
        )
        return output.hidden
