"""What a proposer is: it keeps up with the committed tokens and proposes the next k.

Proposers know the round's state and their own model; never each other, the engine or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spd.runtime.model_runner import SlotView
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.spans import Run


class Proposer(Protocol):
    """Writes `state.draft[:, :k]` and `state.num_drafts`; anything it proposes is verified."""

    method: str
    draft_limit: int | None
    """Positions its cache can hold; None has no limit."""

    def prefill(self, token_ids: Tensor, start: int, end: int, runs: Sequence[Run], view: SlotView) -> None:
        """Bring one slot's cache from `start` to `end` over its prompt int64 [1, length]."""
        ...

    def draft(self, k: int, views: Sequence[SlotView], needs: SamplerClass) -> int:
        """Propose the next k >= 1 tokens of every active slot; returns the forward passes run."""
        ...

    def skip(self, views: Sequence[SlotView]) -> int:
        """A round went by without drafting (k = 0): catch up when it is due; returns forward passes."""
        ...

    def clear(self, pages: list[int]) -> None:
        """Zero cache pages that may hold values that are not finite."""
        ...
