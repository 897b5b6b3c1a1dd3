"""The pre-norm decoder that every family shares: embed, layers, norm, head.

A functional forward over prebound tensors: no `nn.Module`, no hooks, nothing looked up by name
while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.paged_attention import AttentionHeads
from spd.runtime.layers.linear import AnyHead, AnyLinear
from spd.runtime.layers.norm import normed
from spd.runtime.layers.rotary import RotaryRows, RotaryTable
from spd.runtime.layers.sharded import AnyEmbedding, ShardedHead, looked_up
from spd.runtime.models.base import AuxReader, ForwardBatch, LayerCache, ModelOutput, Residual
from spd.runtime.models.destinations import Shape


class AttentionBlock(Protocol):
    """A layer's first block: it writes the rows' cache entries, then reads the pages."""

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The stream [T, hidden] with this block added."""
        ...

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run."""
        ...


class MlpBlock(Protocol):
    """A layer's second block: each row by itself."""

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, hidden] with this block added."""
        ...

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run."""
        ...


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's two blocks, each with its norm before and its sum after, and its cache's shapes."""

    attention: AttentionBlock
    mlp: MlpBlock
    cache_shapes: tuple[Shape, ...]

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The stream [T, hidden] with both blocks added; writes the rows' cache entries."""
        return self.mlp(self.attention(stream, rotary, batch, cache), batch)

    def products(self) -> tuple[AnyLinear, ...]:
        """The layer's matrices in the order in which they run."""
        return *self.attention.products(), *self.mlp.products()


class Decoder:
    """A causal decoder over prebound tensors; see `CausalModel`.

    Its parts are there for heads that share them: `embedding`, `head`, `final_norm`, `rotary`.
    """

    def __init__(
        self,
        embedding: AnyEmbedding,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        head: AnyHead,
        rotary: RotaryTable,
        heads: AttentionHeads,
        epsilon: float,
        kernels: Kernels,
        *,
        embedding_scale: float | None = None,
        logit_softcap: float | None = None,
    ) -> None:
        self.embedding, self.layers, self.final_norm, self.head = embedding, layers, final_norm, head
        self.rotary, self.heads, self.epsilon, self.kernels = rotary, heads, epsilon, kernels
        self.embedding_scale, self.logit_softcap = embedding_scale, logit_softcap
        self.cache_shapes = [layer.cache_shapes for layer in layers]
        kinds = [(type(layer.attention), type(layer.mlp)) for layer in layers]
        self.varied_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
        self.vocab_size, self.hidden_size = embedding.shape
        self.max_positions = rotary.max_positions
        self.reader: AuxReader | None = None
        """The head that reads the streams between layers, once there is one."""
        self.part: ShardedHead | None = None
        if isinstance(head, ShardedHead) and logit_softcap is None and not head.carries_squares:
            self.part = head

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """Hidden states after the final norm, [T, hidden]; writes the cache entries of every row.

        Runs as many layers as there are caches: all of them, but for a probe of the arithmetic, which
        makes nothing for a head.
        """
        rotary = self.rotary_rows(batch)
        stream = self._embed(batch)
        reader = self.reader if batch.for_head and len(caches) >= len(self.layers) else None
        streams = {0: stream.x} if reader is not None and 0 in reader.layers else {}
        for passed, (layer, cache) in enumerate(zip(self.layers, caches, strict=False), 1):
            stream = layer(stream, rotary, batch, cache)
            if reader is not None and passed in reader.layers:
                streams[passed] = stream.x
        hidden = self.normed(stream, self.final_norm)
        if reader is None:
            return ModelOutput.of(hidden)
        return ModelOutput(hidden, reader.fuse([streams[passed] for passed in reader.layers], batch))

    def products(self) -> Iterable[object]:
        """See `CausalModel`."""
        yield from (product for layer in self.layers for product in layer.products())
        yield self.head

    def rotary_rows(self, batch: ForwardBatch) -> RotaryRows:
        """cos and sin for a batch's rows, as the layers want them."""
        return self.rotary.rows(batch.positions, gathered=self.kernels.name == "torch")

    def normed(self, stream: Residual, weight: Tensor) -> Tensor:
        """The stream [T, hidden] normalised with scales weight [hidden]."""
        return normed(stream, weight, self.epsilon, self.kernels)

    def _embed(self, batch: ForwardBatch) -> Residual:
        ids, table = looked_up(self.embedding, batch.token_ids)
        if self.head.carries_squares and batch.chunk_start is None:
            return Residual(*self.kernels.embed(ids, table, self.embedding_scale))
        x = table[ids]
        return Residual(x if self.embedding_scale is None else x * self.embedding_scale)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V]."""
        scores = self.head.logits(hidden, tile)
        if self.logit_softcap is None:
            return scores
        return (scores / self.logit_softcap).tanh_() * self.logit_softcap

    def part_logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, ids of this rank]; see `CausalModel`."""
        assert self.part is not None
        return self.part.part(hidden, tile)

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [T] and whether each is finite; see `CausalModel`. Capped logits are left to the sampler."""
        if self.logit_softcap is not None:
            return None
        return self.head.sample(hidden, usable_vocab, seed, first, step, temperature)
