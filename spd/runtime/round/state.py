"""The round's state: static tensors on the device with one row a slot.

The host writes a row when it admits or retires a request; between these, only the round does.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from spd.kernels.round.commit import emission_width
from spd.kernels.round.window import NUM_TIMES
from spd.runtime.round.limits import ZERO_PAGE
from spd.runtime.round.sampling_params import NUM_STOP_IDS
from spd.runtime.round.transfer import to_device

RING_DEPTH = 4
"""Rounds whose emissions are stored: the running one, at most two unread ones (lag 2), one spare."""


@runtime_checkable
class HasSlotAttributes(Protocol):
    """An object with attributes whose first dimension is the slot."""

    @property
    def slot_attributes(self) -> tuple[str, ...]:
        """Names of these attributes."""


Narrowable = TypeVar("Narrowable", bound=HasSlotAttributes)


def narrow_to_slots(full: Narrowable, count: int) -> Narrowable:
    """Return a shallow copy of `full` for the first `count` slots, with views of the same tensors.

    The attributes that `slot_attributes` names are narrowed: tensors by slots, lists and
    dictionaries of them, and objects with `slot_attributes` of their own. An object that is met
    twice is copied once.
    """
    return _narrow_object(full, count, {})


def _narrow_object(value: Narrowable, count: int, copies: dict[int, object]) -> Narrowable:
    """Return a narrowed copy of an object; copies: those made so far, by the object's id."""
    previous = copies.get(id(value))
    if isinstance(previous, type(value)):
        return previous
    narrowed = copy(value)
    copies[id(value)] = narrowed
    for name in value.slot_attributes:
        setattr(narrowed, name, _narrow(getattr(value, name), count, copies))
    return narrowed


def _narrow(value: object, count: int, copies: dict[int, object]) -> object:
    """Return the narrowed form of an attribute's value."""
    if isinstance(value, list):
        return [_narrow(element, count, copies) for element in value]
    if isinstance(value, dict):
        return {name: _narrow(element, count, copies) for name, element in value.items()}
    if isinstance(value, Tensor):
        return value[:count]
    if value is None:
        return None
    assert isinstance(value, HasSlotAttributes)
    return _narrow_object(value, count, copies)


class RoundState:
    """The static tensors of a round over S slots, all int64 but the masks of slots.

    The first dimension of every field is the slot, except for the ring, its times and the counter.
    """

    slot_attributes = (  # see `narrow_to_slots`
        "tokens",
        "length",
        "prompt_length",
        "length_limit",
        "min_length",
        "draft",
        "num_drafts",
        "match",
        "draft_limit",
        "draft_cap",
        "page_table",
        "stop_ids",
        "active",
        "occupied",
    )

    def __init__(self, slots: int, max_len: int, max_draft: int, pages: int, device: str) -> None:
        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full((slots, *shape), fill, dtype=torch.long, device=device)

        self.max_len = max_len
        self.max_draft = max_draft
        self.device = device
        self.tokens = integers(max_len + max_draft + 1)
        """The committed tokens [S, L]: the prompt and what was generated."""
        self.length = integers(fill=1)
        """Committed tokens of each slot [S]."""
        self.prompt_length = integers(fill=1)
        """Tokens at admission; a prefill writes the positions of all but the last."""
        self.length_limit = integers(fill=1)
        """The length at which a slot stops [S]."""
        self.min_length = integers()
        """The length below which no stop id may be sampled [S]."""
        self.draft = integers(max(1, max_draft))
        """The drafts that the next round verifies [S, max_draft]."""
        self.num_drafts = integers()
        """How many of them each slot has [S]."""
        self.match = integers()
        """Tokens of the match that prompt lookup took the drafts from; 0 for a model's drafts."""
        self.draft_limit = integers(fill=max_len)
        """The length up to which tokens are drafted [S]."""
        self.draft_cap = integers(fill=max_draft)
        """Drafts of a round that are verified at most [S]."""
        self.page_table = integers(pages, fill=ZERO_PAGE)
        """The page numbers of each slot [S, pages], in order of position."""
        self.stop_ids = integers(NUM_STOP_IDS, fill=-1)
        """Token ids after which each slot stops, padded with -1."""
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        """True for the slots that take part in the next round."""
        self.occupied = torch.zeros(slots, dtype=torch.bool, device=device)
        """True while a request has the slot, also if it has ended and the host has not read that yet."""
        self.ring = torch.zeros(
            RING_DEPTH, slots, emission_width(max_draft), dtype=torch.long, device=device
        )
        """The emissions of the latest rounds, int64 [depth, S, W]; see `read_emission`."""
        self.times = torch.zeros(RING_DEPTH, NUM_TIMES, dtype=torch.long, device=device)
        """The marks of time of the latest rounds, in nanoseconds by the device's clock."""
        self.counter = torch.zeros(1, dtype=torch.long, device=device)
        """Rounds run so far; modulo the depth it is the ring's row."""

    @property
    def slots(self) -> int:
        """The number of slots, S."""
        return self.length.shape[0]

    def admit(
        self,
        slot: int,
        prompt: Tensor,
        length_limit: int,
        min_length: int,
        stop_ids: Sequence[int],
        draft_limit: int,
        draft_cap: int | None = None,
    ) -> None:
        """Write a slot's row from its prompt and limits; the slot is inactive and has no drafts.

        prompt: int64 [n] on the device. The limits are absolute lengths. draft_cap: drafts of a
        round that are verified at most; None: all.
        """
        self.retire(slot)
        count = prompt.shape[0]
        self.tokens[slot, :count] = prompt
        self.length[slot].fill_(count)
        self.prompt_length[slot].fill_(count)
        self.length_limit[slot].fill_(length_limit)
        self.min_length[slot].fill_(min_length)
        self.match[slot].fill_(0)
        self.draft_limit[slot].fill_(draft_limit)
        self.draft_cap[slot].fill_(self.max_draft if draft_cap is None else draft_cap)
        self.set_stop_ids(slot, stop_ids)

    def set_stop_ids(self, slot: int, stop_ids: Sequence[int]) -> None:
        """Write the tokens after which a slot stops."""
        padded = [*stop_ids, *[-1] * (NUM_STOP_IDS - len(stop_ids))]
        self.stop_ids[slot] = to_device(padded, torch.long, self.device)

    def set_active(self, slot: int, active: bool) -> None:
        """Let a slot take part in rounds from the next one on, or keep it out of them."""
        self.active[slot].fill_(active)
        if active:
            self.occupied[slot].fill_(True)

    def retire(self, slot: int) -> None:
        """Deactivate a slot: its rows are masked from the next round on."""
        self.active[slot].fill_(False)
        self.occupied[slot].fill_(False)
        self.num_drafts[slot].fill_(0)
