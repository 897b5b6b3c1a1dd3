"""The blocks of a layer that take each row by itself: the gated MLP, and routed experts with a shared one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.experts.moe import FEW_ROWS, MANY_ROWS, ClampedExperts, by_expert
from spd.kernels.linear.eight_bits import expert_linear
from spd.kernels.linear.few_bits import GroupedWeight, tiled
from spd.kernels.linear.skinny_linear import AnyWeight, plain_weight
from spd.kernels.native.library import NativeLibrary, PackedWeight
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import AnyLinear, in_tiles, normed
from spd.runtime.layers.sharded import added
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.layouts import MlpLayout, MoeLayout

Chosen = tuple[Tensor, Tensor]
"""For each row the experts int64 [T, k] that it goes to, and their weights float32 [T, k]."""


class NativeExperts:
    """Experts in packed weights of C kernels, gated [E, 2 I, K] and plain [E, K, I]."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight, library: NativeLibrary) -> None:
        self.gate_up, self.down, self.library = gate_up, down, library

    def onto(self, x: Tensor, chosen: Chosen, stream: Residual, batch: ForwardBatch) -> Residual:
        return Residual(self.library.experts(x, *chosen, self.gate_up, self.down, stream.x))


class RoutedExperts:
    """Experts that only compute the rows that go to them; gate_up [E, 2 I, K], down [E, K, I]."""

    def __init__(
        self, gate_up: AnyWeight | GroupedWeight, down: AnyWeight | GroupedWeight, kernels: Kernels
    ) -> None:
        self.gate_up, self.down, self.kernels = gate_up, down, kernels

    def onto(self, x: Tensor, chosen: Chosen, stream: Residual, batch: ForwardBatch) -> Residual:
        case = (x, *chosen, self.gate_up, self.down)
        if stream.squares is not None:
            return Residual(*self.kernels.experts(*case, stream.x))
        return Residual(stream.x + self.kernels.experts(*case, chunk=batch.chunk_start is not None)[0])


class TorchExperts:
    """Experts of which a function [T, K] and a number makes [T, K]; torch's form alone."""

    def __init__(self, through: Callable[[Tensor, int], Tensor]) -> None:
        self.through = through

    def onto(self, x: Tensor, chosen: Chosen, stream: Residual, batch: ForwardBatch) -> Residual:
        tile = FEW_ROWS if batch.chunk_start is None else MANY_ROWS
        return Residual(stream.x + by_expert(x, *chosen, tile, self.through))


