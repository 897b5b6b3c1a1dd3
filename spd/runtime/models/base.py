"""What a model is to the runner: a batch of rows in, hidden states and logits out.

Models know tensors and this batch; never requests, schedulers, proposers or samplers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one forward pass: a window of `width` positions for each of `num_slots` slots.

    T rows = num_slots * width, rounded up to a row bucket with rows that are dropped. page_table is
    int64 [S, pages]; biases and first_pages are one entry a slot (see `paged_attention`).
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64, into the flattened pools
    page_table: Tensor  # [S, pages] int64
    biases: tuple[Tensor | None, ...]
    first_pages: tuple[int | None, ...]
    num_slots: int
    width: int
    tile: int


@dataclass(frozen=True)
class LayerCache:
    """One layer's pools, each [pages, page, K, D]."""

    key: Tensor
    value: Tensor


class CausalModel(Protocol):
    """A decoder the runner can drive."""

    num_layers: int
    num_kv_heads: int
    num_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Hidden states after the final norm, [T, hidden], of as many layers as caches are given."""
        ...

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V] of hidden [T, hidden]."""
        ...
