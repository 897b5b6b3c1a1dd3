"""Linear layers on prebound weights: the interfaces of all products, and layers split over ranks.

The products of each backend have a file: `torch_linear`, `skinny_linear` (Triton) and
`native_linear` (C). A layer chooses its steps when it is built: the norm before its product, the
activation or norm after it, and which of these are fused into the product's kernel. Ranks split the
last product of each block, whose results are summed, and the vocabulary at both ends.
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
"""A function of rows [T, N], applied to each row independently, by torch's operations."""


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
    """A product that reads the stream, with the norm before it and the activation after it."""

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Tensor:
        """Return [T, N] of the stream [T, K], or [T, N / 2] after gates, by a weight [N, K]."""
        ...


class ResidualProjection(Protocol):
    """A product that is added to the stream, with the norm after it."""

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the product of x [T, K] by a weight [N, K]."""
        ...


class OutputHead(Protocol):
    """The product that gives logits of hidden states."""

    carries_square_sums: bool = False
    """True if the backend's products read sums of squares of the residual stream's rows."""

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, hidden]."""
        ...


def apply_in_tiles(apply: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    """Return the results of a function of x [T, ...], called with at most `tile` rows at a time.

    The last partial tile has a bucket's size.
    """
    if x.shape[0] <= tile:
        return apply(x)
    return torch.cat([apply(x[i : i + tile]) for i in range(0, x.shape[0], tile)])


def unscaled_norm(x: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of x [T, K] without scales."""
    return F.rms_norm(x, (x.shape[-1],), None, epsilon)


def without_mean(x: Tensor) -> Tensor:
    """Return rows x [T, N] minus their means, float32 in between.

    The means are those of the layer norm, whose kernels compute a row alike in any number of rows.
    """
    wide = x.float()
    _, means, _ = torch.native_layer_norm(wide, x.shape[-1:], None, None, 1.0)
    return (wide - means).to(x.dtype)


def normalize_stream(stream: Residual, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
    """Return the RMS norm of the stream [T, hidden] with scales `weight` [hidden]."""
    return kernels.rms_norm_rows(stream.x, stream.square_sums, weight, epsilon)


def activation_steps(act: Activation | None) -> tuple[RowStep, ...]:
    """Return the one step that applies an activation by torch's operations; none for None."""
    return () if act is None else (partial(activate, act=act),)


class ResidualAdder:
    """Adds rows to the stream, and scales the stream, by torch's operations."""

    def add(self, stream: Residual, y: Tensor) -> Residual:
        """Return the stream [T, N] plus y [T, N]."""
        return Residual(stream.x + y)

    def add_normed(self, stream: Residual, y: Tensor, norm: RowNorm) -> Residual:
        """Return the stream [T, N] plus the norm of y [T, N]."""
        return Residual(stream.x + norm(y))

    def add_centred(self, stream: Residual, y: Tensor) -> Residual:
        """Return the stream [T, N] plus y [T, N] minus its rows' means."""
        return self.add(stream, without_mean(y))

    def scale(self, stream: Residual, factor: float) -> Residual:
        """Return the stream [T, N] times a factor."""
        return Residual(stream.x * factor)


class SquareTrackingAdder(ResidualAdder):
    """A `ResidualAdder` that keeps the stream's sums of squares, except in whole chunks of a
    prompt.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def add(self, stream: Residual, y: Tensor) -> Residual:
        """Return the stream [T, N] plus y [T, N], rounded before the squares are summed."""
        total = super().add(stream, y)
        return total if stream.square_sums is None else with_square_sums(total.x, self.kernels)

    def add_normed(self, stream: Residual, y: Tensor, norm: RowNorm) -> Residual:
        """Return the stream [T, N] plus the norm of y [T, N], rounded once."""
        if stream.square_sums is None:
            return super().add_normed(stream, y, norm)
        x, square_sums = self.kernels.norm_residual(y, norm.scales, norm.epsilon, stream.x)
        return Residual(x, square_sums)

    def scale(self, stream: Residual, factor: float) -> Residual:
        """Return the stream [T, N] times a factor; its sums of squares are computed anew."""
        if stream.square_sums is None:
            return super().scale(stream, factor)
        return with_square_sums(stream.x, self.kernels, factor)


def make_residual_adder(kernels: Kernels) -> ResidualAdder:
    """Return the adder that a set of kernels needs."""
    return SquareTrackingAdder(kernels) if kernels.capabilities.folds_norms else ResidualAdder()


def with_square_sums(x: Tensor, kernels: Kernels, scale: float | None = None) -> Residual:
    """Return rows x [T, N], times scale, as a stream with its sums of squares."""
    rows = torch.arange(x.shape[0], device=x.device)
    scaled, square_sums = kernels.embed(rows, x, scale)
    return Residual(scaled, square_sums)


class RowParallelLinear:
    """A product of which each rank has columns [N, K / ranks]; ranks sum the results.

    The bias is added once.
    """

    def __init__(
        self,
        part: Projection,
        bias: Tensor | None,
        ranks: Communicator,
        add: Callable[[Residual, Tensor], Residual],
    ) -> None:
        """part: the product by this rank's columns; add: adds the sum over ranks to the stream."""
        self.part = part
        self.bias = bias
        self.ranks = ranks
        self.add = add

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the sum of all ranks' products of their x [T, K / ranks]."""
        y = self.ranks.sum(self.part(Residual(x), batch))
        if self.bias is not None:
            y = y + self.bias
        return self.add(stream, y)


@dataclass(frozen=True, eq=False)
class CentredProjection:
    """A `ResidualProjection` without the mean of its rows, by a weight whose columns have means."""

    part: Projection
    adder: ResidualAdder

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the product of x [T, K] minus its rows' means."""
        return self.adder.add_centred(stream, self.part(Residual(x), batch))


@dataclass(frozen=True, eq=False)
class TiledInputProjection:
    """A `ResidualProjection` of heads [keys, per key, width] by columns [per key, keys, width]."""

    part: ResidualProjection
    per_key: int
    width: int

    def __call__(self, x: Tensor, batch: ForwardBatch, stream: Residual) -> Residual:
        """Return the stream [T, N] plus the product of x [T, K], its heads in the columns' order."""
        heads = x.view(x.shape[0], -1, self.per_key, self.width)
        return self.part(heads.transpose(1, 2).reshape(x.shape), batch, stream)


class ShardedEmbedding:
    """An embedding table [V, H] of which each rank has the rows from its `first` id on."""

    def __init__(self, weight: Tensor, first: int, vocab_size: int, ranks: Communicator) -> None:
        self.weight = weight
        self.first = first
        self.ranks = ranks
        self.shape = torch.Size((vocab_size, weight.shape[1]))

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T, H] of ids int64 [T].

        A row is zero on all ranks but one, so the sum over ranks is exact.
        """
        local_ids = ids - self.first
        is_local = (local_ids >= 0) & (local_ids < self.weight.shape[0])
        rows = self.weight[torch.where(is_local, local_ids, 0)]
        return self.ranks.sum(torch.where(is_local.unsqueeze(-1), rows, torch.zeros_like(rows)))


class EmbeddingRows(Protocol):
    """A table [V, H] whose rows are computed at each lookup."""

    shape: torch.Size

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T, H] of ids int64 [T]."""
        ...


AnyEmbedding = Tensor | EmbeddingRows


class ShardedHead(OutputHead):
    """A head of which each rank computes the logits of its ids; they are gathered."""

    def __init__(self, inner: OutputHead, vocab_size: int, ranks: Communicator) -> None:
        self.inner = inner
        self.vocab_size = vocab_size
        self.ranks = ranks
        self.carries_square_sums = inner.carries_square_sums
        self.width = -(-vocab_size // ranks.size)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, hidden]."""
        part = self.inner.logits(hidden, tile)
        parts = self.ranks.gather(F.pad(part, (0, self.width - part.shape[-1])))
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]