def biased_experts(layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> ClampedExperts:
    """Clamped experts with biases, of gate_up and down as they are stored: see `MoeLayout`."""
    assert layout.experts.clamped is not None
    count, limits = layout.experts.num_experts, layout.experts.clamped
    each: list[AnyWeight | GroupedWeight] = [
        tensors[name].view(count, -1, tensors[name].shape[1]).mT.contiguous()
        if layout.turned
        else build.stacked(tensors, name, count, cut=False)
        for name in EXPERT_NAMES
    ]
    biases = [tensors[f"{name}_bias"].to(build.dtype) for name in EXPERT_NAMES]
    if build.ranks is not None and build.ranks.rank:
        biases[1].zero_()  # of the ranks' sum it is a part once
    return ClampedExperts(each[0], biases[0], each[1], biases[1], *limits)


def squared_relu(x: Tensor) -> Tensor:
    """What stands in place of a gate where there is none."""
    return x.relu().square()


EXPERT_NAMES = ("experts_gate_up", "experts_down")
Experts = NativeExperts | RoutedExperts | TorchExperts
"""All routed experts of a layer; `onto` adds the weighed sum of what they make of x [T, K] to a stream."""


class GatedMlp:
    """stream + down(act(gate(norm(stream))) * up(norm(stream))), gate and up fused; act is silu or gelu.

    Or stream + down(relu(up(norm(stream))) ** 2).
    """

    def __init__(self, layout: MlpLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.plain, self.gate_up = layout.gate is None, build.after_norm(tensors, "gate_up", layout.gate)
        self.down = build.summed(tensors, "down", centred=layout.centred_output)

    def __call__(self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None) -> Residual:
        """The stream [T, hidden], or `onto`, with this block of the stream added."""
        inner = self.gate_up(stream, batch)
        inner = Residual(squared_relu(inner.x)) if self.plain else inner
        return self.down(inner, batch, stream if onto is None else onto)


class MoeMlp:
    """stream + experts(norm(stream)) + shared(norm(stream)); router float32 [E, K]."""

    def __init__(self, layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.rule, self.epsilon = layout.experts.router, build.epsilon
        self.kernels, self.ranks = build.kernels, build.ranks
        correction = tensors.get("correction")
        self.correction = None if correction is None else correction.flatten()
        self.norm, self.router = tensors["norm"], tensors["router"]
        self.shared: tuple[AnyLinear, AnyLinear] | None = None
        if layout.shared:
            gate_up = build.after_norm(tensors, "gate_up", layout.shared.gate)
            self.shared = gate_up, build.matrix(tensors, "down", cut=True)
        self.shared_gate, self.plain = tensors.get("shared_gate"), layout.experts.plain
        self.router_bias = tensors.get("router_bias")
        self.experts = _experts(layout, tensors, build)

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, hidden] with this block added."""
        x = normed(stream, self.norm, self.epsilon, self.kernels)
        chosen, onto = self._route(x, batch.tile), stream
        if self.ranks is not None:  # the experts' parts together are one part of one sum
            onto = Residual(torch.zeros_like(stream.x), stream.squares)
        if self.shared is not None:
            gate_up, down = self.shared
            inner = gate_up(stream, batch)
            inner = Residual(squared_relu(inner.x)) if self.plain else inner
            if self.shared_gate is not None:
                inner = Residual(
                    (inner.x * self._logits(x, self.shared_gate, batch.tile).sum(1).sigmoid()).to(x.dtype)
                )
            onto = down(inner, batch, onto)
        whole = self.experts.onto(x, chosen, onto, batch)
        return whole if self.ranks is None else added(stream, self.ranks.sum(whole.x), self.kernels)

    def _route(self, x: Tensor, tile: int) -> Chosen:
        logits = self._logits(x, self.router, tile)
        if self.router_bias is not None:  # torch's form, whose logits are one part
            logits = logits + self.router_bias
        chosen: Chosen = self.kernels.route(logits, self.correction, self.rule)
        return chosen

    def _logits(self, x: Tensor, weight: Tensor, tile: int) -> Tensor:
        """Parts float32 [T, P, E] of x [T, K] times weight [E, K]."""
        return in_tiles(lambda rows: self.kernels.router_logits(rows, weight), x, tile)


def _experts(layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> Experts:
    """Of gate_up [E * 2 I, K] and down [E * K, I]."""
    if layout.experts.clamped is not None:
        return TorchExperts(biased_experts(layout, tensors, build).through)
    gate_up, down = (
        build.stacked(tensors, name, layout.experts.num_experts, cut=name == EXPERT_NAMES[1])
        for name in EXPERT_NAMES
    )
    if layout.experts.plain:
        return TorchExperts(lambda x, e: expert_linear(squared_relu(expert_linear(x, gate_up, e)), down, e))
    if build.kernels.facts.folds_norms:
        gate_up, down = (tiled(each) if isinstance(each, GroupedWeight) else each for each in (gate_up, down))
    if (native := build.kernels.native) is None:
        return RoutedExperts(gate_up, down, build.kernels)
    gated, plain = (
        native.pack_codes(each, gated=each is gate_up)
        if isinstance(each, GroupedWeight)
        else native.pack(plain_weight(each, build.dtype), gated=each is gate_up)
        for each in (gate_up, down)
    )
    return NativeExperts(gated, plain, native)
