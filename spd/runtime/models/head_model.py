"""A running part of a head that drafts: a token and the state before it in, the next state out.

The runner sees a model of one layer. Embedding and head are the target's own, or the head's where its copies
differ. What a head takes and does otherwise stands in its `HeadPart`; see `spd.formats.mtp` and
`spd.formats.eagle3` for the conventions, here in slots: the position of the token.
"""

from __future__ import annotations

from torch import Tensor

from spd.kernels.linear.head_input import PairNorms
from spd.kernels.linear.rms_norm import rms_norm
from spd.kernels.sampling.sampling import NEGATIVE_INFINITY
from spd.runtime.layers.base import ForwardBatch, LayerCache, ModelOutput, Residual
from spd.runtime.layers.linear import AnyLinear
from spd.runtime.layers.sharded import SummedLinear, squared
from spd.runtime.models.attention import Attention
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.decoder import Decoder, Parts, looked_up
from spd.runtime.models.weights import HeadRules


class HeadModel(Decoder):
    """A decoder whose `forward` needs a batch with states; logits are over the target's ids."""

    def __init__(self, rules: HeadRules, parts: Parts, build: LayerBuilder, ids: Tensor | None) -> None:
        """Tables: `projection` [hidden, 2 * hidden] over token and state, norms [hidden] of both.

        Or none of these, where attention reads both. ids int64, ascending: the target's of the head's own;
        None where they are the same.
        """
        super().__init__(parts, build)
        self.rules, self.ids, self.layer = rules, ids, self.layers[0]
        self.projection: AnyLinear | None = None
        if "projection" in parts.tables:
            self.projection = build.linear(parts.tables["projection"])
            self.token_norm, self.state_norm = parts.tables["token_norm"], parts.tables["state_norm"]
        else:
            assert isinstance(self.layer.attention, Attention) and self.layer.attention.pair_norms is not None
            self.token_norm, self.state_norm = self.layer.attention.pair_norms

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """The states that go on from the rows, [T, hidden]; writes the cache entries of every row."""
        assert batch.states is not None
        rules, projection = self.rules, self.projection
        ids, table = looked_up(self.embedding, batch.token_ids)
        norms = PairNorms(self.token_norm, self.state_norm, self.epsilon, rules.masked, rules.hidden_first)
        keeps_state = projection is None and not rules.normed_residual
        pairs, state = self.kernels.head_input(ids, table, batch, norms, keeps_state)
        rotary = self.rotary_rows(batch)
        if projection is not None:
            nothing = Residual(pairs.new_zeros(pairs.shape[0], self.hidden_size))
            stream = self.layer(projection(Residual(pairs), batch, nothing), rotary, batch, caches[0])
        else:
            if state is None:
                state = pairs[:, self.hidden_size :].contiguous()
            assert isinstance(self.layer.attention, Attention)
            onto = self._stream(state, self.layer.attention, batch)
            stream = self.layer.attention(Residual(pairs), rotary, batch, caches[0], onto)
            stream = self.layer.mlp(stream, batch)
        if not rules.recycles_normed or self.final_norm is None:
            return ModelOutput.of(stream.x)
        if projection is not None and stream.squares is None:  # in torch's form beside C's products too
            return ModelOutput.of(rms_norm(stream.x, self.final_norm, self.epsilon))
        return ModelOutput.of(self.normed(stream, self.final_norm))

    def _stream(self, state: Tensor, attention: Attention, batch: ForwardBatch) -> Residual:
        """The residual stream that begins with a state, with squares where sums over ranks go by them."""
        summed = isinstance(attention.output, SummedLinear)
        carries = batch.chunk_start is None and self.head.carries_squares and summed
        return squared(state, self.kernels) if carries else Residual(state)

    def _shown(self, states: Tensor) -> Tensor:
        """What the head reads of states [T, hidden]: normed, unless they are already or never are."""
        norm = self.final_norm
        return states if self.rules.recycles_normed or norm is None else rms_norm(states, norm, self.epsilon)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V], minus infinity for ids that the head does not know."""
        known = super().logits(hidden, tile)
        if self.ids is None:
            return known
        every = known.new_full((known.shape[0], self.vocab_size), NEGATIVE_INFINITY)
        return every.index_copy_(1, self.ids, known)
