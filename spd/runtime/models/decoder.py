"""The pre-norm decoder of every family: embedding, layers, norm, head.

A functional forward pass over prebound tensors: no `nn.Module`, no hooks, no lookup of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.attention import Attention
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.decoder_layer import DecoderLayer
from spd.runtime.models.gated_delta import GatedDelta
from spd.runtime.models.gemma4_mlp import LayerEmbeddings
from spd.runtime.models.weights import HeadRules, ModelLayout


class AuxStateFuser:
    """Computes a head's input states from the streams between its target's layers.

    A matrix [hidden, n * target hidden] over the concatenated streams after some of the target's
    layers, with norms before it or behind it.
    """

    def __init__(
        self, config: ModelConfig, tables: BlockTensors, build: LayerBuilder, num_layers: int
    ) -> None:
        """tables: the head's, from which `fuse` is removed; num_layers: the target's layers."""
        reader = config.stream_reader
        assert reader is not None
        self.layers = reader.aux_layers(num_layers)
        self.epsilon = config.rms_norm_eps
        self.norms = (
            tables["aux_norms"].chunk(reader.num_aux_layers) if "aux_norms" in tables else ()
        )
        self.joint_norm = tables.get("aux_norm")
        self.state_norm = tables.get("state_norm")
        self.projection = build.projection(tables.pop("fuse"))

    def fuse_streams(self, streams: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
        """Return states [T, head's hidden] of streams [T, hidden], one for each of `layers`."""
        if self.norms:
            streams = [
                rms_norm(x, norm, self.epsilon) for x, norm in zip(streams, self.norms, strict=True)
            ]
        concatenated = torch.cat(list(streams), dim=-1)
        if self.joint_norm is not None:
            concatenated = rms_norm(concatenated, self.joint_norm, self.epsilon)
        states = self.projection(Residual(concatenated), batch)
        return (
            states if self.state_norm is None else rms_norm(states, self.state_norm, self.epsilon)
        )


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder or of a head, and the other tables outside its layers."""

    tables: BlockTensors
    embedding: products.AnyEmbedding
    head: products.OutputHead
    layers: list[DecoderLayer]
    rotary: RotaryTable
    heads: tuple[AttentionHeads, ...]
    """The heads of every shape among the layers."""
    layout: ModelLayout
    logit_softcap: float | None


def lookup_operands(embedding: products.AnyEmbedding, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and a table in which a kernel can look them up: the embedding's table where it is
    plain.
    """
    if isinstance(embedding, Tensor):
        return ids, embedding
    return torch.arange(ids.shape[0], device=ids.device), embedding.rows(ids)


class Decoder:
    """A causal decoder over prebound tensors, driven by the runner.

    Heads may share its parts: `embedding`, `head`, `final_norm`, `rotary`.
    """

    def __init__(self, parts: DecoderParts, build: LayerBuilder) -> None:
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
        self.cache_layouts = [layer.layout for layer in self.layers]
        """The layout of each layer's first block, which has the shapes of its cache."""
        self.cache_sources = [
            layout.cache_source if isinstance(layout, GqaLayout) else None
            for layout in self.cache_layouts
        ]
        """For each layer, the index of the layer whose cache it reads; None: its own."""
        kinds = [(layer.layout, type(layer.mlp)) for layer in self.layers]
        self.num_probe_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
        """The number of first layers that include one of every kind."""
        self.vocab_size, self.hidden_size = self.embedding.shape
        self.state_size = self.hidden_size
        """The elements of a state that a head reads."""
        self.max_positions = self.rotary.max_positions
        self.state_fuser: AuxStateFuser | None = None
        """Computes the states of a head that reads the streams between layers, where there is one.
        """

    @torch.inference_mode()
    def zero_counters(self) -> None:
        """Zero the counters that programs of split products share, after a pass that broke off.

        A pass leaves them zero. Attention's are zeroed by the plan of each pass.
        """
        skinny_products = (p for p in self.products if isinstance(p, skinny.SkinnyLinear))
        counters = (p.workspace.counters for p in skinny_products if p.workspace is not None)
        for shared in {id(tensor): tensor for tensor in counters}.values():
            shared.zero_()

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """Return hidden states after the final norm, [T, hidden].

        Write the cache entries of every row.

        Run as many layers as there are caches: all of them, except in a probe of the arithmetic,
        which computes no states for a head.
        """
        rotary = self.rotary_rows(batch)
        stream = self._embed_tokens(batch)
        if self.layer_embeddings is not None:
            batch = replace(
                batch, per_layer=self.layer_embeddings(batch.token_ids, stream.x, batch)
            )
        fuser = self.state_fuser if len(caches) >= len(self.layers) else None
        streams = {0: stream.x} if fuser is not None and 0 in fuser.layers else {}
        for depth, (layer, layer_cache, source) in enumerate(
            zip(self.layers, caches, self.cache_sources, strict=False), 1
        ):
            cache = layer_cache if source is None else caches[source]
            stream = layer(stream, rotary, batch, cache)
            if fuser is not None and depth in fuser.layers:
                streams[depth] = stream.x
        assert self.final_norm is not None
        hidden = self.normalize(stream, self.final_norm)
        if fuser is None:
            return ModelOutput.from_hidden(hidden)
        scale = self.layout.residual_scale
        scaled_streams = [
            streams[depth] if scale == 1.0 else streams[depth] * scale for depth in fuser.layers
        ]
        return ModelOutput(hidden, fuser.fuse_streams(scaled_streams, batch))

    def apply_rings(self, segments: Segments, caches: list[LayerCache]) -> None:
        """Advance the states of recurrent layers to a border, in place, by the rows of their rings.

        segments: one row of each slot, a placeholder of the row that is fed next.
        """
        for layer, cache in zip(self.layers, caches, strict=True):
            if isinstance(layer.attention, GatedDelta):
                layer.attention.apply_rings(cache, segments)

    def rotary_rows(self, batch: ForwardBatch) -> RotaryRows:
        """Return cos and sin for a batch's rows, gathered where the kernels need that."""
        return self.rotary.rows(batch.positions, gathered=self.kernels.capabilities.gathers_rotary)

    def normalize(self, stream: Residual, weight: Tensor) -> Tensor:
        """Return the RMS norm of the stream [T, hidden] with scales `weight` [hidden]."""
        return products.normalize_stream(stream, weight, self.epsilon, self.kernels)

    def _embed_tokens(self, batch: ForwardBatch) -> Residual:
        """Return the stream before the first layer: the scaled embeddings of a batch's tokens."""
        ids, table = lookup_operands(self.embedding, batch.token_ids)
        if self.layout.centred_stream or self.layout.normed_embedding:
            rows = table[ids].float()
            if self.layout.normed_embedding:
                rows = products.unscaled_norm(rows, self.epsilon)
            else:
                rows = products.without_mean(rows)
            table = rows.to(table.dtype)
            ids = torch.arange(ids.shape[0], device=ids.device)
        if self.head.carries_square_sums and batch.chunk_start is None:
            return Residual(*self.kernels.embed(ids, table, self.embedding_scale))
        x = table[ids]
        return Residual(x if self.embedding_scale is None else x * self.embedding_scale)

    def _head_input(self, hidden: Tensor) -> Tensor:
        """Return the output head's input for hidden [T, hidden]."""
        return hidden

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V]."""
        scores = self.head.logits(self._head_input(hidden), tile)
        if self.logit_softcap is None:
            return scores
        return (scores / self.logit_softcap).tanh_() * self.logit_softcap

    def sample_tokens(self, hidden: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return tokens [T] that a head with a fused draw samples, and which are finite.

        See `SkinnyLinear.sample_tokens`.
        """
        assert isinstance(self.head, skinny.SkinnyLinear)
        return self.head.sample_tokens(self._head_input(hidden), draw)


