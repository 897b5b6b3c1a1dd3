"""Linear layers on prebound weights: what every form of products shares, and what several ranks share.

A form has a file of its own: `torch_linear`, `skinny_linear` (Triton's) and `native_linear` (C's). A layer
has chosen its steps when it is built: the norm before its product, the activation or norm behind it, and
what of these is a part of the product's kernel. Of some layers every rank holds a part: sums after a block,
and the vocabulary at both ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.interface import Kernels
from spd.kernels.linear.activation import Activation
from spd.kernels.linear.norm_gate import activate, rms_norm
from spd.runtime.layers.base import Communicator, ForwardBatch, Residual

RowStep = Callable[[Tensor], Tensor]
"""A change of rows [T, N], each by itself, by torch's operations."""


@dataclass(frozen=True)
class RowNorm:
    """An RMS norm of rows, with its scales [K]."""

    scales: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, K]."""
        return rms_norm(x, self.scales, self.epsilon)


@dataclass(frozen=True)
class FoldedNorm:
    """An RMS norm of rows whose scales are folded into the weight of the product that reads it."""

    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, K] without scales."""
        return unscaled_norm(x, self.epsilon)


class Projection(Protocol):
    """A product that reads the stream, with the norm before it and the activation behind it."""

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Tensor:
        """Return [T, N] of the stream [T, K], or [T, N / 2] behind gates, by a weight [N, K]."""
        ...


class ResidualProjection(Protocol):
    """A product that is added to the stream, with the norm behind it."""

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the product of x [T, K] by a weight [N, K]."""
        ...


class AnyHead(Protocol):
    """The product that makes logits of hidden states."""

    carries_squares: bool = False
    """True if this form's products want a row's sum of squares beside the residual stream."""

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, hidden]."""
        ...


def in_tiles(apply: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    """Apply a function to x [T, ...], at most `tile` rows a call; a last partial tile has a bucket's size."""
    if x.shape[0] <= tile:
        return apply(x)
    return torch.cat([apply(x[i : i + tile]) for i in range(0, x.shape[0], tile)])


def unscaled_norm(x: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of x [T, K] without scales."""
    return F.rms_norm(x, (x.shape[-1],), None, epsilon)


def normed(stream: Residual, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
    """Return the RMS norm of the stream [T, hidden] with scales weight [hidden]."""
    return kernels.rms_norm_rows(stream.x, stream.squares, weight, epsilon)


def activation_steps(act: Activation | None) -> tuple[RowStep, ...]:
    """Return the step of an activation by torch's operations; none where there is no activation."""
    return () if act is None else (partial(activate, act=act),)


class StreamSums:
    """Sums of the stream and rows, and its multiples, by torch's operations."""

    def add(self, stream: Residual, y: Tensor) -> Residual:
        """Return the stream [T, N] plus y [T, N]."""
        return Residual(stream.x + y)

    def add_normed(self, stream: Residual, y: Tensor, norm: RowNorm) -> Residual:
        """Return the stream [T, N] plus the norm of y [T, N]."""
        return Residual(stream.x + norm(y))

    def scale(self, stream: Residual, factor: float) -> Residual:
        """Return the stream [T, N] times a factor."""
        return Residual(stream.x * factor)


class SquareSums(StreamSums):
    """The same where kernels carry squares beside the stream, in all passes but whole chunks of a prompt."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def add(self, stream: Residual, y: Tensor) -> Residual:
        """Return the stream [T, N] plus y [T, N], rounded before its squares are summed."""
        total = super().add(stream, y)
        return total if stream.squares is None else squared(total.x, self.kernels)

    def add_normed(self, stream: Residual, y: Tensor, norm: RowNorm) -> Residual:
        """Return the stream [T, N] plus the norm of y [T, N], rounded once."""
        if stream.squares is None:
            return super().add_normed(stream, y, norm)
        x, squares = self.kernels.norm_residual(y, norm.scales, norm.epsilon, stream.x)
        return Residual(x, squares)

    def scale(self, stream: Residual, factor: float) -> Residual:
        """Return the stream [T, N] times a factor; squares that it has are those of before, and go."""
        if stream.squares is None:
            return super().scale(stream, factor)
        return squared(stream.x, self.kernels, factor)


def stream_sums(kernels: Kernels) -> StreamSums:
    """Return the sums of the stream that go with a set of kernels."""
    return SquareSums(kernels) if kernels.capabilities.folds_norms else StreamSums()


def squared(x: Tensor, kernels: Kernels, scale: float | None = None) -> Residual:
    """Return rows x [T, N], times scale, as a stream that carries its squares."""
    rows = torch.arange(x.shape[0], device=x.device)
    scaled, squares = kernels.embed(rows, x, scale)
    return Residual(scaled, squares)


class SummedLinear:
    """A product whose columns [N, K / ranks] are a rank's own. The bias is added once."""

    def __init__(
        self,
        part: Projection,
        bias: Tensor | None,
        post_norm: RowNorm | None,
        ranks: Communicator,
        sums: StreamSums,
    ) -> None:
        """part: the product by this rank's columns; post_norm: of the sum over ranks."""
        self.part = part
        self.bias = bias
        self.ranks = ranks
        self.add = sums.add
        if post_norm is not None:
            self.add = partial(sums.add_normed, norm=post_norm)

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the sum of all ranks' products of their x [T, K / ranks]."""
        y = self.ranks.sum(self.part(Residual(x), batch))
        if self.bias is not None:
            y = y + self.bias
        return self.add(stream, y)


class ShardedEmbedding:
    """The rows of a table [V, H] that begin with a rank's first id; others come from other ranks."""

    def __init__(self, weight: Tensor, first: int, vocab_size: int, ranks: Communicator) -> None:
        self.weight = weight
        self.first = first
        self.ranks = ranks
        self.shape = torch.Size((vocab_size, weight.shape[1]))

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T, H] of ids int64 [T]: zeros but on one rank, so that their sum is exact."""
        local_ids = ids - self.first
        is_local = (local_ids >= 0) & (local_ids < self.weight.shape[0])
        rows = self.weight[torch.where(is_local, local_ids, 0)]
        return self.ranks.sum(torch.where(is_local.unsqueeze(-1), rows, torch.zeros_like(rows)))


class EmbeddingRows(Protocol):
    """A table [V, H] of which rows are made when they are asked for."""

    shape: torch.Size

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T, H] of ids int64 [T]."""
        ...


AnyEmbedding = Tensor | EmbeddingRows


class ShardedHead(AnyHead):
    """Logits of a rank's own ids, of `vocab_size` in all, gathered."""

    def __init__(self, inner: AnyHead, vocab_size: int, ranks: Communicator) -> None:
        self.inner = inner
        self.vocab_size = vocab_size
        self.ranks = ranks
        self.carries_squares = inner.carries_squares
        self.width = -(-vocab_size // ranks.size)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, hidden]."""
        part = self.inner.logits(hidden, tile)
        parts = self.ranks.gather(F.pad(part, (0, self.width - part.shape[-1])))
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]
