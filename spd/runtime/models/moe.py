"""A block of routed experts, with a shared one perhaps."""

from __future__ import annotations

from torch import Tensor

from spd.kernels.experts.moe import ExpertWeights
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import normed
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.expert_steps import (
    BiasedLogits,
    BlockTotal,
    FusedSum,
    GatedSharedExpert,
    LatentExperts,
    RanksTotal,
    RoutedExperts,
    Router,
    RouterLogits,
    SeparateSum,
    SharedExpert,
    WindowedSum,
)
from spd.runtime.models.layouts import MoeLayout


class MoeMlp:
    """stream + experts(norm(stream)) + shared(norm(stream)); router float32 [E, K]."""

    def __init__(self, layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.epsilon = build.epsilon
        self.kernels = build.kernels
        self.norm = tensors["norm"]
        self.router = _router(layout, tensors, build)
        self.shared = _shared_expert(layout, tensors, build)
        self.experts = _routed_experts(layout, tensors, build)
        self.total = BlockTotal()
        if build.ranks is not None:
            self.total = RanksTotal(build.ranks, build.sums)

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """Return the stream [T, hidden] with this block added."""
        x = normed(stream, self.norm, self.epsilon, self.kernels)
        chosen = self.router(x, batch.tile)
        total = self.total.begin(stream)
        if self.shared is not None:
            total = self.shared(stream, x, batch, total)
        total = self.experts(x, chosen, batch, total)
        return self.total.end(stream, total)


def _router(layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> Router:
    """Return what chooses experts."""
    kernels = build.kernels
    logits = RouterLogits(tensors["router"], kernels)
    if layout.has_biases:
        logits = BiasedLogits(tensors["router"], kernels, tensors["router_bias"])
    correction = tensors.get("correction")
    if correction is not None:
        correction = correction.flatten()
    return Router(logits, correction, layout.experts.router, kernels)


def _shared_expert(layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> SharedExpert | None:
    """Return the expert that every row goes through, if there is one; sums over ranks take its part along."""
    if layout.shared is None:
        return None
    gate_up = build.after_norm(tensors, "gate_up", layout.shared.act)
    down = build.part_of_sum(tensors, "down", cut=True)
    if "shared_gate" not in tensors:
        return SharedExpert(gate_up, down)
    return GatedSharedExpert(gate_up, down, RouterLogits(tensors["shared_gate"], build.kernels))


def _routed_experts(layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> RoutedExperts:
    """Return the routed experts, and how their sum is added to the stream."""
    weights = expert_weights(layout, tensors, build)
    if layout.experts.latent_width is not None:
        experts = alone(weights, build)
        narrow = build.matrix(tensors, "latent_in")
        return LatentExperts(narrow, experts, build.part_of_sum(tensors, "latent_out"))
    if build.kernels.capabilities.folds_norms:
        return WindowedSum(weights, build.kernels)
    return alone(weights, build)


def alone(weights: ExpertWeights, build: LayerBuilder) -> RoutedExperts:
    """Return experts whose sum is added to a stream that carries no squares."""
    if build.kernels.native is not None:
        return FusedSum(weights, build.kernels)
    return SeparateSum(weights, build.kernels)


def expert_weights(layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> ExpertWeights:
    """Return all experts of a layer, of gate_up and down as they are stored: see `MoeLayout`."""
    count = layout.experts.num_experts
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    if layout.has_biases:
        gate_up_bias = tensors.pop("experts_gate_up_bias")
        down_bias = tensors.pop("experts_down_bias")
        if layout.is_transposed:
            _transpose_each(tensors, "experts_gate_up", count)
            _transpose_each(tensors, "experts_down", count)
        # Rows of gates and of inputs stand in turn.
        width = 2 * layout.experts.intermediate_size
        order = [*range(0, width, 2), *range(1, width, 2)]
        build.reorder(tensors, "experts_gate_up", order)
        gate_up_bias = gate_up_bias[:, order].contiguous()
        if build.ranks is not None and build.ranks.rank:
            # The bias is a part of the sum over ranks once.
            down_bias.zero_()
    gate_up = build.experts_matrix(tensors, "experts_gate_up", count, gated=layout.act.gated)
    down = build.experts_matrix(tensors, "experts_down", count, cut=True)
    return ExpertWeights(gate_up, down, layout.act, gate_up_bias, down_bias)


def _transpose_each(tensors: Tensors, name: str, count: int) -> None:
    """Turn matrices that stand inputs before outputs, in memory of their own."""
    matrices = tensors[name].view(count, -1, tensors[name].shape[1]).mT
    tensors[name] = matrices.reshape(-1, matrices.shape[2])
