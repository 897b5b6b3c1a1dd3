"""One module of an MTP head: a token and the state before it in, the next state out.

The runner sees a model of one layer. Embedding and head are the target's own, or the head's where its
copies differ; see `spd.formats.mtp` for the conventions, all of them in slots: the position of the token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from spd.formats.mtp import MtpFamily
from spd.kernels.dispatch import Kernels
from spd.kernels.paged_attention import AttentionHeads
from spd.kernels.rms_norm import rms_norm
from spd.runtime.layers.linear import AnyHead, AnyLinear
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.layers.sharded import AnyEmbedding, ShardedHead, looked_up
from spd.runtime.models.base import ForwardBatch, LayerCache, ModelOutput, Residual
from spd.runtime.models.decoder import DecoderLayer


@dataclass(frozen=True)
class ModuleGlue:
    """What surrounds a module's decoder layer; norms [hidden], projection [hidden, 2 * hidden]."""

    token_norm: Tensor
    hidden_norm: Tensor
    projection: AnyLinear
    final_norm: Tensor | None


class MtpModule:
    """Module number `module` of a head; see `CausalModel`. `forward` needs a batch with states."""

    def __init__(
        self,
        family: MtpFamily,
        module: int,
        glue: ModuleGlue,
        layer: DecoderLayer,
        embedding: AnyEmbedding,
        head: AnyHead,
        rotary: RotaryTable,
        heads: AttentionHeads,
        epsilon: float,
        kernels: Kernels,
    ) -> None:
        self.family, self.glue, self.layer, self.rotary = family, glue, layer, rotary
        self.embedding, self.head, self.heads = embedding, head, heads
        self.epsilon, self.kernels = epsilon, kernels
        self.cache_shapes = [layer.cache_shapes]
        self.varied_layers = 1
        self.vocab_size, self.hidden_size = embedding.shape
        self.max_positions = rotary.max_positions
        self.part = head if isinstance(head, ShardedHead) and not head.carries_squares else None
        self.masked = next((p + module + 1 for p in range(2) if family.masked(p, module)), -1)
        """The slot whose embedding is zero; -1 where none is."""

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """The states that go on from the rows, [T, hidden]; writes the cache entries of every row."""
        assert batch.states is not None
        glue, family = self.glue, self.family
        ids, table = looked_up(self.embedding, batch.token_ids)
        pairs, _ = self.kernels.head_input(
            ids,
            table,
            batch.states.rings,
            batch.states.depth,
            batch.positions,
            batch.width,
            glue.token_norm,
            glue.hidden_norm,
            self.epsilon,
            self.masked,
            family.hidden_first,
        )
        nothing = Residual(pairs.new_zeros(pairs.shape[0], self.hidden_size))
        stream = glue.projection.onto(pairs, nothing, batch)
        rotary = self.rotary.rows(batch.positions, gathered=self.kernels.name == "torch")
        stream = self.layer(stream, rotary, batch, caches[0])
        if not family.recycles_normed or glue.final_norm is None:
            return ModelOutput.of(stream.x)
        if stream.squares is None:
            return ModelOutput.of(rms_norm(stream.x, glue.final_norm, self.epsilon))
        return ModelOutput.of(
            self.kernels.rms_norm_rows(stream.x, stream.squares, glue.final_norm, self.epsilon)
        )

    def products(self) -> Iterable[object]:
        """See `CausalModel`."""
        return *self.layer.products(), self.glue.projection, self.head

    def _shown(self, states: Tensor) -> Tensor:
        """What the head reads of states [T, hidden]: normed, unless they are already or never are."""
        norm = self.glue.final_norm
        return states if self.family.recycles_normed or norm is None else rms_norm(states, norm, self.epsilon)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V]."""
        return self.head.logits(self._shown(hidden), tile)

    def part_logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, ids of this rank]; see `CausalModel`."""
        assert self.part is not None
        return self.part.part(self._shown(hidden), tile)

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [T] and whether each is finite; see `CausalModel`."""
        return self.head.sample(self._shown(hidden), usable_vocab, seed, first, step, temperature)
