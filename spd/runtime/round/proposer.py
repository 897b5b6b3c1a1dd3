"""The interfaces of what drafts: a model that keeps up with the committed tokens, and prompt
lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spd.kernels.round.window import RoundWindow
from spd.runtime.round.rows import PromptPart, SlotView
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.state import RoundState


class Lookup(Protocol):
    """Prompt lookup, which drafts alone, beside a model or behind the drafts of one."""

    @property
    def max_model_drafts(self) -> int:
        """Drafts of a model in a round at most; in rounds with more lookup drafts alone."""
        ...

    @property
    def may_draft_more(self) -> bool:
        """True if lookup may draft more tokens than the model: it then searches in all rounds."""
        ...

    def draft(
        self, state: RoundState, k: int, model_drafts: int, views: Sequence[SlotView]
    ) -> None:
        """Write up to k drafts a slot into `state`, where a model has drafted `model_drafts`."""
        ...

    def remember_text(self, ids: Sequence[int]) -> None:
        """Add a text's token ids to the pool that later rounds draft from, where there is one."""
        ...


class Proposer:
    """Writes `state.draft[:, :k]` and `state.num_drafts`; every draft is verified.

    `draft` is part of the round's device program, captured once for each k: its shapes are fixed,
    it reads nothing from the device, and no host value may change between calls (only torch's form
    uses `views`). Inactive slots get no drafts, others up to k. What a cache lacks of rounds that
    did not draft is added by `catch_up`, outside of the round. The methods here do nothing, for
    proposers without states or a cache.
    """

    reads_target_states: bool = False
    """True if the proposer reads the target's states; see `ModelOutput`."""
    drafts_at_once: bool = False
    """True if one forward pass drafts all tokens of a round."""
    slot_attributes: tuple[str, ...]
    """Names of the attributes by slots; see `narrow_to_slots`."""

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        """Prepare the proposer's own states for a slot, new or after a preemption.

        Positions below `start` are in the caches already; `prefill` is called from `start` on. view:
        the pages of all the slot's tokens and of some more, most of them perhaps unwritten. The
        slot's row of `state` is written already.
        """

    def save_tail(self, slot: int, end: int, page: int) -> None:
        """Save the proposer's states that belong to a slot's last page, with positions up to `end`.

        The page is not full.
        """

    def page_views(self, page: int) -> list[Tensor]:
        """Return views of what is stored of a page in addition to the models' caches."""
        return []

    def zero_counters(self) -> None:
        """Zero what programs of the models' kernels count, after a round that failed."""

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Write the proposer's caches of parts of prompts, with at most one chunk of a slot.

        states: the target's states [1, end - begin, hidden] of each part; empty if they are not
        read.
        """

    def store_target_states(self, window: RoundWindow, states: Tensor) -> None:
        """Store the target's states [S, R, hidden] of the rows that a round verifies."""

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Write the next k > 0 drafts of every active slot into `state.draft` and `num_drafts`.

        window: the rows that the round verified. needs: the sampling steps of the active slots.
        """
        raise NotImplementedError

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Write the cache entries of tokens committed since the proposer drafted last.

        These are at most `tokens`, and the drafts of the first round since.
        """

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages, which may hold values that are not finite, of the proposer's caches."""
