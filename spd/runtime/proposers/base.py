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
    """Writes `state.draft[:, :k]` and `state.num_drafts`; anything it proposes is verified.

    `draft` is part of the round's device program: fixed shapes, nothing read from the device, nothing
    that depends on earlier calls. What a cache misses from rounds that did not draft is brought up by
    `catch_up`, outside of it.
    """

    method: str
    draft_limit: int | None
    """Positions its cache can hold; None has no limit."""
    draws: bool
    """Whether its drafts are drawn, by `Sampler.draw_draft`, which keeps from what; else each is certain."""
    forwards_a_draft: int
    """Forward passes for each token it drafts: 1 for a model, 0 for a lookup."""

    def prefill(self, token_ids: Tensor, start: int, end: int, runs: Sequence[Run], view: SlotView) -> None:
        """Bring one slot's cache from `start` to `end` over its prompt int64 [1, length]."""
        ...

    def draft(self, k: int, views: Sequence[SlotView], needs: SamplerClass) -> None:
        """Propose the next k >= 1 tokens of every active slot."""
        ...

    def catch_up(self, rounds: int, views: Sequence[SlotView]) -> None:
        """Feed what `rounds` rounds without drafting committed, one token each."""
        ...

    def clear(self, pages: list[int]) -> None:
        """Zero cache pages that may hold values that are not finite."""
        ...
