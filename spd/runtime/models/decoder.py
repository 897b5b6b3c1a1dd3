"""The pre-norm decoder that every family shares: embed, layers, norm, head.

A functional forward over prebound tensors: no `nn.Module`, no hooks, no names looked up while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spd.formats.model_config import ModelConfig
from spd.kernels.attention.paged_attention import AttentionHeads
from spd.kernels.linear.head_input import PairNorms
from spd.kernels.linear.norm_gate import rms_norm
from spd.kernels.linear.skinny_linear import Draw
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.sampling.sampling import NEGATIVE_INFINITY
from spd.runtime.layers import linear as products
from spd.runtime.layers import skinny_linear as skinny
from spd.runtime.layers.base import ForwardBatch, LayerCache, ModelOutput, Residual
from spd.runtime.layers.rotary import RotaryRows, RotaryTable
from spd.runtime.models import layouts
from spd.runtime.models.attention import Attention, LatentAttention
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.builder import LayerBuilder, LayerTensors, Tensors
from spd.runtime.models.gated_delta import GatedDelta, ShortConv
from spd.runtime.models.mlp import GatedMlp
from spd.runtime.models.moe import MoeMlp
from spd.runtime.models.recurrent_layouts import ConvLayout, DeltaLayout, ScanLayout
from spd.runtime.models.side_mlp import LayerEmbeddings, SideMlp
from spd.runtime.models.weights import HeadRules, ModelLayout

AttentionBlock = Attention | LatentAttention | GatedDelta | ShortConv | Callable[..., Residual]
"""A layer's first block: it writes the rows' cache entries, then reads the pages; or a state and rings."""
MlpBlock = GatedMlp | MoeMlp | SideMlp | Callable[..., Residual]
"""A layer's second block: each row by itself."""


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's two blocks, each with its norm before and its sum after."""

    attention: AttentionBlock
    mlp: MlpBlock
    layout: layouts.MixerLayout
    """The layout of the first block: it says what the cache holds."""

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """Return the stream [T, hidden] with both blocks added; the rows' cache entries are written."""
        return self.mlp(self.attention(stream, rotary, batch, cache), batch)


@dataclass(frozen=True)
class ParallelLayer(DecoderLayer):
    """A layer whose blocks both read the stream before it."""

    mlp: GatedMlp

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """Return the stream [T, hidden] with both blocks added; the rows' cache entries are written."""
        return self.mlp(stream, batch, self.attention(stream, rotary, batch, cache))


BLOCKS: dict[type, Any] = {
    GqaLayout: Attention,
    layouts.LatentLayout: LatentAttention,
    DeltaLayout: GatedDelta,
    ScanLayout: GatedDelta,
    ConvLayout: ShortConv,
    layouts.MlpLayout: GatedMlp,
    layouts.MoeLayout: MoeMlp,
    layouts.SideLayout: SideMlp,
    layouts.NoLayout: lambda *_: lambda stream, *given: stream,
}
"""What runs a block, by its description: made of that, of its tensors and of a builder."""


def build_layer(
    layout: layouts.LayerLayout, tensors: LayerTensors, build: LayerBuilder
) -> DecoderLayer:
    """Return one layer. The tensors belong to it: they are changed, or packed and worthless."""
    if layout.parallel:
        tensors[1]["norm"] = tensors[0]["norm"]
    attention = BLOCKS[type(layout.attention)](layout.attention, tensors[0], build)
    mlp = BLOCKS[type(layout.mlp)](layout.mlp, tensors[1], build)
    if layout.parallel:
        return ParallelLayer(attention, mlp, layout.attention)
    return DecoderLayer(attention, mlp, layout.attention)


