"""The blocks of a layer that take each row by itself.

The gated MLP, routed experts with a shared one, and Gemma 4's second block with the embeddings of its layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spd.kernels.experts.moe import ExpertWeights
from spd.kernels.linear.activation import GELU
from spd.kernels.linear.few_bits import GroupedWeight, tiled
from spd.kernels.linear.norm_gate import activate, rms_norm
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import AnyLinear, added, in_tiles, normed, squared
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.layouts import MlpLayout, MoeLayout, SideLayout

Chosen = tuple[Tensor, Tensor]
"""For each row the experts int64 [T, k] that it goes to, and their weights float32 [T, k]."""
EXPERT_NAMES = ("experts_gate_up", "experts_down")


class Experts:
    """All routed experts of a layer, of gate_up and down as they are stored: see `MoeLayout`."""

    def __init__(self, layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> None:
        count, facts, self.kernels = layout.experts.num_experts, layout.experts, build.kernels
        biases: list[Tensor] = []
        if facts.clamped is not None:  # rows of gates and of inputs stand in turn
            biases = [tensors.pop(f"{name}_bias") for name in EXPERT_NAMES]
            for name in EXPERT_NAMES if layout.turned else ():
                turned = tensors[name].view(count, -1, tensors[name].shape[1]).mT
                tensors[name] = turned.reshape(-1, turned.shape[2])
            width = 2 * facts.intermediate_size
            order = [*range(0, width, 2), *range(1, width, 2)]
            build.reorder(tensors, EXPERT_NAMES[0], order)
            biases[0] = biases[0][:, order].contiguous()
            if build.ranks is not None and build.ranks.rank:
                biases[1].zero_()  # of the ranks' sum it is a part once
        each = [
            build.stacked(tensors, name, count, cut=name == EXPERT_NAMES[1])
            for name in EXPERT_NAMES
        ]
        made: list[Any] = each
        if (native := build.kernels.native) is not None:
            made = [native.pack(each[0], gated=layout.act.gated), native.pack(each[1])]
        elif build.kernels.capabilities.folds_norms:
            made = [tiled(one) if isinstance(one, GroupedWeight) else one for one in each]
        self.weights = ExpertWeights(made[0], made[1], layout.act, *biases)

    def __call__(
        self, x: Tensor, chosen: Chosen, stream: Residual, batch: ForwardBatch
    ) -> Residual:
        """The stream [T, K] plus the weighed sum of what they make of rows x [T, K] that go to them."""
        case = (x, *chosen, self.weights)
        if stream.squares is not None or self.kernels.native is not None:
            return Residual(*self.kernels.experts(*case, stream.x))
        return Residual(
            stream.x + self.kernels.experts(*case, chunk=batch.chunk_start is not None)[0]
        )


class GatedMlp:
    """stream + down(act(gate_up(norm(stream)))), gate and up fused, or up alone."""

    def __init__(
        self, layout: MlpLayout, tensors: Tensors, build: LayerBuilder, shared: bool = False
    ) -> None:
        """shared: it stands beside experts, whose sum over ranks takes its part along."""
        self.gate_up = build.after_norm(tensors, "gate_up", layout.act)
        if shared:
            self.down = build.matrix(tensors, "down", cut=True)
        else:
            self.down = build.summed(
                tensors, "down", layout.post_epsilon, centred=layout.centred_output
            )

    def __call__(
        self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None
    ) -> Residual:
        """The stream [T, hidden], or `onto`, with this block of the stream added."""
        return self.down(self.gate_up(stream, batch), batch, stream if onto is None else onto)


class MoeMlp:
    """stream + experts(norm(stream)) + shared(norm(stream)); router float32 [E, K].

    Routed experts may work in a narrower space, between two projections.
    """

    def __init__(self, layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.rule, self.epsilon = layout.experts.router, build.epsilon
        self.kernels, self.ranks = build.kernels, build.ranks
        correction = tensors.get("correction")
        self.correction = None if correction is None else correction.flatten()
        self.norm, self.router = tensors["norm"], tensors["router"]
        self.shared = (
            GatedMlp(layout.shared, tensors, build, shared=True) if layout.shared else None
        )
        self.shared_gate = tensors.get("shared_gate")
        self.router_bias = tensors.get("router_bias")
        self.experts = Experts(layout, tensors, build)
        self.latent: tuple[AnyLinear, AnyLinear] | None = None
        if layout.experts.latent is not None:
            self.latent = build.matrix(tensors, "latent_in"), build.matrix(tensors, "latent_out")

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, hidden] with this block added."""
        x = normed(stream, self.norm, self.epsilon, self.kernels)
        chosen, onto = self._route(x, batch.tile), stream
        if self.ranks is not None:  # the experts' parts together are one part of one sum
            onto = Residual(torch.zeros_like(stream.x), stream.squares)
        if self.shared is not None:
            inner = self.shared.gate_up(stream, batch)
            if self.shared_gate is not None:
                factors = self._logits(x, self.shared_gate, batch.tile).sum(1).sigmoid()
                inner = Residual((inner.x * factors).to(x.dtype))
            onto = self.shared.down(inner, batch, onto)
        if self.latent is None:
            whole = self.experts(x, chosen, onto, batch)
        else:
            narrow = self.latent[0](Residual(x), batch).x
            made = self.experts(narrow, chosen, Residual(torch.zeros_like(narrow)), batch)
            whole = self.latent[1](made, batch, onto)
        return whole if self.ranks is None else added(stream, self.ranks.sum(whole.x), self.kernels)

    def _route(self, x: Tensor, tile: int) -> Chosen:
        logits = self._logits(x, self.router, tile)
        if self.router_bias is not None:
            logits[:, 0] += self.router_bias
        return self.kernels.route(logits, self.correction, self.rule)

    def _logits(self, x: Tensor, weight: Tensor, tile: int) -> Tensor:
        """Parts float32 [T, P, E] of x [T, K] times weight [E, K]."""
        return in_tiles(lambda rows: self.kernels.router_logits(rows, weight), x, tile)


