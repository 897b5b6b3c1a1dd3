"""Padding of the rows of a pass to counts that give the same bits, and joining of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spd.runtime.layers.base import ModelOutput
from spd.runtime.round.arithmetic_probe import WIDEST


def scatter_rows(rows: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Return rows [P, ...] of slots, int64 [P], among zeros for the other slots: [num_slots, ...]."""
    return rows.new_zeros(num_slots, *rows.shape[1:]).index_copy_(0, slots, rows)


def bucket_for(rows: int, buckets: tuple[int, ...]) -> int:
    """Return the smallest padded number of rows: full tiles of the widest bucket, and a bucket."""
    full_tiles, remaining_rows = divmod(rows, WIDEST)
    padded = full_tiles * WIDEST
    if remaining_rows:
        padded += next(bucket for bucket in buckets if bucket >= remaining_rows)
    return padded


def concatenate_outputs(outputs: Sequence[ModelOutput]) -> ModelOutput:
    """Return outputs [1, rows, hidden] of consecutive rows as one."""
    hidden = torch.cat([output.hidden for output in outputs], 1)
    if all(output.states is output.hidden for output in outputs):
        return ModelOutput.from_hidden(hidden)
    return ModelOutput(hidden, torch.cat([output.states for output in outputs], 1))


def repeat_last(rows: Tensor, count: int) -> Tensor:
    """Return rows [S, W] padded to `count` by repeating the last one."""
    return torch.cat((rows, rows[:, -1:].expand(-1, count - rows.shape[1])), 1)
