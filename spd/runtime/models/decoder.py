"""The pre-norm decoder that every dense family shares: embed, layers, norm, head.

A functional forward over prebound tensors: no `nn.Module`, no hooks, nothing looked up by name
while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spd.kernels.rms_norm import rms_norm
from spd.runtime.layers.attention import Attention
from spd.runtime.layers.linear import Linear
from spd.runtime.layers.mlp import GatedMlp
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.models.base import ForwardBatch, LayerCache


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's parts and norm scales."""

    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: GatedMlp


class Decoder:
    """A causal decoder over prebound tensors; see `CausalModel`."""

    def __init__(
        self,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        head: Linear,
        rotary: RotaryTable,
        epsilon: float,
    ) -> None:
        self.embedding, self.layers, self.final_norm, self.head = embedding, layers, final_norm, head
        self.rotary, self.epsilon = rotary, epsilon
        first = layers[0].attention
        self.num_layers = len(layers)
        self.num_heads, self.num_kv_heads, self.head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        self.vocab_size, self.hidden_size = embedding.shape
        self.max_positions = rotary.cos.shape[0]

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Hidden states after the final norm, [T, hidden]; writes the KV of every row.

        Runs as many layers as there are caches: all of them, but for a probe of the arithmetic.
        """
        x = self.embedding[batch.token_ids]
        cos, sin = self.rotary.at(batch.positions)
        for layer, cache in zip(self.layers, caches, strict=False):
            x = x + layer.attention(rms_norm(x, layer.input_norm, self.epsilon), cos, sin, batch, cache)
            x = x + layer.mlp(rms_norm(x, layer.post_norm, self.epsilon), batch.tile)
        return rms_norm(x, self.final_norm, self.epsilon)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V]."""
        return self.head(hidden, tile).float()
