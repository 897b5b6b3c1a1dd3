"""Layers of which every rank holds a part: sums after a block, the vocabulary at both ends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.runtime.layers.base import Communicator, ForwardBatch, Residual
from spd.runtime.layers.linear import AnyHead, AnyLinear, Around


def squared(x: Tensor, kernels: Kernels, scale: float | None = None) -> Residual:
    """Rows x [T, N], times scale, as a stream that carries its squares."""
    return Residual(*kernels.embed(torch.arange(x.shape[0], device=x.device), x, scale))


def added(stream: Residual, y: Tensor, kernels: Kernels) -> Residual:
    """The stream [T, N] plus y [T, N], rounded alone before, with squares where it has them."""
    x = stream.x + y
    return Residual(x) if stream.squares is None else squared(x, kernels)


class SummedLinear:
    """A product whose columns [N, K / ranks] are a rank's own: see `AnyLinear`. The bias is added once."""

    def __init__(
        self, inner: AnyLinear, bias: Tensor | None, around: Around, ranks: Communicator, kernels: Kernels
    ) -> None:
        """around: of the whole; none of it stands before the product."""
        self.inner, self.bias, self.around, self.ranks, self.kernels = inner, bias, around, ranks, kernels

    def __call__(self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None) -> Residual:
        y, around = self.ranks.sum(self.inner(stream, batch).x), self.around
        y = y if self.bias is None else y + self.bias
        if onto is None or onto.squares is None:
            return around.ended(y, onto)
        if around.post_norm is None:
            return added(onto, y, self.kernels)
        return Residual(*self.kernels.norm_residual(y, around.post_norm, around.epsilon, onto.x))


class ShardedEmbedding:
    """The rows of a table [V, H] that begin with a rank's first id; others come from other ranks."""

    def __init__(self, weight: Tensor, first: int, vocab_size: int, ranks: Communicator) -> None:
        self.weight, self.first, self.ranks = weight, first, ranks
        self.shape = torch.Size((vocab_size, weight.shape[1]))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [T, H] of ids int64 [T]: zeros but on one rank, so that their sum is exact."""
        own = ids - self.first
        here = (own >= 0) & (own < self.weight.shape[0])
        found = self.weight[torch.where(here, own, 0)]
        return self.ranks.sum(torch.where(here.unsqueeze(-1), found, torch.zeros_like(found)))


AnyEmbedding = Tensor | ShardedEmbedding


class ShardedHead(AnyHead):
    """Logits of a rank's own ids, of `vocab_size` in all, gathered."""

    def __init__(self, inner: AnyHead, vocab_size: int, ranks: Communicator) -> None:
        self.inner, self.vocab_size, self.ranks = inner, vocab_size, ranks
        self.carries_squares = inner.carries_squares
        self.width = -(-vocab_size // ranks.size)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        own = self.inner.logits(hidden, tile)
        every = self.ranks.gather(F.pad(own, (0, self.width - own.shape[-1])))
        return every.transpose(0, 1).flatten(1)[:, : self.vocab_size]
