"""The steps of a block of experts, chosen when it is built: router, shared expert, sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spd.kernels.experts.moe import ExpertWeights, RoutingRule
from spd.kernels.interface import Kernels
from spd.runtime.layers.base import Communicator, ForwardBatch, Residual
from spd.runtime.layers.linear import Projection, ResidualAdder, ResidualProjection, apply_in_tiles

ExpertChoice = tuple[Tensor, Tensor]
"""The experts of each row, int64 [T, k], and their weights, float32 [T, k]."""


@dataclass(frozen=True, eq=False)
class RouterLogits:
    """Products of rows by a float32 matrix [E, K], as partial sums."""

    weight: Tensor
    kernels: Kernels

    def __call__(self, x: Tensor, tile: int) -> Tensor:
        """Return partial sums float32 [T, P, E] of x [T, K]."""
        return apply_in_tiles(lambda rows: self.kernels.router_logits(rows, self.weight), x, tile)


@dataclass(frozen=True, eq=False)
class BiasedLogits(RouterLogits):
    """Router logits plus a bias [E]."""

    bias: Tensor

    def __call__(self, x: Tensor, tile: int) -> Tensor:
        """Return partial sums float32 [T, P, E] of x [T, K]; the bias is in the first one."""
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

    def __call__(self, x: Tensor, tile: int) -> ExpertChoice:
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
        """Return `onto` [T, hidden] plus the expert's result for the stream, whose norm is x."""
        return self.down(self.gate_up(stream, batch), batch, onto)


@dataclass(frozen=True, eq=False)
class GatedSharedExpert(SharedExpert):
    """A shared expert whose result for each row is multiplied by the sigmoid of a gate."""

    gate: RouterLogits

    def __call__(
        self, stream: Residual, x: Tensor, batch: ForwardBatch, onto: Residual
    ) -> Residual:
        """Return `onto` [T, hidden] plus the expert's result for the stream, whose norm is x."""
        inner = self.gate_up(stream, batch)
        factors = self.gate(x, batch.tile).sum(1).sigmoid()
        return self.down((inner * factors).to(x.dtype), batch, onto)


class RoutedExperts(Protocol):
    """All routed experts of a layer."""

    def __call__(
        self, x: Tensor, chosen: ExpertChoice, batch: ForwardBatch, onto: Residual
    ) -> Residual:
        """Return `onto` [T, K] plus the weighted sum of the experts' results for rows x [T, K]."""
        ...


@dataclass(frozen=True, eq=False)
class FusedSum:
    """Experts whose sum is added to the stream by their kernel."""

    weights: ExpertWeights
    kernels: Kernels

    def __call__(
        self, x: Tensor, chosen: ExpertChoice, batch: ForwardBatch, onto: Residual
    ) -> Residual:
        """Return `onto` plus the weighted sum; see `RoutedExperts`."""
        ids, weights = chosen
        total, square_sums = self.kernels.experts(x, ids, weights, self.weights, onto.x)
        return Residual(total, square_sums)


@dataclass(frozen=True, eq=False)
class SeparateSum:
    """Experts whose sum is rounded before it is added to the stream."""

    weights: ExpertWeights
    kernels: Kernels

    def __call__(
        self, x: Tensor, chosen: ExpertChoice, batch: ForwardBatch, onto: Residual
    ) -> Residual:
        """Return `onto` plus the weighted sum; see `RoutedExperts`."""
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

    def __call__(
        self, x: Tensor, chosen: ExpertChoice, batch: ForwardBatch, onto: Residual
    ) -> Residual:
        """Return `onto` plus the weighted sum; see `RoutedExperts`."""
        add = self.window if batch.chunk_start is None else self.chunk
        return add(x, chosen, batch, onto)


@dataclass(frozen=True, eq=False)
class LatentExperts:
    """Experts that work in a narrower space, between two projections."""

    narrow: Projection
    experts: RoutedExperts
    widen: ResidualProjection

    def __call__(
        self, x: Tensor, chosen: ExpertChoice, batch: ForwardBatch, onto: Residual
    ) -> Residual:
        """Return `onto` plus the weighted sum; see `RoutedExperts`."""
        narrow = self.narrow(Residual(x), batch)
        y = self.experts(narrow, chosen, batch, Residual(torch.zeros_like(narrow)))
        return self.widen(y.x, batch, onto)


class BlockTotal:
    """The running sum of a block's parts, which begins with the stream."""

    def begin(self, stream: Residual) -> Residual:
        """Return the tensor that the first part is added to."""
        return stream

    def end(self, stream: Residual, total: Residual) -> Residual:
        """Return the stream [T, hidden] with the block added; total: the sum of all parts."""
        return total


class RanksTotal(BlockTotal):
    """The running sum of a rank's parts, which begins with zeros: the sum over ranks is added to
    the stream once.
    """

    def __init__(self, ranks: Communicator, adder: ResidualAdder) -> None:
        self.ranks = ranks
        self.adder = adder

    def begin(self, stream: Residual) -> Residual:
        """Return zeros [T, hidden], with the stream's sums of squares."""
        return Residual(torch.zeros_like(stream.x), stream.square_sums)

    def end(self, stream: Residual, total: Residual) -> Residual:
        """Return the stream [T, hidden] plus the sum of all ranks' totals."""
        return self.adder.add(stream, self.ranks.sum(total.x))
