"""A block of routed experts, with or without a shared expert."""

from __future__ import annotations

from torch import Tensor

from spd.kernels.experts.moe import ExpertWeights
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import normalize_stream
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.builder import LayerBuilder
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

    def __init__(self, layout: MoeLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        self.epsilon = build.epsilon
        self.kernels = build.kernels
        self.norm = tensors["norm"]
        self.router = _make_router(layout, tensors, build)
        self.shared = _make_shared_expert(layout, tensors, build)
        self.experts = _make_routed_experts(layout, tensors, build)
        self.total = BlockTotal()
        if build.ranks is not None:
            self.total = RanksTotal(build.ranks, build.adder)

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """Return the stream [T, hidden] with this block added."""
        x = normalize_stream(stream, self.norm, self.epsilon, self.kernels)
        chosen = self.router(x, batch.tile)
        total = self.total.begin(stream)
        if self.shared is not None:
            total = self.shared(stream, x, batch, total)
        total = self.experts(x, chosen, batch, total)
        return self.total.end(stream, total)


def _make_router(layout: MoeLayout, tensors: BlockTensors, build: LayerBuilder) -> Router:
    """Return the router of a layer."""
    kernels = build.kernels
    logits = RouterLogits(tensors["router"], kernels)
    if layout.has_biases:
        logits = BiasedLogits(tensors["router"], kernels, tensors["router_bias"])
    correction = tensors.get("correction")
    if correction is not None:
        correction = correction.flatten()
    return Router(logits, correction, layout.experts.router, kernels)


def _make_shared_expert(
    layout: MoeLayout, tensors: BlockTensors, build: LayerBuilder
) -> SharedExpert | None:
    """Return the expert that every row goes through, or None.

    Ranks sum its results with the block's.
    """
    if layout.shared is None:
        return None
    gate_up = build.normed_projection(tensors, "gate_up", layout.shared.act)
    down = build.partial_projection(tensors, "down", cut=True)
    if "shared_gate" not in tensors:
        return SharedExpert(gate_up, down)
    return GatedSharedExpert(gate_up, down, RouterLogits(tensors["shared_gate"], build.kernels))


def _make_routed_experts(
    layout: MoeLayout, tensors: BlockTensors, build: LayerBuilder
) -> RoutedExperts:
    """Return the routed experts, and how their sum is added to the stream."""
    weights = make_expert_weights(layout, tensors, build)
    if layout.experts.latent_width is not None:
        return LatentExperts(
            build.unnormed_projection(tensors, "latent_in"),
            make_plain_experts(weights, build),
            build.partial_projection(tensors, "latent_out"),
        )
    if build.kernels.capabilities.folds_norms:
        return WindowedSum(weights, build.kernels)
    return make_plain_experts(weights, build)


def make_plain_experts(weights: ExpertWeights, build: LayerBuilder) -> RoutedExperts:
    """Return experts whose sum is added to a stream without sums of squares."""
    if build.kernels.native is not None:
        return FusedSum(weights, build.kernels)
    return SeparateSum(weights, build.kernels)


def make_expert_weights(
    layout: MoeLayout, tensors: BlockTensors, build: LayerBuilder
) -> ExpertWeights:
    """Return all experts of a layer, from gate_up and down as they are stored: see `MoeLayout`."""
    count = layout.experts.num_experts
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    if layout.has_biases:
        gate_up_bias = tensors.pop("experts_gate_up_bias")
        down_bias = tensors.pop("experts_down_bias")
        if layout.is_transposed:
            _transpose_each(tensors, "experts_gate_up", count)
            _transpose_each(tensors, "experts_down", count)
        # Rows of gates and of inputs alternate.
        width = 2 * layout.experts.intermediate_size
        order = [*range(0, width, 2), *range(1, width, 2)]
        build.reorder(tensors, "experts_gate_up", order)
        gate_up_bias = gate_up_bias[:, order].contiguous()
        if build.ranks is not None and build.ranks.rank:
            # The sum over ranks takes the bias of one rank.
            down_bias.zero_()
    gate_up = build.expert_matrices(tensors, "experts_gate_up", count, gated=layout.act.gated)
    down = build.expert_matrices(tensors, "experts_down", count, cut=True)
    return ExpertWeights(
        gate_up=gate_up, down=down, act=layout.act, gate_up_bias=gate_up_bias, down_bias=down_bias
    )


def _transpose_each(tensors: BlockTensors, name: str, count: int) -> None:
    """Replace the matrices [in, out] of `count` experts by copies [out, in], in `tensors`."""
    matrices = tensors[name].view(count, -1, tensors[name].shape[1]).mT
    tensors[name] = matrices.reshape(-1, matrices.shape[2])
