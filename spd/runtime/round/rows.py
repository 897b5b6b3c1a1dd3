"""What the runner is given to run: windows of rows, and what the host knows of each slot's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from spd.runtime.layers.base import HeadStates
from spd.runtime.round.row_buckets import WIDEST
from spd.runtime.round.spans import Run, clip_runs


class Rows(Protocol):
    """Windows of Q positions for each of S slots; positions ascend in a window."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [S, Q]."""
        ...

    @property
    def positions(self) -> Tensor:
        """int64 [S, Q]."""
        ...

    @property
    def valid(self) -> Tensor:
        """bool [S, Q]: rows that are not write their KV to the trash page."""
        ...

    @property
    def kv_slots(self) -> Tensor:
        """int64 [S, Q], into the flattened pools."""
        ...


@dataclass(frozen=True)
class PromptRows:
    """Rows of prompts; see `Rows`."""

    token_ids: Tensor
    positions: Tensor
    valid: Tensor
    kv_slots: Tensor

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of it, in order."""
        return self.token_ids, self.positions, self.valid, self.kv_slots


class SlotView(NamedTuple):
    """What the host knows of a slot's cache: an upper bound of its length, and its pages.

    A bound of 0 means that the slot has no rows.
    """

    bound: int
    pages: Sequence[int]


EMPTY_SLOT = SlotView(0, ())


class PromptPart(NamedTuple):
    """Positions begin to end of a slot's prompt, whose tokens are token_ids int64 [1, length].

    runs say which program writes which positions; `begin` does not cut a chunk run.
    """

    slot: int
    token_ids: Tensor
    begin: int
    end: int
    view: SlotView
    runs: Sequence[Run]

    def below(self, limit: int) -> PromptPart:
        """What of it lies below a position, which may be nothing."""
        end = max(self.begin, min(self.end, limit))
        return self._replace(end=end, runs=clip_runs(self.runs, end))


MERGED_WIDTH = 16
"""Rows of a window where prompts of several slots share a pass: each is filled up to whole windows."""


def filled_rows(rows: int) -> int:
    """Rows that so many of one prompt take of a pass that others share."""
    return -(-rows // MERGED_WIDTH) * MERGED_WIDTH


def folded(
    rows: PromptRows,
    page_table: Tensor,
    view: SlotView,
    states: HeadStates | None,
    trash_slot: int,
    width: int = WIDEST,
) -> tuple[PromptRows, Tensor, list[SlotView], HeadStates | None]:
    """Rows [1, n] of one slot as windows [m, width], which attend one by one.

    The last is filled up with rows that keep nothing. Every layer writes all rows before any reads.
    """
    missing = -rows.token_ids.shape[1] % width
    ids, positions, places = rows.token_ids, rows.positions, rows.kv_slots
    if missing:
        ids, positions = (torch.cat((t, t[:, -1:].expand(1, missing)), 1) for t in (ids, positions))
        places = torch.cat((places, places.new_full((1, missing), trash_slot)), 1)
    valid = pad(rows.valid, (0, missing))
    wide = PromptRows(*(t.reshape(-1, width) for t in (ids, positions, valid, places)))
    count = wide.token_ids.shape[0]
    if states is not None:
        states = HeadStates(states.rings.expand(count, -1, -1), states.depth)
    return wide, page_table.expand(count, -1), [view] * count, states