def spread_logits(head_logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits [T, V] over the target's ids of those of a head [T, N], minus infinity for
    others.

    ids: the target's id of each of the head's, int64 and ascending; None where they are the same.
    """
    if ids is None:
        return head_logits
    logits = head_logits.new_full((head_logits.shape[0], vocab_size), NEGATIVE_INFINITY)
    return logits.index_copy_(1, ids, head_logits)


class HeadModel(Decoder):
    """The model of a part of a head that drafts: a token and the state before it in, the next state
    out.

    A decoder of one layer whose `forward` takes a batch with states; logits are over the target's
    ids. Embedding and head are the target's, or the head's where its copies differ. Other
    differences between heads are in their `HeadPart`; see `formats.mtp_layout` and
    `spd.formats.eagle3` for the conventions, here in slots: the position of the token.
    """

    def __init__(
        self, rules: HeadRules, parts: DecoderParts, build: LayerBuilder, ids: Tensor | None
    ) -> None:
        """parts.tables: `projection` [hidden, 2 * hidden] over token and state, and norms [hidden]
        of both.

        Where attention reads token and state, none of these. ids: the target's id of each of the
        head's, int64 and ascending; None where they are the same.
        """
        super().__init__(parts, build)
        self.rules = rules
        self.ids = ids
        self.layer = self.layers[0]
        self.projection: products.ResidualProjection | None = None
        if "projection" in parts.tables:
            self.projection = build.residual_projection(parts.tables.take_matrix("projection"))
            self.token_norm = parts.tables["token_norm"]
            self.state_norm = parts.tables["state_norm"]
        else:
            assert (
                isinstance(self.layer.attention, Attention)
                and self.layer.attention.pair_norms is not None
            )
            self.token_norm, self.state_norm = self.layer.attention.pair_norms

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """Return the rows' next states [T, hidden]; write the cache entries of every row."""
        assert batch.states is not None
        rules = self.rules
        projection = self.projection
        ids, table = lookup_operands(self.embedding, batch.token_ids)
        norms = PairNorms(
            token=self.token_norm,
            hidden=self.state_norm,
            epsilon=self.epsilon,
            masked=rules.masked_slot,
            hidden_first=rules.hidden_first,
        )
        keeps_state = projection is None and not rules.normed_residual
        pairs, state = self.kernels.head_input(
            token_ids=ids, table=table, batch=batch, norms=norms, keeps_state=keeps_state
        )
        rotary = self.rotary_rows(batch)
        if projection is not None:
            zeros = Residual(pairs.new_zeros(pairs.shape[0], self.hidden_size))
            stream = self.layer(projection(pairs, batch, zeros), rotary, batch, caches[0])
        else:
            if state is None:
                state = pairs[:, self.hidden_size :].contiguous()
            assert isinstance(self.layer.attention, Attention)
            onto = self._start_stream(state, self.layer.attention, batch)
            stream = self.layer.attention(Residual(pairs), rotary, batch, caches[0], onto)
            stream = self.layer.mlp(stream, batch)
        if not rules.recycles_normed or self.final_norm is None:
            return ModelOutput.from_hidden(stream.x)
        if projection is not None and stream.square_sums is None:
            # In torch's form, with C's products too.
            return ModelOutput.from_hidden(rms_norm(stream.x, self.final_norm, self.epsilon))
        return ModelOutput.from_hidden(self.normalize(stream, self.final_norm))

    def _start_stream(self, state: Tensor, attention: Attention, batch: ForwardBatch) -> Residual:
        """Return the residual stream that begins with a state.

        It has sums of squares where the sum over ranks keeps them.
        """
        is_parallel = isinstance(attention.output, products.RowParallelLinear)
        if batch.chunk_start is None and self.head.carries_square_sums and is_parallel:
            return products.with_square_sums(state, self.kernels)
        return Residual(state)

    def _head_input(self, states: Tensor) -> Tensor:
        """Return the output head's input: the norm of states [T, hidden], or normed states
        themselves.
        """
        norm = self.final_norm
        return (
            states
            if self.rules.recycles_normed or norm is None
            else rms_norm(states, norm, self.epsilon)
        )

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V], minus infinity for ids that the head does not have."""
        return spread_logits(super().logits(hidden, tile), self.ids, self.vocab_size)
