"""Padding of the rows of a pass to counts that give the same bits, and joining of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spd.runtime.layers.base import ModelOutput
from spd.runtime.round.arithmetic_probe import WIDEST_BUCKET


def scatter_rows(rows: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Return rows [num_slots, ...] with `rows` [P, ...] at `slots`, int64 [P], and zeros
    elsewhere.
    """
    return rows.new_zeros(num_slots, *rows.shape[1:]).index_copy_(0, slots, rows)


def padded_row_count(rows: int, buckets: tuple[int, ...]) -> int:
    """Return `rows` padded to a count that gives the same bits: full tiles of the widest bucket,
    then the smallest of `buckets`, ascending, that holds the remainder.
    """
    full_tiles, remaining_rows = divmod(rows, WIDEST_BUCKET)
    padded = full_tiles * WIDEST_BUCKET
    if remaining_rows:
        padded += next(bucket for bucket in buckets if bucket >= remaining_rows)
    return padded


def concatenate_outputs(outputs: Sequence[ModelOutput]) -> ModelOutput:
    """Return one output of the concatenated rows of several, [1, rows, hidden] each."""
    hidden = torch.cat([output.hidden for output in outputs], 1)
    if all(output.states is output.hidden for output in outputs):
        return ModelOutput.from_hidden(hidden)
    return ModelOutput(hidden, torch.cat([output.states for output in outputs], 1))


def repeat_last(rows: Tensor, count: int) -> Tensor:
    """Return `rows` [S, W], one value for each row of S windows, as [S, count] by repeating the
    last.
    """
    return torch.cat((rows, rows[:, -1:].expand(-1, count - rows.shape[1])), 1)
