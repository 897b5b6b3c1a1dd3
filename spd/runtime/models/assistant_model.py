"""A running assistant: a token and a state in, the next state out, over the cache of its target."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.formats.assistant import AssistantConfig
from spd.kernels.sampling.sampling import NEGATIVE_INFINITY
from spd.runtime.layers.base import ForwardBatch, LayerCache, ModelOutput, Residual
from spd.runtime.layers.linear import AnyHead
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.decoder import Decoder, Parts, looked_up


class OrderedHead(AnyHead):
    """Logits of the ids of a few clusters only: those whose vectors fit a state best."""

    def __init__(
        self, table: Tensor, centroids: Tensor, order: Tensor, kept: int, squares: bool
    ) -> None:
        """table [V, H]; centroids [C, H]; order int64 [V], the ids of one cluster after the other's."""
        self.table = table
        self.centroids = centroids
        self.kept = kept
        self.order = order.view(centroids.shape[0], -1)
        self.carries_squares = squares

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V] of hidden [T, H], minus infinity outside the clusters."""
        best = (hidden @ self.centroids.T).topk(self.kept, dim=-1).indices
        ids = self.order[best].flatten(1)
        scores = (self.table[ids] @ hidden[:, :, None]).squeeze(-1).float()
        every = scores.new_full((hidden.shape[0], self.table.shape[0]), NEGATIVE_INFINITY)
        return every.scatter_(1, ids, scores)


class NarrowedHead(AnyHead):
    """A head's logits, minus infinity for ids that are never drafted."""

    def __init__(self, inner: AnyHead, never: Tensor) -> None:
        """never: int64 [N]."""
        self.inner = inner
        self.never = never
        self.carries_squares = inner.carries_squares

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, V] of hidden [T, H]."""
        return self.inner.logits(hidden, tile).index_fill_(1, self.never, NEGATIVE_INFINITY)


class AssistantModel(Decoder):
    """A decoder whose `forward` needs a batch with states, and the caches of its target's layers."""

    def __init__(
        self,
        facts: AssistantConfig,
        parts: Parts,
        build: LayerBuilder,
        target: Decoder,
        order: Tensor | None,
        never: tuple[int, ...] = (),
    ) -> None:
        """order: of an assistant with clusters the ids int64 [V], one cluster after the other."""
        super().__init__(parts, build)
        tables = parts.tables
        self.target = target
        self.hidden_size = tables["pre_projection"].shape[0]
        self.state_size = facts.target_hidden_size
        self.caches = target.caches
        self.varied_layers = len(target.caches)
        self.before = build.residual_projection(tables["pre_projection"])
        self.behind = build.projection(tables["post_projection"])
        if order is not None:
            squares = target.head.carries_squares
            self.head = OrderedHead(
                tables["ordered"], tables["centroids"], order, facts.selected_clusters, squares
            )
        if never:
            ids = torch.tensor(never, device=build.place.device)
            self.head = NarrowedHead(self.head, ids)

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> ModelOutput:
        """The states after the final norm [T, hidden] of rows, and what goes on [T, target's hidden].

        Rows stand at the position before their token's, with the target's state of it or what went on.
        """
        assert batch.states is not None
        ids, table = looked_up(self.target.embedding, batch.token_ids)
        scale = self.target.embedding_scale or 1.0
        rings = batch.states.rings
        depth = batch.states.depth
        slots = (torch.arange(len(ids), device=ids.device) // batch.width).clamp(max=len(rings) - 1)
        pairs = torch.cat((table[ids] * scale, rings[slots, batch.positions % depth]), -1)
        stream = Residual(pairs.new_zeros(pairs.shape[0], self.hidden_size))
        stream = self.before(pairs, batch, stream)
        rotary = self.rotary_rows(batch)
        for layer, source in zip(self.layers, self.reads, strict=True):
            assert source is not None
            stream = layer(stream, rotary, batch, caches[source])
        assert self.final_norm is not None
        hidden = self.normed(stream, self.final_norm)
        return ModelOutput(hidden, self.behind(Residual(hidden), batch))
