"""The runner's inputs: windows of rows, parts of prompts, and the host's view of each slot's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.recurrent.state_blocks import BLOCK
from spd.kernels.round.window import Rows
from spd.runtime.layers.base import HeadStates

MERGED_WIDTH = 16
"""Rows of a window where prompts of several slots share a pass.

Each prompt is padded to full windows.
"""


class SlotView(NamedTuple):
    """The host's view of a slot's cache."""

    bound: int
    """Upper bound of the slot's length in tokens; 0: the slot has no rows."""
    pages: Sequence[int]
    """The slot's page numbers, in order of position."""


EMPTY_SLOT = SlotView(0, ())


class PromptPart(NamedTuple):
    """Positions `begin` to `end` (exclusive) of a slot's prompt, to be written by one program."""

    slot: int
    token_ids: Tensor
    """The ids of the full prompt, int64 [1, length]."""
    begin: int
    end: int
    view: SlotView
    chunked: bool
    """True if the program of full chunks writes it, False for that of a few rows."""

    @property
    def padded_rows(self) -> int:
        """Return the rows that the part takes in a shared pass: full windows of `MERGED_WIDTH`."""
        return -(-(self.end - self.begin) // MERGED_WIDTH) * MERGED_WIDTH

    def below(self, limit: int) -> PromptPart:
        """Return the part cut to the positions below `limit`, which may be none.

        A chunk that is cut becomes tiles.
        """
        end = max(self.begin, min(self.end, limit))
        return self._replace(end=end, chunked=self.chunked and end == self.end)


class BlockEnds(NamedTuple):
    """What the rows of blocks [S, W] attend to, in place of the positions up to their own."""

    last: Tensor
    """int64 [S, W]: the last position of each row's block."""
    window_ends: Tensor | None = None
    """int64 [S, W]: the position at which each row's sliding window ends; None: its own."""

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockEnds:
        """Return the ends with `change` applied to both tensors."""
        ends = self.window_ends
        return BlockEnds(change(self.last), None if ends is None else change(ends))


class SlotRows(NamedTuple):
    """The rows of one pass, S windows of one width, with all that attention reads for them."""

    rows: Rows
    page_table: Tensor
    """int64 [S, P]."""
    views: Sequence[SlotView]
    states: HeadStates | None = None
    """Target states of the S slots, for models that read some."""
    segments: Segments | None = None
    """Segments of at most S slots, for models with recurrent layers."""
    block_ends: BlockEnds | None = None
    """The ends of a block drafter's blocks."""

    def select(self, slots: Tensor) -> SlotRows:
        """Return the windows of `slots` only, int64 [P], which are all that have rows.

        The segments are dropped.
        """
        states = self.states
        if states is not None:
            states = HeadStates(states.rings.index_select(0, slots), states.depth)
        rows = Rows(
            self.rows.token_ids.index_select(0, slots),
            self.rows.positions.index_select(0, slots),
            self.rows.valid.index_select(0, slots),
            self.rows.kv_slots.index_select(0, slots),
        )
        block_ends = self.block_ends
        if block_ends is not None:
            block_ends = block_ends.map(lambda ends: ends.index_select(0, slots))
        views = [view for view in self.views if view.bound]
        return SlotRows(
            rows=rows,
            page_table=self.page_table.index_select(0, slots),
            views=views,
            states=states,
            block_ends=block_ends,
        )

    def with_segments(self, slots: Tensor, applied: Tensor, *, prefix_committed: bool) -> SlotRows:
        """Return a copy with recurrent segments of the valid rows, which are adjacent in each
        window.

        slots: the slot of each window, int64 [S]. applied: the position as of which each slot's
        states are. prefix_committed: True if all tokens before the rows are committed, so that
        states may be written as of the last border up to there.
        """
        valid = self.rows.valid.long()
        positions = self.rows.positions
        first = valid.argmax(1)
        count = valid.sum(1)
        start = positions.gather(1, first[:, None])[:, 0]
        row = torch.arange(len(slots), device=slots.device) * valid.shape[1] + first
        keep = start // BLOCK * BLOCK if prefix_committed else applied[slots]
        return self._replace(
            segments=Segments(torch.stack((slots, row, count, start, keep)), applied)
        )
