"""The steps of a block of experts, chosen once when it is built: router, shared expert, sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spd.kernels.experts.moe import ExpertWeights, RoutingRule
from spd.kernels.interface import Kernels
from spd.runtime.layers.base import Communicator, ForwardBatch, Residual
from spd.runtime.layers.linear import Projection, ResidualProjection, StreamSums, in_tiles

Choice = tuple[Tensor, Tensor]
"""The experts int64 [T, k] that each row goes to, and their weights float32 [T, k]."""


@dataclass(frozen=True, eq=False)
class RouterLogits:
    """Products of rows by a float32 matrix [E, K], in parts."""

    weight: Tensor
    kernels: Kernels

    def __call__(self, x: Tensor, tile: int) -> Tensor:
        """Return parts float32 [T, P, E] of x [T, K]."""
        return in_tiles(lambda rows: self.kernels.router_logits(rows, self.weight), x, tile)


@dataclass(frozen=True, eq=False)
class BiasedLogits(RouterLogits):
    """The same plus a bias [E]."""

    bias: Tensor

    def __call__(self, x: Tensor, tile: int) -> Tensor:
        """Return parts float32 [T, P, E] of x [T, K]; the bias is in the first one."""
        logits = super().__call__(x, tile)
        logits[:, 0] += self.bias
        return logits


@dataclass(frozen=True, eq=False)
class Router:
    """The choice of experts for each row, by a rule."""

    logits: RouterLogits
    correction: Tensor | None
    """Float32 [E], added to scores for the choice alone."""
    rule: RoutingRule
    kernels: Kernels

    def __call__(self, x: Tensor, tile: int) -> Choice:
        """Return the choice for rows x [T, K]."""
        return self.kernels.route(self.logits(x, tile), self.correction, self.rule)


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The expert that every row goes through."""

    gate_up: Projection
    down: ResidualProjection

    def __call__(
        self, stream: Residual, x: Tensor, batch: ForwardBatch, onto: Residual
    ) -> Residual:
        """Return `onto` [T, hidden] plus what the expert makes of the stream, whose norm is x."""
        return self.down(self.gate_up(stream, batch), batch, onto)


@dataclass(frozen=True, eq=False)
class GatedSharedExpert(SharedExpert):
    """The same, of which each row's result is multiplied by the sigmoid of a gate."""

    gate: RouterLogits

    def __call__(
        self, stream: Residual, x: Tensor, batch: ForwardBatch, onto: Residual
    ) -> Residual:
        """Return `onto` [T, hidden] plus what the expert makes of the stream, whose norm is x."""
        inner = self.gate_up(stream, batch)
        factors = self.gate(x, batch.tile).sum(1).sigmoid()
        return self.down((inner * factors).to(x.dtype), batch, onto)


class RoutedExperts(Protocol):
    """All routed experts of a layer."""

    def __call__(self, x: Tensor, chosen: Choice, batch: ForwardBatch, onto: Residual) -> Residual:
        """Return `onto` [T, K] plus the weighted sum of what the experts make of rows x [T, K]."""
        ...


@dataclass(frozen=True, eq=False)
class FusedSum:
    """Experts whose sum is added to the stream by their kernel."""

    weights: ExpertWeights
    kernels: Kernels

    def __call__(self, x: Tensor, chosen: Choice, batch: ForwardBatch, onto: Residual) -> Residual:
        """See `RoutedExperts`."""
        ids, weights = chosen
        total, squares = self.kernels.experts(x, ids, weights, self.weights, onto.x)
        return Residual(total, squares)


@dataclass(frozen=True, eq=False)
class SeparateSum:
    """Experts whose sum is rounded before it is added to the stream."""

    weights: ExpertWeights
    kernels: Kernels

    def __call__(self, x: Tensor, chosen: Choice, batch: ForwardBatch, onto: Residual) -> Residual:
        """See `RoutedExperts`."""
        ids, weights = chosen
        is_chunk = batch.chunk_start is not None
        y = self.kernels.experts(x, ids, weights, self.weights, chunk=is_chunk)[0]
        return Residual(onto.x + y)


class WindowedSum:
    """Experts whose sum is fused in windows, and separate in whole chunks of a prompt."""

    def __init__(self, weights: ExpertWeights, kernels: Kernels) -> None:
        self.weights = weights
        self.window = FusedSum(weights, kernels)
        self.chunk = SeparateSum(weights, kernels)

    def __call__(self, x: Tensor, chosen: Choice, batch: ForwardBatch, onto: Residual) -> Residual:
        """See `RoutedExperts`."""
        add = self.window if batch.chunk_start is None else self.chunk
        return add(x, chosen, batch, onto)


@dataclass(frozen=True, eq=False)
class LatentExperts:
    """Experts that work in a narrower space, between two projections."""

    narrow: Projection
    experts: RoutedExperts
    widen: ResidualProjection

    def __call__(self, x: Tensor, chosen: Choice, batch: ForwardBatch, onto: Residual) -> Residual:
        """See `RoutedExperts`."""
        narrow = self.narrow(Residual(x), batch)
        y = self.experts(narrow, chosen, batch, Residual(torch.zeros_like(narrow)))
        return self.widen(y.x, batch, onto)


class BlockTotal:
    """What the parts of a block are added to one after another: the stream itself."""

    def begin(self, stream: Residual) -> Residual:
        """Return what the first part is added to."""
        return stream

    def end(self, stream: Residual, total: Residual) -> Residual:
        """Return the stream [T, hidden] with the block added, of the total of all parts."""
        return total


class RanksTotal(BlockTotal):
    """What a rank's parts are added to: zeros, since they are one part of one sum over ranks."""

    def __init__(self, ranks: Communicator, sums: StreamSums) -> None:
        self.ranks = ranks
        self.sums = sums

    def begin(self, stream: Residual) -> Residual:
        """Return zeros [T, hidden], with squares where the stream has some."""
        return Residual(torch.zeros_like(stream.x), stream.squares)

    def end(self, stream: Residual, total: Residual) -> Residual:
        """Return the stream [T, hidden] plus the sum of all ranks' totals."""
        return self.sums.add(stream, self.ranks.sum(total.x))
