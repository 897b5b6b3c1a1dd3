"""The model of an assistant: a token and a state in, the next state out, over its target's cache."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.formats.assistant import AssistantConfig
from spd.kernels.sampling.sampling import NEGATIVE_INFINITY
from spd.runtime.layers.base import ForwardBatch, LayerCache, ModelOutput, Residual
from spd.runtime.layers.linear import OutputHead
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.decoder import Decoder, DecoderParts, lookup_operands


class ClusteredHead(OutputHead):
    """A head that computes the logits of the ids of a few clusters: those with the largest centroid
    products.
    """

    def __init__(
        self,
        table: Tensor,
        centroids: Tensor,
        token_order: Tensor,
        num_selected: int,
        carries_square_sums: bool,
    ) -> None:
        """table [V, H]; centroids [C, H].

        Token_order int64 [V], the ids of each cluster in turn.
        """
        self.table = table
        self.centroids = centroids
        self.num_selected = num_selected
        self.cluster_ids = token_order.view(centroids.shape[0], -1)
        self.carries_square_sums = carries_square_sums

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, H], minus infinity outside the clusters."""
        clusters = (hidden @ self.centroids.T).topk(self.num_selected, dim=-1).indices
        ids = self.cluster_ids[clusters].flatten(1)
        scores = (self.table[ids] @ hidden[:, :, None]).squeeze(-1).float()
        logits = scores.new_full((hidden.shape[0], self.table.shape[0]), NEGATIVE_INFINITY)
        return logits.scatter_(1, ids, scores)


class SuppressingHead(OutputHead):
    """A head whose logits are minus infinity for ids that are never drafted."""

    def __init__(self, inner: OutputHead, suppressed_ids: Tensor) -> None:
        """suppressed_ids: int64 [N]."""
        self.inner = inner
        self.suppressed_ids = suppressed_ids
        self.carries_square_sums = inner.carries_square_sums

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V] of hidden [T, H]."""
        logits = self.inner.logits(hidden, tile)
        return logits.index_fill_(1, self.suppressed_ids, NEGATIVE_INFINITY)


class AssistantModel(Decoder):
    """A decoder whose `forward` takes a batch with states, and the caches of its target's layers."""

    def __init__(
        self,
        config: AssistantConfig,
        parts: DecoderParts,
        build: LayerBuilder,
        target: Decoder,
        token_order: Tensor | None,
        suppressed_ids: tuple[int, ...] = (),
    ) -> None:
        """token_order: the ids of each cluster in turn, int64 [V].

        None for an assistant without clusters.
        """
        super().__init__(parts, build)
        tables = parts.tables
        self.target = target
        pre_projection = tables.take_matrix("pre_projection")
        self.hidden_size = pre_projection.shape[0]
        self.state_size = config.target_hidden_size
        self.cache_layouts = target.cache_layouts
        self.num_probe_layers = len(target.cache_layouts)
        self.input_projection = build.residual_projection(pre_projection)
        self.output_projection = build.projection(tables.take_matrix("post_projection"))
        if token_order is not None:
            self.head = ClusteredHead(
                table=tables["head_table"],
                centroids=tables["centroids"],
                token_order=token_order,
                num_selected=config.selected_clusters,
                carries_square_sums=target.head.carries_square_sums,
            )
        if suppressed_ids:
            ids = torch.tensor(suppressed_ids, device=build.execution.device)
            self.head = SuppressingHead(self.head, ids)

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """Return the states after the final norm [T, hidden], and the next input states [T, target
        hidden].

        A row is at the position before its token's. Its input state is the target's state there, or
        the next input state of an earlier pass.
        """
        assert batch.states is not None
        ids, table = lookup_operands(self.target.embedding, batch.token_ids)
        scale = self.target.embedding_scale or 1.0
        rings = batch.states.rings
        depth = batch.states.depth
        slots = (torch.arange(len(ids), device=ids.device) // batch.width).clamp(max=len(rings) - 1)
        pairs = torch.cat((table[ids] * scale, rings[slots, batch.positions % depth]), -1)
        stream = Residual(pairs.new_zeros(pairs.shape[0], self.hidden_size))
        stream = self.input_projection(pairs, batch, stream)
        rotary = self.rotary_rows(batch)
        for layer, source in zip(self.layers, self.cache_sources, strict=True):
            assert source is not None
            stream = layer(stream, rotary, batch, caches[source])
        assert self.final_norm is not None
        hidden = self.normalize(stream, self.final_norm)
        return ModelOutput(hidden, self.output_projection(Residual(hidden), batch))
