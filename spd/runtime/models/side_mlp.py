"""Gemma 4's second block, and the embeddings that its layers have of their own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.experts.moe import FEW_ROWS, MANY_ROWS, by_expert
from spd.kernels.linear.rms_norm import rms_norm
from spd.kernels.linear.silu_mul import gelu_mul
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import AnyLinear, in_tiles
from spd.runtime.layers.sharded import squared
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.layouts import SideLayout
from spd.runtime.models.moe import EXPERT_NAMES, GatedMlp


class LayerEmbeddings:
    """What every layer adds of a token: a row of its own table, and a part of a product of the embedding."""

    def __init__(self, tables: Tensors, build: LayerBuilder, layers: int) -> None:
        self.table, self.norm = tables.pop("embed_tokens_per_layer"), tables.pop("per_layer_projection_norm")
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
    """Routed experts of the stream before the block, with gelu gates; torch's form alone."""

    def __init__(self, layout: SideLayout, tensors: Tensors, build: LayerBuilder) -> None:
        assert layout.experts is not None
        count, self.rule, self.epsilon = layout.experts.num_experts, layout.experts.router, build.epsilon
        self.kernels, self.ranks = build.kernels, build.ranks
        self.gate_up, self.down = (tensors[n].view(count, -1, tensors[n].shape[1]) for n in EXPERT_NAMES)
        self.router, self.expert_scale = tensors["router"], tensors["expert_scale"]
        self.router_norm = tensors["router_scale"] * layout.mlp.hidden_size**-0.5
        self.norms = tensors["before_norm"], tensors["behind_norm"]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] of the stream x [T, hidden], normed."""
        routed = rms_norm(x, self.router_norm, self.epsilon)
        logits = in_tiles(lambda rows: self.kernels.router_logits(rows, self.router), routed, batch.tile)
        ids, weights = self.kernels.route(logits, None, self.rule)
        weights = weights * self.expert_scale[ids]
        tile = FEW_ROWS if batch.chunk_start is None else MANY_ROWS
        made = by_expert(rms_norm(x, self.norms[0], self.epsilon), ids, weights, tile, self._through)
        made = made if self.ranks is None else self.ranks.sum(made)
        return rms_norm(made, self.norms[1], self.epsilon)

    def _through(self, rows: Tensor, expert: int) -> Tensor:
        return F.linear(gelu_mul(F.linear(rows, self.gate_up[expert])), self.down[expert])


class SideMlp:
    """(stream + MLP and experts + what the layer's embedding gives) * a number."""

    def __init__(self, layout: SideLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.index, self.epsilon, self.kernels = layout.index, build.epsilon, build.kernels
        self.mlp, self.scalar = GatedMlp(layout.mlp, tensors, build), float(tensors["scalar"])
        self.experts = None if layout.experts is None else SideExperts(layout, tensors, build)
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
            x = x + rms_norm(projection(Residual(gelu_mul(opened)), batch).x, self.side_norm, self.epsilon)
        return Residual(x * self.scalar) if stream.squares is None else squared(x, self.kernels, self.scalar)
