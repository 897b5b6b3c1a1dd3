"""What a proposer is: it keeps up with the committed tokens and proposes the next k.

Proposers know the round's state and their own model; never each other, the engine or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol

from torch import Tensor

from spd.kernels.round.window import RoundWindow
from spd.runtime.round.rows import PromptPart, SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.state import RoundState


class Proposer(Protocol):
    """Writes `state.draft[:, :k]` and `state.num_drafts`; anything it proposes is verified.

    `draft` is part of the round's device program, captured once for each k: fixed shapes, nothing read from
    the device, no value of the host's that changes between calls. Inactive slots get no drafts. What a cache
    misses from rounds that did not draft is brought up by `catch_up`, outside of it. Without states or a
    cache a proposer inherits methods that do nothing.
    """

    method: str
    captures: bool = False
    """Whether it reads the target's states; see `ModelOutput`."""
    draws: bool
    """Whether its drafts are drawn, by `Sampler.draw_draft`, which keeps from what; else each is certain."""
    forwards_a_draft: int
    """Forward passes for each token it drafts: 1 for a model, 0 for a lookup."""
    looks_up: bool = False
    """Whether drafts may be prompt lookup's, of which `state.match` tells."""

    def keeps_up(self, k: int) -> bool:
        """Whether drafting k tokens brings its cache up to what is committed."""
        return k > 0

    def forwards(self, k: int) -> int:
        """Forward passes in which it drafts k tokens."""
        return k * self.forwards_a_draft

    def first(self, state: RoundState, sampler: Sampler) -> Proposer:
        """The proposer of a state's first slots. A proposer that keeps more by slots narrows that, too."""
        part = copy(self)
        vars(part).update(state=state, sampler=sampler)
        return part

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        """A slot begins, new or preempted before, with pages that hold positions up to `start`.

        `state` has its row already. What those pages hold does not come by `prefill`.
        """
        return

    def leave(self, slot: int, end: int, page: int) -> None:
        """A slot ends, the last of whose positions up to `end` stand in a page that is not full."""
        return

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Write the caches of parts of slots' prompts, no more of one slot than a chunk.

        states: the target's [1, end - begin, hidden] of each part; none where none are captured.
        """
        return

    def capture(self, window: RoundWindow, states: Tensor) -> None:
        """A part of every round: the target's states [S, R, hidden] of the rows that it verifies."""
        return

    def draft(self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplerClass) -> None:
        """Propose the next k >= 1 tokens of every active slot; window: what the round verified."""
        ...

    def watch(self, views: Sequence[SlotView]) -> None:
        """In place of `draft` where nothing is to be drafted: lookup says in `state.match` what could be."""
        return

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Feed what was committed since it drafted: `tokens` at most, beside drafts of the first round."""
        return

    def clear(self, pages: list[int]) -> None:
        """Zero cache pages that may hold values that are not finite."""
        return


class Lookup(Proposer, Protocol):
    """A proposer that may also draft over what another has drafted."""

    def look_up(self, k: int, views: Sequence[SlotView], *, over: bool) -> None:
        """Draft up to k tokens a slot; `over` other drafts only where it finds some."""
        ...

    def first(self, state: RoundState, sampler: Sampler) -> Lookup:
        """See `Proposer`."""
        ...
