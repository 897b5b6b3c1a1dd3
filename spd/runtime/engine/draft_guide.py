"""Grammars followed along the drafts of a round, where the host need not wait for the device."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

from spd.runtime.engine.grammar import Grammar, GrammarError
from spd.runtime.engine.sequence import Sequence
from spd.runtime.plan.config import split_spec
from spd.runtime.plan.plan import EnginePlan

if TYPE_CHECKING:
    from torch import Tensor

    from spd.runtime.round.round_queue import RoundQueue
    from spd.runtime.round.state import RoundState


def guide_drafts(queue: RoundQueue, plan: EnginePlan, slots: abc.Sequence[Sequence | None]) -> None:
    """Set the sampler's guide, so that grammars mask their slots' drafts while a round draws them.

    Only where nothing waits for it: on a CPU the host is the device. On a GPU, with several ranks
    and of a block, what a grammar forbids is cut off behind the round. slots: see `GrammarGuide`.
    """
    draws_in_turn = split_spec(plan.spec)[0] != "block"
    is_local = plan.device == "cpu" and plan.shape.tp == 1
    if is_local and draws_in_turn and plan.config.verify == "coupled":
        queue.sampler.guide = GrammarGuide(queue.sampler.state, slots)


class GrammarGuide:
    """Masks the drafts of constrained slots while a round drafts; see `DraftGuide`.

    A constrained slot takes part in a round only after its last one was read, so its sequence's
    grammar stands at the tokens before the round, and the round's state has those after it.
    """

    def __init__(self, state: RoundState, slots: abc.Sequence[Sequence | None]) -> None:
        """slots: the sequences that run, by slot; the list changes while the engine runs."""
        self._state = state
        self._slots = slots
        self._grammars: dict[int, Grammar] = {}
        """Grammars as of the next draft, by slot; without those whose text has ended."""

    def write_masks(self, step: int, rows: Tensor) -> None:
        """Write the masks of the draft at `step`; see `DraftGuide`."""
        if step == 0:
            self._grammars.clear()
        for slot, sequence in enumerate(self._slots):
            if sequence is None or not (sequence.is_active and sequence.needs.grammar):
                continue
            if step == 0 and sequence.grammar is not None:
                sequence.masked_drafts = 0
                self._grammars[slot] = sequence.grammar.copy()
            grammar = self._grammars.get(slot)
            if grammar is None:
                continue
            try:
                for token in self._new_tokens(slot, sequence.length, step):
                    grammar.accept_token(token)
                grammar.write_draft_mask(rows[slot])
                sequence.masked_drafts += 1
            except GrammarError:  # the text has ended, by a stop id or a dead end
                del self._grammars[slot]

    def _new_tokens(self, slot: int, length: int, step: int) -> list[int]:
        """Return the tokens since the last step: at step 0 those that the round has committed
        behind position `length`, later the draft before.
        """
        state = self._state
        if step:
            return [int(state.draft[slot, step - 1])]
        committed: list[int] = state.tokens[slot, length : int(state.length[slot])].tolist()
        return committed
