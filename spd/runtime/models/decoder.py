"""The pre-norm decoder that every dense family shares: embed, layers, norm, head.

A functional forward over prebound tensors: no `nn.Module`, no hooks, nothing looked up by name
while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.rms_norm import rms_norm
from spd.runtime.layers.attention import Attention
from spd.runtime.layers.linear import AnyLinear, Linear, SkinnyLinear
from spd.runtime.layers.mlp import GatedMlp
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.models.base import ForwardBatch, LayerCache, Residual


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's two blocks, each with its norm before and its sum after."""

    attention: Attention
    mlp: GatedMlp

    def products(self) -> tuple[AnyLinear, ...]:
        """The layer's matrices in the order in which they run."""
        return self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down


class Decoder:
    """A causal decoder over prebound tensors; see `CausalModel`."""

    def __init__(
        self,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        head: Linear | SkinnyLinear,
        rotary: RotaryTable,
        epsilon: float,
        kernels: Kernels,
    ) -> None:
        self.embedding, self.layers, self.final_norm, self.head = embedding, layers, final_norm, head
        self.rotary, self.epsilon, self.kernels = rotary, epsilon, kernels
        first = layers[0].attention
        self.num_layers = len(layers)
        self.num_heads, self.num_kv_heads, self.head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        self.vocab_size, self.hidden_size = embedding.shape
        self.max_positions = rotary.max_positions

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Hidden states after the final norm, [T, hidden]; writes the KV of every row.

        Runs as many layers as there are caches: all of them, but for a probe of the arithmetic.
        """
        rotary = self.rotary.rows(batch.positions, gathered=self.kernels.name == "torch")
        stream = self._embed(batch)
        for layer, cache in zip(self.layers, caches, strict=False):
            stream = layer.attention(stream, rotary, batch, cache)
            stream = layer.mlp(stream, batch)
        if stream.squares is None:
            return rms_norm(stream.x, self.final_norm, self.epsilon)
        hidden: Tensor = self.kernels.rms_norm_rows(stream.x, stream.squares, self.final_norm, self.epsilon)
        return hidden

    def _embed(self, batch: ForwardBatch) -> Residual:
        if isinstance(self.head, SkinnyLinear) and batch.chunk_start is None:
            return Residual(*self.kernels.embed(batch.token_ids, self.embedding))
        return Residual(self.embedding[batch.token_ids])

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V]."""
        if isinstance(self.head, SkinnyLinear):
            scores: Tensor = self.kernels.head_logits(hidden, self.head.weight)
            return scores
        return self.head(hidden, tile).float()

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [T] and whether each is finite; see `CausalModel`."""
        if not isinstance(self.head, SkinnyLinear):
            return None
        drawn: tuple[Tensor, Tensor] = self.kernels.head_sample(
            hidden, self.head.weight, usable_vocab, seed, first, step, temperature
        )
        return drawn
