"""The routed experts of one layer, and the one that every row goes through."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spd.formats.block_config import RouterConfig
from spd.kernels.dispatch import Kernels
from spd.kernels.moe import gate_chosen
from spd.kernels.native.library import NativeLibrary
from spd.kernels.skinny_linear import AnyWeight
from spd.runtime.layers.linear import AnyLinear, in_tiles
from spd.runtime.layers.norm import normed
from spd.runtime.layers.sharded import added
from spd.runtime.models.base import ForwardBatch, Residual
from spd.runtime.parallel.communicator import Communicator

SMALL_EXPERTS = 8 * 2**20
"""Bytes of all experts of a layer up to which torch's form computes every one for every row: two products
cost less than sorting rows and many small ones, and nothing depends on where rows go."""


class Experts(Protocol):
    """All routed experts of a layer."""

    def onto(
        self, x: Tensor, ids: Tensor, weights: Tensor, stream: Residual, batch: ForwardBatch
    ) -> Residual:
        """The stream [T, K] plus the weighed sum of what the experts ids [T, k] make of x [T, K].

        weights float32 [T, k].
        """
        ...


class MergedExperts:
    """Small experts as one wide MLP, of which a row takes its part: gate_up [E * 2 I, K], down [K, E * I]."""

    def __init__(self, gate_up: AnyLinear, down: AnyLinear, count: int) -> None:
        self.gate_up, self.down, self.count = gate_up, down, count

    def onto(
        self, x: Tensor, ids: Tensor, weights: Tensor, stream: Residual, batch: ForwardBatch
    ) -> Residual:
        """See `Experts`."""
        every = self.gate_up.product(x, batch).view(x.shape[0], self.count, -1)
        return self.down.onto(gate_chosen(every, ids, weights), stream, batch)


class NativeExperts:
    """Experts in packed weights for C kernels, gated [E, 2 I, K] and plain [E, K, I]."""

    def __init__(self, gate_up: Tensor, down: Tensor, library: NativeLibrary) -> None:
        self.gate_up, self.down, self.library = library.pack(gate_up, gated=True), library.pack(down), library

    def onto(
        self, x: Tensor, ids: Tensor, weights: Tensor, stream: Residual, batch: ForwardBatch
    ) -> Residual:
        """See `Experts`."""
        return Residual(self.library.experts(x, ids, weights, self.gate_up, self.down, stream.x))


class RoutedExperts:
    """Experts that only compute the rows that go to them; gate_up [E, 2 I, K], down [E, K, I]."""

    def __init__(self, gate_up: AnyWeight, down: AnyWeight, kernels: Kernels) -> None:
        self.gate_up, self.down, self.kernels = gate_up, down, kernels

    def onto(
        self, x: Tensor, ids: Tensor, weights: Tensor, stream: Residual, batch: ForwardBatch
    ) -> Residual:
        """See `Experts`."""
        case = (x, ids, weights, self.gate_up, self.down)
        if stream.squares is not None:
            return Residual(*self.kernels.experts_onto(*case, stream.x))
        return Residual(stream.x + self.kernels.experts(*case, chunk=batch.chunk_start is not None))


class MoeMlp:
    """stream + experts(norm(stream)) + shared(norm(stream)); router float32 [E, K]."""

    def __init__(
        self,
        norm: Tensor,
        router: Tensor,
        correction: Tensor | None,
        experts: Experts,
        shared: tuple[AnyLinear, AnyLinear] | None,
        rule: RouterConfig,
        epsilon: float,
        kernels: Kernels,
        ranks: Communicator | None = None,
    ) -> None:
        self.ranks = ranks
        self.norm, self.router, self.correction = norm, router, correction
        self.experts, self.shared = experts, shared
        self.rule, self.epsilon, self.kernels = rule, epsilon, kernels

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run, but for the experts'."""
        return self.shared or ()

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, hidden] with this block added."""
        x = normed(stream, self.norm, self.epsilon, self.kernels)
        chosen, onto = self._route(x, batch.tile), stream
        if self.ranks is not None:  # the experts' parts together are one part of one sum
            onto = Residual(torch.zeros_like(stream.x), stream.squares)
        if self.shared is not None:
            gate_up, down = self.shared
            onto = down.onto(gate_up.gated(stream, self.norm, self.epsilon, batch), onto, batch)
        whole = self.experts.onto(x, *chosen, onto, batch)
        return whole if self.ranks is None else added(stream, self.ranks.sum(whole.x), self.kernels)

    def _route(self, x: Tensor, tile: int) -> tuple[Tensor, Tensor]:
        """The chosen experts and their weights, [T, k] each."""
        rule = self.rule
        logits = in_tiles(lambda rows: self.kernels.router_logits(rows, self.router), x, tile)
        chosen: tuple[Tensor, Tensor] = self.kernels.route(
            logits,
            self.correction,
            rule.per_token,
            rule.groups,
            rule.groups_kept,
            rule.group_best,
            rule.sigmoid,
            rule.normalised,
            rule.scale,
        )
        return chosen