class AuxStates:
    """What makes a head's states of the streams between its target's layers.

    A matrix [hidden, n * target hidden] over the streams after so many of the target's layers, side by side,
    with the norms before it.
    """

    def __init__(
        self, config: ModelConfig, tables: Tensors, build: LayerBuilder, layers: int
    ) -> None:
        """Of the head's tables, from which `fuse` is taken away; layers: how many its target has."""
        facts = config.eagle3
        assert facts is not None
        self.layers = facts.aux_layers(layers)
        self.epsilon = config.rms_norm_eps
        self.norms = (
            tables["aux_norms"].chunk(facts.num_aux_layers) if "aux_norms" in tables else ()
        )
        self.whole_norm = tables.get("aux_norm")
        self.projection = build.projection(tables.pop("fuse"))

    def fuse(self, streams: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
        """States [T, the head's hidden] of streams [T, hidden], one for each of `layers`."""
        if self.norms:
            streams = [
                rms_norm(x, norm, self.epsilon) for x, norm in zip(streams, self.norms, strict=True)
            ]
        together = torch.cat(list(streams), dim=-1)
        if self.whole_norm is not None:
            together = rms_norm(together, self.whole_norm, self.epsilon)
        return self.projection(Residual(together), batch)


@dataclass(frozen=True)
class Parts:
    """What a decoder or a part of a head is put together of, and the other tables outside its layers."""

    tables: Tensors
    embedding: products.AnyEmbedding
    head: products.AnyHead
    layers: list[DecoderLayer]
    rotary: RotaryTable
    heads: tuple[AttentionHeads, ...]  # of every shape that layers have
    layout: ModelLayout
    logit_softcap: float | None


def looked_up(embedding: products.AnyEmbedding, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and a table in which they can be looked up by a kernel: the table itself where it is whole."""
    if isinstance(embedding, Tensor):
        return ids, embedding
    return torch.arange(ids.shape[0], device=ids.device), embedding.rows(ids)


class Decoder:
    """A causal decoder over prebound tensors: what the runner drives.

    Its parts are there for heads that share them: `embedding`, `head`, `final_norm`, `rotary`.
    """

    def __init__(self, parts: Parts, build: LayerBuilder) -> None:
        self.embedding = parts.embedding
        self.layers = parts.layers
        self.head = parts.head
        self.final_norm = parts.tables.get("final_norm")
        self.rotary = parts.rotary
        self.heads = parts.heads
        self.layer_embeddings: LayerEmbeddings | None = None
        if "embed_tokens_per_layer" in parts.tables:
            self.layer_embeddings = LayerEmbeddings(parts.tables, build, len(parts.layers))
        self.epsilon = build.epsilon
        self.kernels = build.kernels
        self.products = [*build.products, self.head]
        self.layout = parts.layout
        self.logit_softcap = parts.logit_softcap
        scale = parts.layout.embedding_scale
        self.embedding_scale = (
            None if scale is None else float(torch.tensor(scale, dtype=build.dtype))
        )
        self.caches = [layer.layout for layer in self.layers]
        """For each layer, what tells the shapes of its cache."""
        self.reads = [each.reads if isinstance(each, GqaLayout) else None for each in self.caches]
        """For each layer the one whose cache it reads; None: its own."""
        kinds = [(layer.layout, type(layer.mlp)) for layer in self.layers]
        self.varied_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
        """How many of the first layers there must be for one of every kind."""
        self.vocab_size, self.hidden_size = self.embedding.shape
        self.state_size = self.hidden_size  # elements of a state that a head reads
        self.max_positions = self.rotary.max_positions
        self.reader: AuxStates | None = None
        """Of the head that reads the streams between layers, once there is one."""

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """Hidden states after the final norm, [T, hidden]; writes the cache entries of every row.

        Runs as many layers as there are caches: all of them, but for a probe of the arithmetic, which
        makes nothing for a head.
        """
        rotary = self.rotary_rows(batch)
        stream = self._embed(batch)
        if self.layer_embeddings is not None:
            batch = replace(
                batch, per_layer=self.layer_embeddings(batch.token_ids, stream.x, batch)
            )
        reader = self.reader if len(caches) >= len(self.layers) else None
        streams = {0: stream.x} if reader is not None and 0 in reader.layers else {}
        for passed, (layer, own, source) in enumerate(
            zip(self.layers, caches, self.reads, strict=False), 1
        ):
            stream = layer(stream, rotary, batch, own if source is None else caches[source])
            if reader is not None and passed in reader.layers:
                streams[passed] = stream.x
        assert self.final_norm is not None
        hidden = self.normed(stream, self.final_norm)
        if reader is None:
            return ModelOutput.of(hidden)
        unit = self.layout.residual_scale
        read = [
            streams[passed] if unit == 1.0 else streams[passed] * unit for passed in reader.layers
        ]
        return ModelOutput(hidden, reader.fuse(read, batch))

    def settle(self, segments: Segments, caches: list[LayerCache]) -> None:
        """Write the states of recurrent layers as of one row, which is fed again: it is nothing yet."""
        for layer, cache in zip(self.layers, caches, strict=True):
            if isinstance(layer.attention, GatedDelta):
                layer.attention.settle(cache, segments)

    def rotary_rows(self, batch: ForwardBatch) -> RotaryRows:
        """cos and sin for a batch's rows, as the layers want them."""
        return self.rotary.rows(batch.positions, gathered=self.kernels.capabilities.gathers_rotary)

    def normed(self, stream: Residual, weight: Tensor) -> Tensor:
        """The stream [T, hidden] normalised with scales weight [hidden]."""
        return products.normed(stream, weight, self.epsilon, self.kernels)

    def _embed(self, batch: ForwardBatch) -> Residual:
        ids, table = looked_up(self.embedding, batch.token_ids)
        if self.layout.centred_stream or self.layout.normed_embedding:
            wide = table[ids].float()
            bare = self.layout.normed_embedding
            wide = (
                products.unscaled_norm(wide, self.epsilon)
                if bare
                else wide - wide.mean(-1, keepdim=True)
            )
            table = wide.to(table.dtype)
            ids = torch.arange(ids.shape[0], device=ids.device)
        if self.head.carries_squares and batch.chunk_start is None:
            return Residual(*self.kernels.embed(ids, table, self.embedding_scale))
        x = table[ids]
        return Residual(x if self.embedding_scale is None else x * self.embedding_scale)

    def _shown(self, hidden: Tensor) -> Tensor:
        """What the head reads of hidden [T, hidden]."""
        return hidden

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V]."""
        scores = self.head.logits(self._shown(hidden), tile)
        if self.logit_softcap is None:
            return scores
        return (scores / self.logit_softcap).tanh_() * self.logit_softcap

    def sample(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return what a head draws that can, see `SkinnyLinear`."""
        assert isinstance(self.head, skinny.SkinnyLinear)
        return self.head.sample(self._shown(hidden), draw)


class HeadModel(Decoder):
    """A running part of a head that drafts: a token and the state before it in, the next state out.

    The runner sees a model of one layer. Embedding and head are the target's own, or the head's where its
    copies differ. What a head takes and does otherwise stands in its `HeadPart`; see `formats.mtp_layout` and
    `spd.formats.eagle3` for the conventions, here in slots: the position of the token.

    A decoder whose `forward` needs a batch with states; logits are over the target's ids."""

    def __init__(
        self, rules: HeadRules, parts: Parts, build: LayerBuilder, ids: Tensor | None
    ) -> None:
        """Tables: `projection` [hidden, 2 * hidden] over token and state, norms [hidden] of both.

        Or none of these, where attention reads both. ids int64, ascending: the target's of the head's own;
        None where they are the same.
        """
        super().__init__(parts, build)
        self.rules = rules
        self.ids = ids
        self.layer = self.layers[0]
        self.projection: products.ResidualProjection | None = None
        if "projection" in parts.tables:
            self.projection = build.residual_projection(parts.tables["projection"])
            self.token_norm = parts.tables["token_norm"]
            self.state_norm = parts.tables["state_norm"]
        else:
            assert (
                isinstance(self.layer.attention, Attention)
                and self.layer.attention.pair_norms is not None
            )
            self.token_norm, self.state_norm = self.layer.attention.pair_norms

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """The states that go on from the rows, [T, hidden]; writes the cache entries of every row."""
        assert batch.states is not None
        rules = self.rules
        projection = self.projection
        ids, table = looked_up(self.embedding, batch.token_ids)
        norms = PairNorms(
            self.token_norm, self.state_norm, self.epsilon, rules.masked, rules.hidden_first
        )
        keeps_state = projection is None and not rules.normed_residual
        pairs, state = self.kernels.head_input(ids, table, batch, norms, keeps_state)
        rotary = self.rotary_rows(batch)
        if projection is not None:
            nothing = Residual(pairs.new_zeros(pairs.shape[0], self.hidden_size))
            stream = self.layer(projection(pairs, batch, nothing), rotary, batch, caches[0])
        else:
            if state is None:
                state = pairs[:, self.hidden_size :].contiguous()
            assert isinstance(self.layer.attention, Attention)
            onto = self._stream(state, self.layer.attention, batch)
            stream = self.layer.attention(Residual(pairs), rotary, batch, caches[0], onto)
            stream = self.layer.mlp(stream, batch)
        if not rules.recycles_normed or self.final_norm is None:
            return ModelOutput.of(stream.x)
        if (
            projection is not None and stream.squares is None
        ):  # in torch's form beside C's products too
            return ModelOutput.of(rms_norm(stream.x, self.final_norm, self.epsilon))
        return ModelOutput.of(self.normed(stream, self.final_norm))

    def _stream(self, state: Tensor, attention: Attention, batch: ForwardBatch) -> Residual:
        """The residual stream that begins with a state, with squares where sums over ranks go by them."""
        summed = isinstance(attention.output, products.SummedLinear)
        carries = batch.chunk_start is None and self.head.carries_squares and summed
        return products.squared(state, self.kernels) if carries else Residual(state)

    def _shown(self, states: Tensor) -> Tensor:
        """What the head reads of states [T, hidden]: normed, unless they are already or never are."""
        norm = self.final_norm
        return (
            states
            if self.rules.recycles_normed or norm is None
            else rms_norm(states, norm, self.epsilon)
        )

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V], minus infinity for ids that the head does not know."""
        known = super().logits(hidden, tile)
        if self.ids is None:
            return known
        every = known.new_full((known.shape[0], self.vocab_size), NEGATIVE_INFINITY)
        return every.index_copy_(1, self.ids, known)
