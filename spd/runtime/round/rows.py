"""What the runner is given to run: windows of rows, and what the host knows of each slot's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.round.window import Rows
from spd.runtime.layers.base import HeadStates

MERGED_WIDTH = 16
"""Rows of a window where prompts of several slots share a pass: each is filled up to whole windows."""


class SlotView(NamedTuple):
    """What the host knows of a slot's cache."""

    bound: int  # of its length, from above; 0: the slot has no rows
    pages: Sequence[int]


EMPTY_SLOT = SlotView(0, ())


class PromptPart(NamedTuple):
    """Positions begin to end of a slot's prompt."""

    slot: int
    token_ids: Tensor  # of the whole prompt, int64 [1, length]
    begin: int
    end: int
    view: SlotView
    chunked: bool  # whether the program of whole chunks writes it, or that of a few rows

    @property
    def filled(self) -> int:
        """Rows that it takes of a pass that others share."""
        return -(-(self.end - self.begin) // MERGED_WIDTH) * MERGED_WIDTH

    def below(self, limit: int) -> PromptPart:
        """What of it lies below a position, which may be nothing."""
        end = max(self.begin, min(self.end, limit))
        return self._replace(end=end, chunked=self.chunked and end == self.end)


def columns(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, positions, valid and places of rows."""
    return rows.token_ids, rows.positions, rows.valid, rows.kv_slots


class SlotRows(NamedTuple):
    """The rows of one pass, S windows of one width, with all that attention reads for them."""

    rows: Rows
    page_table: Tensor  # int64 [S, P]
    views: Sequence[SlotView]
    states: HeadStates | None = None  # of S slots, for models that read some
    segments: Segments | None = None  # of S slots or fewer, for models with recurrent layers

    def of(self, slots: Tensor) -> SlotRows:
        """The windows of some slots, int64 [P]: those with rows."""
        states = self.states
        if states is not None:
            states = HeadStates(states.rings.index_select(0, slots), states.depth)
        rows = Rows(*(tensor.index_select(0, slots) for tensor in columns(self.rows)))
        views = [view for view in self.views if view.bound]
        return SlotRows(rows, self.page_table.index_select(0, slots), views, states)

    def windows(self, slots: Tensor, applied: Tensor, *, keeps: bool) -> SlotRows:
        """With segments of the valid rows, which are neighbours in each window; slots int64 [S].

        keeps: whether what is before the rows is committed, so that states may be written as of there.
        """
        valid = self.rows.valid.long()
        positions = self.rows.positions
        first = valid.argmax(1)
        count = valid.sum(1)
        start = positions.gather(1, first[:, None])[:, 0]
        row = torch.arange(len(slots), device=slots.device) * valid.shape[1] + first
        keep = start if keeps else applied[slots]
        return self._replace(
            segments=Segments(torch.stack((slots, row, count, start, keep)), applied)
        )
