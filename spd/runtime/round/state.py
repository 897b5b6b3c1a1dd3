"""The round's state: static tensors, one row a slot, owned by the device.

The host writes a row when it admits or retires a request; between that, only the round does.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from spd.kernels.round.commit import emission_width
from spd.kernels.round.window import NUM_TIMES
from spd.runtime.round.limits import ZERO_PAGE
from spd.runtime.round.sampling_params import NUM_STOP_IDS
from spd.runtime.round.transfer import to_device

RING_DEPTH = 4
"""Rounds whose emissions are kept: the one that runs, two unread ones at most (lag 2), one to spare."""

Whole = TypeVar("Whole")


def narrow_to_slots(whole: Whole, count: int) -> Whole:
    """Return a copy for the first `count` slots, whose tensors are views of the same memory.

    The attributes that `slot_attributes` names are narrowed: tensors by slots, lists and dictionaries of
    them, and objects with `slot_attributes` of their own. An object that is met twice is copied once.
    """
    made: dict[int, Any] = {}

    def part_of(value: Any) -> Any:
        if isinstance(value, list):
            return [part_of(each) for each in value]
        if isinstance(value, dict):
            return {name: part_of(each) for name, each in value.items()}
        if isinstance(value, Tensor):
            return value[:count]
        if value is not None and id(value) not in made:
            made[id(value)] = part = copy(value)
            for name in part.slot_attributes:
                setattr(part, name, part_of(getattr(part, name)))
        return made.get(id(value))

    part: Whole = part_of(whole)
    return part


class RoundState:
    """Static tensors of S slots; every field's first dimension is the slot, but for the ring's."""

    slot_attributes = (
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
        self.length = integers(fill=1)
        self.prompt_length = integers(fill=1)
        """Tokens at admission: positions before the last of them were written by a prefill."""
        self.length_limit = integers(fill=1)
        self.min_length = integers()
        self.draft = integers(max(1, max_draft))
        self.num_drafts = integers()
        self.match = integers()
        """Tokens of the match that prompt lookup took the drafts from; 0 where they are a model's."""
        self.draft_limit = integers(fill=max_len)
        self.draft_cap = integers(fill=max_draft)
        self.page_table = integers(pages, fill=ZERO_PAGE)
        self.stop_ids = integers(NUM_STOP_IDS, fill=-1)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.occupied = torch.zeros(slots, dtype=torch.bool, device=device)
        """Whether a request holds the slot, also while the end of its text is not read yet."""
        self.ring = torch.zeros(
            RING_DEPTH, slots, emission_width(max_draft), dtype=torch.long, device=device
        )
        """What each round emitted: int64 [depth, S, W], see `read_emission`."""
        self.times = torch.zeros(RING_DEPTH, NUM_TIMES, dtype=torch.long, device=device)
        self.counter = torch.zeros(1, dtype=torch.long, device=device)
        """Rounds run so far; its remainder by the depth is the ring's row."""

    @property
    def slots(self) -> int:
        """S."""
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
        """Write a row, silent for now: prompt int64 [n] on the device; limits are absolute lengths.

        At most draft_cap drafts of a round are verified; None is as many as there are.
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
        self.stop_at(slot, stop_ids)

    def stop_at(self, slot: int, stop_ids: Sequence[int]) -> None:
        """Have a slot stop behind these tokens."""
        padded = [*stop_ids, *[-1] * (NUM_STOP_IDS - len(stop_ids))]
        self.stop_ids[slot] = to_device(padded, torch.long, self.device)

    def set_active(self, slot: int, active: bool) -> None:
        """Let a slot take part in rounds from the next one on, or keep it out of them."""
        self.active[slot].fill_(active)
        if active:
            self.occupied[slot].fill_(True)

    def retire(self, slot: int) -> None:
        """Silence a slot: its rows are masked from the next round on."""
        self.active[slot].fill_(False)
        self.occupied[slot].fill_(False)
        self.num_drafts[slot].fill_(0)
