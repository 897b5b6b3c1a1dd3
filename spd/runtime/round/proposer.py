"""What a round asks of a proposer: it keeps up with the committed tokens and proposes the next k."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from spd.kernels.round.window import RoundWindow
from spd.runtime.round.rows import PromptPart, SlotView
from spd.runtime.round.sampling_params import SamplingSteps


class Proposer:
    """Writes `state.draft[:, :k]` and `state.num_drafts`; anything it proposes is verified.

    `draft` is part of the round's device program, captured once for each k: fixed shapes, nothing read from
    the device, no value of the host's that changes between calls (`views` is for torch's form). Inactive
    slots get no drafts, others up to k. What a cache misses from rounds that did not draft is brought up by
    `catch_up`, outside of it. Without states or a cache a proposer inherits methods that do nothing.
    """

    reads_target_states: bool = False  # whether it reads the target's states; see `ModelOutput`
    samples_drafts: bool
    """Whether each draft is drawn, by `Sampler.draw_draft`, which keeps from what; else each is certain."""
    tracks_matches: bool = False
    """Whether it looks for matches, of which `state.match` tells, where no draft is asked for."""
    max_model_drafts: int = (
        sys.maxsize
    )  # where more are drafted no model drafts: its cache is not brought up
    slot_attributes: tuple[str, ...]  # the attributes that are kept by slots; see `narrow_to_slots`

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        """A slot begins, new or preempted before, with pages that hold positions up to `start`.

        `state` has its row already. What those pages hold does not come by `prefill`.
        """

    def leave(self, slot: int, end: int, page: int) -> None:
        """A slot ends, the last of whose positions up to `end` stand in a page that is not full."""

    def page_parts(self, page: int) -> list[Tensor]:
        """Views of what is kept of a page beside the models' caches."""
        return []

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Write the caches of parts of slots' prompts, no more of one slot than a chunk.

        states: the target's [1, end - begin, hidden] of each part; none where none are captured.
        """

    def capture(self, window: RoundWindow, states: Tensor) -> None:
        """A part of every round: the target's states [S, R, hidden] of the rows that it verifies."""

    def draft(
        self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplingSteps
    ) -> None:
        """Propose the next k tokens of every active slot; k is 0 only where it `tracks_matches`.

        window: the rows that the round verified.
        """
        raise NotImplementedError

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Feed what was committed since it drafted: `tokens` at most, beside drafts of the first round."""

    def zero_pages(self, pages: list[int]) -> None:
        """Zero cache pages that may hold values that are not finite."""
