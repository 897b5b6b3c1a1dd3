"""Latent attention of one layer: norm, project down, norm, rotate, store, attend, project up, add."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.native.library import PackedWeight
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual, attended
from spd.runtime.layers.linear import in_tiles, normed
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.layouts import LatentLayout

LATENT_EPSILON = 1e-6
"""Of the two inner norms, whatever the configuration says of the others. Source: DeepSeek's own code."""


class LatentAttention:
    """One layer's attention over a paged cache of latent vectors; the absorbed form in every program."""

    def __init__(self, layout: LatentLayout, tensors: Tensors, build: LayerBuilder) -> None:
        """Of what `down` makes, the latent side stands behind the query side.

        That is queries, or what `query` makes them of, or nothing where `query` reads the stream itself.
        """
        order, latent = layout.rotary.order, layout.latent
        if order is not None:
            head = [*range(latent.nope_dim), *(latent.nope_dim + i for i in order)]
            queries = "query" if "query" in tensors else "down"
            build.reorder(tensors, queries, head, slice(layout.query_rows))
            build.reorder(tensors, "down", order, slice(-latent.rope_dim, None))
        self.latent, self.num_heads, self.scale = latent, layout.num_heads, layout.scale
        self.kernels, native = build.kernels, build.kernels.native
        self.query_norm, self.query = tensors.get("query_norm"), None
        if "query" in tensors:
            make = build.after_norm if self.query_norm is None else build.matrix
            self.query = make(tensors, "query")
        self.down, self.latent_norm = build.after_norm(tensors, "down"), tensors["latent_norm"]
        self.output = build.summed(tensors, "output")
        heads = tensors["up"].view(layout.num_heads, latent.nope_dim + latent.value_dim, latent.rank)
        key_up = heads[:, : latent.nope_dim].contiguous()
        value_up = heads[:, latent.nope_dim :].transpose(1, 2).contiguous()
        self.key_up: Tensor | PackedWeight = key_up if native is None else native.pack(key_up.mT)
        self.value_up: Tensor | PackedWeight = value_up if native is None else native.pack(value_up.mT)

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The stream [T, hidden] with this block added; stores what is kept of the T rows, then attends."""
        (pages,) = cache.pools
        query, latent = self._project(stream, batch)
        still, turning = torch.split(query, [self.latent.nope_dim, self.latent.rope_dim], dim=-1)
        rows = RotatedRows(rotary.cos, rotary.sin, rotary.positions, batch.kv_slots)
        turned = self.kernels.latent_store(turning, latent, rows, self.latent_norm, LATENT_EPSILON, pages)
        absorbed = in_tiles(lambda rows: self.kernels.head_linear(rows, self.key_up), still, batch.tile)
        kernels, size, scale = self.kernels, self.latent.rank, self.scale
        mixed = attended(
            torch.cat((absorbed, turned), dim=-1),
            batch,
            lambda windows: kernels.mla_attention(windows, pages, batch.plan, size, scale),
            lambda chunk, *where: kernels.mla_prefill(chunk, pages, *where, size, scale),
        ).view(-1, self.num_heads, size)
        values = in_tiles(lambda rows: self.kernels.head_linear(rows, self.value_up), mixed, batch.tile)
        return self.output(Residual(values.flatten(1)), batch, stream)

    def _project(self, stream: Residual, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Queries [T, H, N + R], neither rotated nor absorbed, and what is to be kept [T, L + R]."""
        kept = self.latent.rank + self.latent.rope_dim
        down = self.down(stream, batch).x
        query, latent = down[:, :-kept], down[:, -kept:]
        if self.query is not None:
            read = stream
            if self.query_norm is not None:
                read = Residual(normed(Residual(query), self.query_norm, LATENT_EPSILON, self.kernels))
            query = self.query(read, batch).x
        return query.reshape(query.shape[0], self.num_heads, -1), latent
