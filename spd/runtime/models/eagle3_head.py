"""A running EAGLE-3 head: a token and the state before it in, the next state out.

The runner sees a model of one layer, as of an MTP module. `AuxStates` makes the target's part of the
states; see `spd.formats.eagle3` for the conventions, here in slots: the position of the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.paged_attention import AttentionHeads
from spd.kernels.rms_norm import rms_norm
from spd.kernels.sampling import NEGATIVE_INFINITY
from spd.runtime.layers.attention import Attention
from spd.runtime.layers.linear import AnyHead, AnyLinear
from spd.runtime.layers.norm import normed
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.layers.sharded import AnyEmbedding, ShardedHead, SummedLinear, looked_up
from spd.runtime.models.base import ForwardBatch, LayerCache, ModelOutput, Residual
from spd.runtime.models.decoder import DecoderLayer


@dataclass(frozen=True)
class AuxStates:
    """The head's matrix [hidden, n * target hidden] over streams side by side, with the norms before it."""

    layers: Sequence[int]
    projection: AnyLinear
    whole_norm: Tensor | None
    norms: Sequence[Tensor]
    epsilon: float

    def fuse(self, streams: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
        """See `AuxReader`."""
        if self.norms:
            streams = [rms_norm(x, norm, self.epsilon) for x, norm in zip(streams, self.norms, strict=True)]
        together = torch.cat(list(streams), dim=-1)
        if self.whole_norm is not None:
            together = rms_norm(together, self.whole_norm, self.epsilon)
        return self.projection.product(together, batch)


@dataclass(frozen=True)
class HeadRules:
    """What heads do differently from each other."""

    normed_residual: bool = False
    """What is added to attention's output is the normed state."""
    recycles_normed: bool = False
    """What goes on is the layer's output after the final norm."""


class Eagle3Head:
    """See `CausalModel`. `forward` needs a batch with states; logits are over the target's ids."""

    varied_layers = 1

    def __init__(
        self,
        rules: HeadRules,
        norms: tuple[Tensor, Tensor, Tensor],
        layer: DecoderLayer,
        embedding: AnyEmbedding,
        head: AnyHead,
        ids: Tensor | None,
        rotary: RotaryTable,
        heads: AttentionHeads,
        epsilon: float,
        kernels: Kernels,
    ) -> None:
        """norms [hidden]: of token and state, and the final one; ids int64: the target's, ascending."""
        assert isinstance(layer.attention, Attention)
        self.rules, self.layer, self.attention = rules, layer, layer.attention
        self.token_norm, self.state_norm, self.final_norm = norms
        self.embedding, self.head, self.ids = embedding, head, ids
        self.rotary, self.heads, self.epsilon, self.kernels = rotary, heads, epsilon, kernels
        self.cache_shapes = [layer.cache_shapes]
        self.vocab_size, self.hidden_size = embedding.shape
        self.max_positions = rotary.max_positions
        self.part = head if isinstance(head, ShardedHead) and not head.carries_squares else None

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """The states that go on from the rows, [T, hidden]; writes the cache entries of every row."""
        assert batch.states is not None
        ids, table = looked_up(self.embedding, batch.token_ids)
        pairs, state = self.kernels.head_input(
            ids,
            table,
            batch.states.rings,
            batch.states.depth,
            batch.positions,
            batch.width,
            self.token_norm,
            self.state_norm,
            self.epsilon,
            -1,
            False,
            keeps_state=not self.rules.normed_residual,
        )
        if state is None:
            state = pairs[:, self.hidden_size :].contiguous()
        rotary = self.rotary.rows(batch.positions, gathered=self.kernels.name == "torch")
        stream = self.attention.of_pairs(pairs, self._stream(state, batch), rotary, batch, caches[0])
        stream = self.layer.mlp(stream, batch)
        if not self.rules.recycles_normed:
            return ModelOutput.of(stream.x)
        return ModelOutput.of(normed(stream, self.final_norm, self.epsilon, self.kernels))

    def _stream(self, state: Tensor, batch: ForwardBatch) -> Residual:
        """The residual stream that begins with a state, with squares where sums over ranks go by them."""
        if (
            batch.chunk_start is None
            and self.head.carries_squares
            and isinstance(self.attention.output, SummedLinear)
        ):
            every = torch.arange(state.shape[0], device=state.device)
            return Residual(*self.kernels.embed(every, state, None))
        return Residual(state)

    def products(self) -> Iterable[object]:
        """See `CausalModel`."""
        return *self.layer.products(), self.head

    def _shown(self, states: Tensor) -> Tensor:
        """What the head reads of states [T, hidden]."""
        return states if self.rules.recycles_normed else rms_norm(states, self.final_norm, self.epsilon)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V], minus infinity for ids that the head does not know."""
        known = self.head.logits(self._shown(hidden), tile)
        if self.ids is None:
            return known
        every = known.new_full((known.shape[0], self.vocab_size), NEGATIVE_INFINITY)
        return every.index_copy_(1, self.ids, known)

    def part_logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, ids of this rank]; see `CausalModel`."""
        assert self.part is not None
        return self.part.part(self._shown(hidden), tile)

    def sample(
        self, hidden: Tensor, usable_vocab: int, seed: Tensor, first: Tensor, step: int, temperature: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [T] and whether each is finite; see `CausalModel`."""
        return self.head.sample(self._shown(hidden), usable_vocab, seed, first, step, temperature)
