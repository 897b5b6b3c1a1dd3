"""Gemma 4's second block of a layer, and the layers' embeddings of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.linear.activation import GELU
from spd.kernels.linear.norm_gate import activate, rms_norm
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.expert_steps import Router, RouterLogits
from spd.runtime.models.layouts import Gemma4MlpLayout, MoeLayout
from spd.runtime.models.mlp import GatedMlp
from spd.runtime.models.moe import make_expert_weights, make_plain_experts


class LayerEmbeddings:
    """Embeddings of tokens for every layer: a row of a table, plus a projection of the token's
    embedding.
    """

    def __init__(self, tables: BlockTensors, build: LayerBuilder, layers: int) -> None:
        self.table = build.lookup_table(tables.take_matrix("embed_tokens_per_layer"))
        self.norm = tables.pop("per_layer_projection_norm")
        self.projection = build.projection(tables.take_matrix("per_layer_model_projection"))
        self.layers = layers
        self.width = self.norm.shape[0]
        self.epsilon = build.epsilon
        self.scale = float(torch.tensor(self.width**0.5, dtype=build.dtype))

    def __call__(self, ids: Tensor, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return [T, layers, P] of ids int64 [T] and the stream x [T, hidden] before the first
        layer.
        """
        projected = self.projection(Residual(x), batch) * x.shape[1] ** -0.5
        projected = projected.view(-1, self.layers, self.width)
        projected = rms_norm(projected, self.norm, self.epsilon)
        rows = self.table[ids] if isinstance(self.table, Tensor) else self.table.rows(ids)
        total: Tensor = projected + rows.view(projected.shape) * self.scale
        return total * math.sqrt(0.5)


class Gemma4Experts:
    """Routed experts of the stream before the block, with separate norms and a router."""

    def __init__(self, layout: MoeLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        self.epsilon = build.epsilon
        self.ranks = build.ranks
        self.experts = make_plain_experts(make_expert_weights(layout, tensors, build), build)
        logits = RouterLogits(tensors["router"], build.kernels)
        self.router = Router(logits, None, layout.experts.router, build.kernels)
        self.expert_scale = tensors["expert_scale"]
        self.router_norm = tensors["router_scale"] * layout.hidden_size**-0.5
        self.norm = tensors["experts_norm"]
        self.post_norm = tensors["post_experts_norm"]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return [T, hidden] of the stream x [T, hidden], normed."""
        ids, weights = self.router(rms_norm(x, self.router_norm, self.epsilon), batch.tile)
        chosen = (ids, weights * self.expert_scale[ids])
        rows = rms_norm(x, self.norm, self.epsilon)
        y = self.experts(rows, chosen, batch, Residual(torch.zeros_like(x))).x
        if self.ranks is not None:
            y = self.ranks.sum(y)
        return rms_norm(y, self.post_norm, self.epsilon)


@dataclass(frozen=True, eq=False)
class MlpAndExperts:
    """stream + norm(MLP of the stream + experts of the stream)."""

    mlp: GatedMlp
    experts: Gemma4Experts
    joint_norm: Tensor
    epsilon: float

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """Return the stream [T, hidden] with both added."""
        from_experts = self.experts(stream.x, batch)
        y = self.mlp(stream, batch, Residual(torch.zeros_like(stream.x))).x + from_experts
        return Residual(stream.x + rms_norm(y, self.joint_norm, self.epsilon))


class LayerEmbedding:
    """The gated embedding of the token that one layer adds to the stream."""

    def __init__(self, layout: Gemma4MlpLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        self.index = layout.index
        self.epsilon = build.epsilon
        self.gate = build.unnormed_projection(tensors, "per_layer_input_gate")
        self.projection = build.unnormed_projection(tensors, "per_layer_projection")
        self.norm = tensors["embedding_norm"]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the stream x [T, hidden] with the layer's embedding added."""
        assert batch.per_layer is not None
        gates = self.gate(Residual(x), batch)
        gated = activate(torch.cat((gates, batch.per_layer[:, self.index]), 1), GELU)
        y = self.projection(Residual(gated), batch)
        return x + rms_norm(y, self.norm, self.epsilon)


class Gemma4Mlp:
    """(stream + MLP and experts + the layer's embedding) * a number."""

    def __init__(self, layout: Gemma4MlpLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        self.adder = build.adder
        self.scalar = float(tensors["scalar"])
        mlp = GatedMlp(layout.mlp, tensors, build)
        self.mlp: GatedMlp | MlpAndExperts = mlp
        if layout.experts is not None:
            experts = Gemma4Experts(layout.experts, tensors, build)
            self.mlp = MlpAndExperts(mlp, experts, tensors["joint_norm"], build.epsilon)
        self.embedding: LayerEmbedding | None = None
        if layout.embedding_width:
            self.embedding = LayerEmbedding(layout, tensors, build)

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """Return the stream [T, hidden] with this block added."""
        x = self.mlp(stream, batch).x
        if self.embedding is not None:
            x = self.embedding(x, batch)
        return self.adder.scale(Residual(x, stream.square_sums), self.scalar)
