"""The interface between a model and the runner: a batch of rows in, hidden states and logits out.

Models know tensors and this batch; never requests, schedulers, proposers or samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionPlan
from spd.kernels.attention.rotary_store import Pools
from spd.kernels.linear.head_input import HeadStates as HeadStates
from spd.kernels.recurrent.short_conv import Segments

HeadShape = tuple[int, int, int]
"""Query heads, key-value heads in the cache, and elements of a head, as attention sees them."""


class Communicator(Protocol):
    """The exchange between ranks in a forward pass.

    Each rank holds a part; afterwards all ranks hold the same bits.
    """

    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks in rank order: [N, *part.shape].

        Parts have equal shapes.
        """

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts in rank order, in float32 and rounded once to their
        dtype.
        """


class ModelOutput(NamedTuple):
    """The output of a forward pass: `hidden`, from which logits follow, and `states`, which a head
    reads.
    """

    hidden: Tensor
    states: Tensor

    @classmethod
    def from_hidden(cls, hidden: Tensor) -> ModelOutput:
        """Return the output of a model whose hidden states are also those that a head reads."""
        return cls(hidden, hidden)

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelOutput:
        """Return the output with `change` applied to both tensors."""
        hidden = change(self.hidden)
        return ModelOutput(hidden, hidden if self.states is self.hidden else change(self.states))


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one forward pass: a window of `width` positions for each of `num_slots` slots.

    T rows = num_slots * width, rounded up to a row bucket with rows that are dropped.
    """

    token_ids: Tensor
    """Int64 [T]."""
    positions: Tensor
    """Int64 [T]."""
    kv_slots: Tensor
    """Int64 [T]: the row of the flattened pools that each row writes."""
    page_table: Tensor
    """Int64 [S, pages]."""
    plan: Mapping[HeadShape, AttentionPlan]
    """Plans of the rows by the shape of heads, from `plan_attention`."""
    num_slots: int
    width: int
    tile: int
    """The most rows of one product."""
    chunk_start: int | None = None
    """The first position of a prompt chunk of one slot; None in other passes."""
    states: HeadStates | None = None
    segments: Segments | None = None
    """The rows that recurrent layers read; None where a model has no such layers."""
    block_plan: Mapping[HeadShape, AttentionPlan] = field(default_factory=dict)
    """Plans of layers whose rows attend to all rows of their block."""
    is_block: bool = False
    """True if the windows are a block drafter's blocks."""
    per_layer: Tensor | None = None
    """[T, layers, P]: embeddings of the rows' tokens in each layer, where layers have their own."""


@dataclass(frozen=True)
class Residual:
    """The residual stream x [T, hidden], with partial sums of squares of its rows where kernels use
    them.
    """

    x: Tensor
    square_sums: Tensor | None = None


def attend_windows(
    query: Tensor, batch: ForwardBatch, attend: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the attention output of query [T, ...], as [T, N].

    attend: computes it for windows of query [S, W, ...]; rows after the windows give zeros.
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
    """One layer's pools, each [pages, page, ...] with the entries of every position.

    Of a cache in eight bits the codes of all entries come first, then their scales.

    Pools of a recurrent layer are [slots, ...], with the state of every slot.
    """

    pools: tuple[Tensor, ...]

    @property
    def keys_and_values(self) -> Pools:
        """Return the pools of a layer that caches keys and values, scales after both."""
        return self.pools
