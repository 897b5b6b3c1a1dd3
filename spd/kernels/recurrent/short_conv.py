"""A causal convolution over a few positions, channel by channel, over rows and earlier inputs.

Recurrent layers have, for each slot, rings by absolute position: position t is stored at t % D. A
pass writes its rows and reads those of earlier passes. A rejected draft needs no rollback: its
entry is overwritten by the token that replaces it before it is read.
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
    """The number of rows; a run of 0 rows changes nothing."""
    start: int
    """The position of the first row."""
    keep: int
    """The position of the state that is written: a border from `applied` to start + rows.

    Tokens before it are committed. Rows before it are not stored in the rings of `DeltaMemory`.
    """


class Segments(NamedTuple):
    """The rows of a pass that recurrent layers read: G runs, each of another slot.

    Slots without a run are not read.
    """

    table: Tensor
    """int64 [5, G], ordered by first rows: the fields of `SegmentRow`."""
    applied: Tensor  # int64 [S], the position of each slot's written state, a border

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
        """Return the position of each run's state to write, int64 [G]."""
        return self.table[4]

    def runs(self) -> list[list[int]]:
        """Return [slot, first, count, start, keep, applied] of the runs with rows.

        Waits for the device.
        """
        run_table = torch.cat((self.table, self.applied[self.table[0]][None]))
        return [run for run in run_table.T.tolist() if run[2]]


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: Segments, silu: bool = True
) -> Tensor:
    """Compute `Kernels.short_conv` by torch."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    taps = weight.shape[0]
    depth = ring.shape[1]
    for slot, first, count, start, _, _ in rows.runs():
        new_inputs = x[first : first + count]
        before = torch.arange(start - taps + 1, start, device=x.device)
        earlier = ring[slot, before % depth].masked_fill((before < 0)[:, None], 0)
        inputs = torch.cat((earlier, new_inputs)).float()
        for row in range(count):  # row by row: vector bodies and scalar tails round differently
            total = torch.zeros_like(inputs[0]) if bias is None else bias
            for tap in range(taps):
                total = total + inputs[row + tap] * weight[tap]
            out[first + row] = total * total.sigmoid() if silu else total
        stored_rows = torch.arange(max(0, count - depth), count, device=x.device)
        ring[slot, (start + stored_rows) % depth] = new_inputs[stored_rows]
    return out
