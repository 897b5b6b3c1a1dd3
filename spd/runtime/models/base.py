"""What a model is to the runner: a batch of rows in, hidden states and logits out.

Models know tensors and this batch; never requests, schedulers, proposers or samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from spd.kernels.paged_attention import AttentionHeads
from spd.runtime.models.destinations import Shape


class ModelOutput(NamedTuple):
    """What a pass makes of rows: `hidden`, of which logits are made, and `states`, which a head reads."""

    hidden: Tensor
    states: Tensor

    @classmethod
    def of(cls, hidden: Tensor) -> ModelOutput:
        """Of a model whose hidden states are what a head would read."""
        return cls(hidden, hidden)

    def each(self, change: Callable[[Tensor], Tensor]) -> ModelOutput:
        """Both changed alike."""
        hidden = change(self.hidden)
        return ModelOutput(hidden, hidden if self.states is self.hidden else change(self.states))


@dataclass(frozen=True)
class HeadStates:
    """Rings [S, >= depth, hidden] of states that a head reads beside tokens: see `spd.kernels.head_input`."""

    rings: Tensor
    depth: int


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one forward pass: a window of `width` positions for each of `num_slots` slots.

    T rows = num_slots * width, rounded up to a row bucket with rows that are dropped. page_table is
    int64 [S, pages]; plan is what `plan_attention` made of the rows. A prompt chunk of one slot has a
    chunk_start, its first position; the kernels that attend by it need no plan. first_key is the first
    position whose cache entry holds anything, see `causal_bias`. for_head: whether a head that drafts reads
    what is made for it.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64, into the flattened pools
    page_table: Tensor  # [S, pages] int64
    plan: Any
    num_slots: int
    width: int
    tile: int
    chunk_start: int | None = None
    first_key: int = 0
    states: HeadStates | None = None
    for_head: bool = True


@dataclass(frozen=True)
class Residual:
    """The residual stream x [T, hidden], with partial sums of squares of its rows where kernels keep them."""

    x: Tensor
    squares: Tensor | None = None


@dataclass(frozen=True)
class LayerCache:
    """One layer's pools, each [pages, page, ...] with what its attention keeps of a position."""

    pools: tuple[Tensor, ...]


class AuxReader(Protocol):
    """What makes a head's states of its target's residual stream between layers."""

    @property
    def layers(self) -> Sequence[int]:
        """How many layers each stream that it reads has passed."""
        ...

    def fuse(self, streams: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
        """States [T, the head's hidden] of streams [T, hidden], one for each of `layers`."""
        ...


class CausalModel(Protocol):
    """A decoder the runner can drive."""

    cache_shapes: list[tuple[Shape, ...]]
    """For each layer, what one position holds in each of its pools."""
    varied_layers: int
    """How many of the first layers there must be for one of every kind."""
    heads: AttentionHeads
    hidden_size: int
    vocab_size: int
    max_positions: int
    part: Any
    """The `ShardedHead` whose ranks may each say their best only; None where logits are whole."""

    def products(self) -> Iterable[object]:
        """The products of its layers and head, each `AnyLinear` or `AnyHead`."""
        ...

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """Hidden states after the final norm, [T, hidden], of as many layers as caches are given."""
        ...

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V] of hidden [T, hidden]."""
        ...

    def part_logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, ids of this rank] of hidden [T, hidden], where `part` is there."""
        ...

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [T] and whether each is finite, by a head fused with the draw; None where there is none.

        hidden [T, hidden] of S slots with T / S rows each; seed, first, temperature [S]: row r of a slot
        draws the token at position first + step + r.
        """
        ...
