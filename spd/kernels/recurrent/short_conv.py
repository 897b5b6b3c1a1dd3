"""A causal convolution of a few positions, channel by channel, over rows and what came before them.

Recurrent layers keep, of each slot, rings by absolute position: row t stands at t % D. A pass writes the
rows that it is given and reads those of the passes before it. A rejected draft needs no undoing: its row is
written again by the token that takes its place, before anything reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SegmentRow(NamedTuple):
    """One run of consecutive positions of a slot, in host values."""

    slot: int
    first: int
    """The run's first row of the pass's T rows."""
    rows: int
    """How many rows; a run of none changes nothing."""
    start: int
    """The position of the first row."""
    keep: int
    """The position as of which the state is written, from applied to start + count."""


class Segments(NamedTuple):
    """The rows of a pass that recurrent layers read: G runs, each of another slot.

    A slot that no run names is not read.
    """

    table: Tensor
    """int64 [5, G], ordered by first rows: the fields of `SegmentRow`."""
    applied: Tensor  # int64 [S], the position that each slot's written state is of

    @property
    def slots(self) -> Tensor:
        """Return the slot of each run, int64 [G]."""
        return self.table[0]

    @property
    def counts(self) -> Tensor:
        """Return the number of rows of each run, int64 [G]."""
        return self.table[2]

    @property
    def keeps(self) -> Tensor:
        """Return the position as of which each run's state is written, int64 [G]."""
        return self.table[4]

    def runs(self) -> list[list[int]]:
        """[slot, first, count, start, keep, applied] of the runs that have rows: waits for the device."""
        whole = torch.cat((self.table, self.applied[self.table[0]][None]))
        return [run for run in whole.T.tolist() if run[2]]


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: Segments, silu: bool = True
) -> Tensor:
    """Compute `Kernels.short_conv` by torch."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    taps = weight.shape[0]
    depth = ring.shape[1]
    for slot, first, count, start, _, _ in rows.runs():
        own = x[first : first + count]
        before = torch.arange(start - taps + 1, start, device=x.device)
        earlier = ring[slot, before % depth].masked_fill((before < 0)[:, None], 0)
        inputs = torch.cat((earlier, own)).float()
        for row in range(count):  # one by one: vectors' bodies and tails round otherwise
            total = torch.zeros_like(inputs[0]) if bias is None else bias
            for tap in range(taps):
                total = total + inputs[row + tap] * weight[tap]
            out[first + row] = total * total.sigmoid() if silu else total
        kept = torch.arange(max(0, count - depth), count, device=x.device)
        ring[slot, (start + kept) % depth] = own[kept]
    return out
