"""Latent attention of one layer: norm, project down, norm, rotate, store, attend, project up, add."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.formats.block_config import LatentConfig
from spd.kernels.dispatch import Kernels
from spd.kernels.native.products import PackedWeight
from spd.runtime.layers.linear import AnyLinear, in_tiles
from spd.runtime.layers.norm import normed
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.base import ForwardBatch, LayerCache, Residual

LATENT_EPSILON = 1e-6
"""Of the two inner norms, whatever the configuration says of the others. Source: DeepSeek's own code."""


class LatentAttention:
    """One layer's attention over a paged cache of latent vectors; the absorbed form in every program."""

    def __init__(
        self,
        norm: Tensor,
        down: AnyLinear,
        query_norm: Tensor | None,
        query: AnyLinear | None,
        latent_norm: Tensor,
        up: Tensor,
        output: AnyLinear,
        latent: LatentConfig,
        num_heads: int,
        scale: float,
        epsilon: float,
        kernels: Kernels,
    ) -> None:
        """down makes [query side | latent side]: the first is queries, or what `query` makes them of, or,
        where `query` reads the hidden state itself (no query_norm), nothing. up [H * (N + V), L].
        """
        self.norm, self.down, self.query_norm, self.query = norm, down, query_norm, query
        self.latent_norm, self.output, self.latent = latent_norm, output, latent
        self.num_heads, self.scale, self.epsilon, self.kernels = num_heads, scale, epsilon, kernels
        heads = up.view(num_heads, latent.nope_dim + latent.value_dim, latent.rank)
        key_up = heads[:, : latent.nope_dim].contiguous()
        value_up = heads[:, latent.nope_dim :].transpose(1, 2).contiguous()
        native = kernels.native
        self.key_up: Tensor | PackedWeight = key_up if native is None else native.pack_heads(key_up)
        self.value_up: Tensor | PackedWeight = value_up if native is None else native.pack_heads(value_up)

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run."""
        return tuple(p for p in (self.down, self.query, self.output) if p is not None)

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The stream [T, hidden] with this block added; stores what is kept of the T rows, then attends."""
        (pages,) = cache.pools
        query, latent = self._project(stream, batch)
        still, turning = torch.split(query, [self.latent.nope_dim, self.latent.rope_dim], dim=-1)
        turned = self.kernels.latent_store(
            turning,
            latent,
            rotary.cos,
            rotary.sin,
            rotary.positions,
            batch.kv_slots,
            self.latent_norm,
            LATENT_EPSILON,
            pages,
        )
        absorbed = in_tiles(lambda rows: self.kernels.head_linear(rows, self.key_up), still, batch.tile)
        mixed = self._attend(torch.cat((absorbed, turned), dim=-1), batch, pages)
        values = in_tiles(lambda rows: self.kernels.head_linear(rows, self.value_up), mixed, batch.tile)
        return self.output.onto(values.flatten(1), stream, batch)

    def _project(self, stream: Residual, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Queries [T, H, N + R], neither rotated nor absorbed, and what is to be kept [T, L + R]."""
        kept = self.latent.rank + self.latent.rope_dim
        down = self.down.after_norm(stream, self.norm, self.epsilon, batch)
        query, latent = down[:, :-kept], down[:, -kept:]
        if self.query is not None:
            if self.query_norm is None:
                query = self.query.after_norm(stream, self.norm, self.epsilon, batch)
            else:
                query = self.query.product(
                    normed(Residual(query), self.query_norm, LATENT_EPSILON, self.kernels), batch
                )
        return query.reshape(query.shape[0], self.num_heads, -1), latent

    def _attend(self, query: Tensor, batch: ForwardBatch, pages: Tensor) -> Tensor:
        """query [T, H, L + R] to [T, H, L]."""
        if batch.chunk_start is not None and batch.plan is None:
            alone: Tensor = self.kernels.mla_prefill(
                query, pages, batch.page_table[0], batch.chunk_start, self.latent.rank, self.scale
            )
            return alone
        rows, total = batch.num_slots * batch.width, query.shape[0]
        window = query[:rows].view(batch.num_slots, batch.width, *query.shape[1:])
        mixed = self.kernels.mla_attention(window, pages, batch.plan, self.latent.rank, self.scale)
        mixed = mixed.reshape(rows, self.num_heads, self.latent.rank)
        return mixed if rows == total else torch.cat((mixed, mixed.new_zeros(total - rows, *mixed.shape[1:])))