class LayerEmbeddings:
    """What every layer adds of a token: a row of its own table, and a part of a product of the embedding."""

    def __init__(self, tables: Tensors, build: LayerBuilder, layers: int) -> None:
        self.table, self.norm = (
            tables.pop("embed_tokens_per_layer"),
            tables.pop("per_layer_projection_norm"),
        )
        self.projection = build.linear(tables.pop("per_layer_model_projection"))
        self.layers, self.width, self.epsilon = layers, self.norm.shape[0], build.epsilon
        self.scale = float(torch.tensor(self.width**0.5, dtype=build.dtype))

    def __call__(self, ids: Tensor, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, layers, P] of ids int64 [T] and the stream x [T, hidden] before the first layer."""
        own: Tensor = self.projection(Residual(x), batch).x * x.shape[1] ** -0.5
        own = rms_norm(own.view(-1, self.layers, self.width), self.norm, self.epsilon)
        both: Tensor = own + self.table[ids].view(own.shape) * self.scale
        return both * math.sqrt(0.5)


class SideExperts:
    """Routed experts of the stream before the block."""

    def __init__(self, layout: MoeLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.rule, self.epsilon = layout.experts.router, build.epsilon
        self.kernels, self.ranks = build.kernels, build.ranks
        self.experts = Experts(layout, tensors, build)
        self.router, self.expert_scale = tensors["router"], tensors["expert_scale"]
        self.router_norm = tensors["router_scale"] * layout.hidden_size**-0.5
        self.norms = tensors["before_norm"], tensors["behind_norm"]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] of the stream x [T, hidden], normed."""
        routed = rms_norm(x, self.router_norm, self.epsilon)
        logits = in_tiles(
            lambda rows: self.kernels.router_logits(rows, self.router), routed, batch.tile
        )
        ids, weights = self.kernels.route(logits, None, self.rule)
        chosen = ids, weights * self.expert_scale[ids]
        read, nothing = rms_norm(x, self.norms[0], self.epsilon), Residual(torch.zeros_like(x))
        made = self.experts(read, chosen, nothing, batch).x
        made = made if self.ranks is None else self.ranks.sum(made)
        return rms_norm(made, self.norms[1], self.epsilon)


class SideMlp:
    """(stream + MLP and experts + what the layer's embedding gives) * a number."""

    def __init__(self, layout: SideLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.index, self.epsilon, self.kernels = layout.index, build.epsilon, build.kernels
        self.mlp, self.scalar = GatedMlp(layout.mlp, tensors, build), float(tensors["scalar"])
        self.experts = (
            None if layout.experts is None else SideExperts(layout.experts, tensors, build)
        )
        self.joined_norm = tensors.get("joined_norm")
        self.side: tuple[AnyLinear, AnyLinear] | None = None
        if layout.per_layer:
            names = ("per_layer_input_gate", "per_layer_projection")
            gate, projection = (build.matrix(tensors, name) for name in names)
            self.side, self.side_norm = (gate, projection), tensors["side_norm"]

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, hidden] with this block added."""
        if self.experts is None or self.joined_norm is None:
            x = self.mlp(stream, batch).x
        else:
            beside = self.experts(stream.x, batch)
            made = self.mlp(stream, batch, Residual(torch.zeros_like(stream.x))).x + beside
            x = stream.x + rms_norm(made, self.joined_norm, self.epsilon)
        if self.side is not None:
            assert batch.per_layer is not None
            gate, projection = self.side
            opened = torch.cat((gate(Residual(x), batch).x, batch.per_layer[:, self.index]), 1)
            made = projection(Residual(activate(opened, GELU)), batch).x
            x = x + rms_norm(made, self.side_norm, self.epsilon)
        return (
            Residual(x * self.scalar)
            if stream.squares is None
            else squared(x, self.kernels, self.scalar)
        )
