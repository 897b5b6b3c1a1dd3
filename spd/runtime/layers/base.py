"""What a model is to the runner: a batch of rows in, hidden states and logits out.

Models know tensors and this batch; never requests, schedulers, proposers or samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionPlan
from spd.kernels.attention.rotary_store import Pools
from spd.kernels.linear.head_input import HeadStates as HeadStates
from spd.kernels.recurrent.short_conv import Segments

HeadShape = tuple[int, int, int]
"""Query heads, heads in the cache, and elements of a head, as attention sees them."""


class Communicator(Protocol):
    """What ranks exchange in a forward pass: every one holds a part, and sees the same bits afterwards."""

    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks in rank order: [N, *part.shape], the same shape everywhere."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts in rank order, in float32 and rounded once to their dtype."""


class ModelOutput(NamedTuple):
    """What a pass makes of rows: `hidden`, of which logits are made, and `states`, which a head reads."""

    hidden: Tensor
    states: Tensor

    @classmethod
    def of(cls, hidden: Tensor) -> ModelOutput:
        """The output of a model whose hidden states are also what a head reads."""
        return cls(hidden, hidden)

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelOutput:
        """Both changed alike."""
        hidden = change(self.hidden)
        return ModelOutput(hidden, hidden if self.states is self.hidden else change(self.states))


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one forward pass: a window of `width` positions for each of `num_slots` slots.

    T rows = num_slots * width, rounded up to a row bucket with rows that are dropped. page_table is
    int64 [S, pages]; plan is what `plan_attention` made of the rows, by the shape of heads. A prompt chunk of
    one slot has a chunk_start, its first position.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64, into the flattened pools
    page_table: Tensor  # [S, pages] int64
    plan: Mapping[HeadShape, AttentionPlan]
    num_slots: int
    width: int
    tile: int
    chunk_start: int | None = None
    states: HeadStates | None = None
    segments: Segments | None = (
        None  # what of the rows recurrent layers read; None where a model has none
    )
    per_layer: Tensor | None = (
        None  # [T, layers, P] of the rows' tokens, where layers embed them too
    )


@dataclass(frozen=True)
class Residual:
    """The residual stream x [T, hidden], with partial sums of squares of its rows where kernels keep them."""

    x: Tensor
    squares: Tensor | None = None


def attended(query: Tensor, batch: ForwardBatch, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """What attention makes of query [T, ...], as [T, N].

    attend: of windows of query [S, W, ...]; rows behind them give zeros.
    """
    rows = batch.num_slots * batch.width
    total = query.shape[0]
    mixed = attend(query[:rows].view(batch.num_slots, batch.width, *query.shape[1:])).reshape(
        rows, -1
    )
    return (
        mixed
        if rows == total
        else torch.cat((mixed, mixed.new_zeros(total - rows, mixed.shape[1])))
    )


@dataclass(frozen=True)
class LayerCache:
    """One layer's pools, each [pages, page, ...] with what its attention keeps of a position.

    Of a recurrent layer [slots, ...], with what it keeps of a slot.
    """

    pools: tuple[Tensor, ...]

    @property
    def keys_and_values(self) -> Pools:
        """Return the two pools of a layer that keeps keys and values."""
        keys, values = self.pools
        return keys, values
