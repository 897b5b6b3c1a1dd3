"""An independent draft model with its own paged cache, sharing the target's page numbers.

A round runs exactly k draft forwards. The first takes every token whose draft KV is missing. Rejected
positions need no undoing: they lie beyond the committed length and are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spd.kernels.round.window import Rows
from spd.runtime.proposers.base import ModelProposer
from spd.runtime.round.rows import PromptPart, SlotView


class DraftModelProposer(ModelProposer):
    """Drafts by a small model, with the target's noise on the draft's own distribution."""

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        """See `Proposer`."""
        self.runners[0].admit(slot, start)

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Feed the prompts up to the draft model's own context limit."""
        limit = self.paging.limit
        self.runners[0].write([part.below(limit) for part in parts if part.begin < limit])

    def _run(
        self, module: int, rows: Rows, views: Sequence[SlotView], made: Tensor | None = None
    ) -> Tensor:
        keeps = made is None  # behind its own draft nothing is sure to stay
        return self.runners[module].forward(rows, self.state.page_table, views, keeps=keeps).hidden
