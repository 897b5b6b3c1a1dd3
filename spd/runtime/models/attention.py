"""Attention of one layer: norm, project, rotate, store, attend, project back, add.

Grouped-query attention, and latent attention, which projects down, normalises, and projects up again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.attention.paged_attention import Scores
from spd.kernels.attention.rotary_store import RotatedRows, apply_rotary
from spd.kernels.latent.mla_attention import HeadMatrices
from spd.kernels.linear.norm_gate import rms_norm
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual, attended
from spd.runtime.layers.linear import AnyLinear, in_tiles, normed, unscaled_norm
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.layouts import GqaLayout, LatentLayout

LATENT_EPSILON = 1e-6
"""Of the two inner norms, whatever the configuration says of the others. Source: DeepSeek's own code."""


class Attention:
    """One layer's attention over a paged cache of keys and values."""

    def __init__(self, layout: GqaLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.layout, self.epsilon, self.kernels = layout, build.epsilon, build.kernels
        scale = layout.head_dim**-0.5 if layout.scale is None else layout.scale
        self.scores = Scores(scale, layout.sliding, layout.softcap, tensors.get("sinks"))
        if layout.gates_beside:
            build.reorder(tensors, "qkv", _gates_last(layout))
        if (order := layout.rotary.order) is not None:
            turned = slice((layout.num_heads + layout.num_kv_heads) * layout.head_dim)
            for name in ("qkv", "q_norm", "k_norm"):
                build.reorder(tensors, name, order, turned)
        self.qkv = (
            build.matrix(tensors, "qkv") if layout.reads_pairs else build.after_norm(tensors, "qkv")
        )
        self.gates = build.after_norm(tensors, "gates") if layout.head_gates else None
        self.output = build.summed(
            tensors, "output", layout.post_epsilon, centred=layout.centred_output
        )
        self.parts = [layout.widest, layout.num_heads * layout.head_dim]
        """Columns of queries, keys and values, and of gates behind them."""
        self.pair_norms = (tensors["norm"], tensors["state_norm"]) if layout.reads_pairs else None
        """Of a token and a state, where what is read is both side by side, normed already."""
        self.qk_weight: Tensor | None = None
        if layout.qk_norm:
            heads = [("q_norm", layout.num_heads), ("k_norm", layout.num_kv_heads)]
            heads = heads[: 1 if layout.reads is not None else 2]
            self.qk_weight = torch.cat([tensors[name].expand(count, -1) for name, count in heads])
        if layout.bare_norms:
            heads_alike = layout.num_heads + layout.num_kv_heads, layout.head_dim
            self.qk_weight = torch.ones(heads_alike, dtype=build.dtype, device=build.place.device)
        self.query_factor: Tensor | None = None
        """Of norms behind the rotation: their scales [D] meet in products of queries and keys alone."""
        if layout.late_norms and self.qk_weight is not None:
            self.query_factor = (tensors["q_norm"].float() * tensors["k_norm"].float()).to(
                build.dtype
            )
            self.qk_weight = torch.ones_like(self.qk_weight)
        self.whole_norms = [tensors["q_norm"], tensors["k_norm"]] if layout.whole_norms else None
        """Scales of one norm over all query heads, and of one over all key heads."""
        self.ranks = build.ranks
        if self.qk_weight is not None and self.kernels.native is not None:
            self.qk_weight = self.qk_weight.float()

    def __call__(
        self,
        stream: Residual,
        rotary: RotaryRows,
        batch: ForwardBatch,
        cache: LayerCache,
        onto: Residual | None = None,
    ) -> Residual:
        """The stream [T, hidden], or `onto`, with this block of the stream added.

        Stores the KV of the T rows, then reads the pages.
        """
        if self.layout.local_rope and rotary.local is not None:
            rotary = rotary.local
        if self.layout.still:
            rotary = rotary.still()
        kernels = self.kernels
        pools = cache.keys_and_values
        scores = self.scores
        rows = RotatedRows(rotary.cos, rotary.sin, rotary.positions, batch.kv_slots)
        qkv, gates = self.qkv(stream, batch).x, None
        if self.layout.gated:
            qkv, gates = (part.contiguous() for part in torch.split(qkv, self.parts, dim=1))
        if self.whole_norms is not None:
            qkv = self._normed_whole(qkv, *self.whole_norms)
        if self.layout.reads is not None:
            query = self._turned(qkv, rows)
        else:
            changed = self.layout.value_norm or self.layout.value_dim is not None
            qkv = self._valued(qkv) if changed else qkv
            query = kernels.rotary_store(
                qkv, rows, self.qk_weight, self.epsilon, pools, self.layout.num_heads
            )
        if self.query_factor is not None:
            query = query * self.query_factor
        if self.layout.query_growth is not None:
            slope, period = self.layout.query_growth
            grown = 1 + slope * torch.log1p(torch.floor(batch.positions.float() / period))
            query = query * grown.to(query.dtype)[:, None, None]
        plan = batch.plan[self.layout.heads]
        mixed = attended(
            query, batch, lambda rows: kernels.paged_attention(rows, pools, plan, scores)
        )
        if self.layout.value_dim is not None:
            heads = mixed.view(mixed.shape[0], self.layout.num_heads, -1)
            mixed = heads[..., : self.layout.value_dim].flatten(1) * self.layout.value_scale
        if gates is not None:
            mixed = mixed * gates.sigmoid()
        if self.gates is not None:
            opened = self.gates(stream, batch).x.sigmoid()
            mixed = (mixed.view(*opened.shape, -1) * opened[..., None]).flatten(1)
        return self.output(Residual(mixed), batch, stream if onto is None else onto)

    def _turned(self, query: Tensor, rows: RotatedRows) -> Tensor:
        """Queries [T, H, D] of [T, H * D], normed and rotated: keys are another layer's."""
        heads = query.view(query.shape[0], self.layout.num_heads, -1)
        if self.qk_weight is not None:
            heads = rms_norm(heads, self.qk_weight, self.epsilon)
        return apply_rotary(heads, *rows.own()).to(query.dtype)

    def _valued(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values [T, (H + 2 K) * D] of [T, N], where values may be missing or narrower."""
        size, keys = self.layout.head_dim, self.layout.num_kv_heads
        turned = (self.layout.num_heads + keys) * size
        value = (
            qkv[:, turned - keys * size : turned] if self.layout.key_is_value else qkv[:, turned:]
        )
        value = value.reshape(qkv.shape[0], keys, -1)
        if self.layout.value_norm:
            value = unscaled_norm(value, self.epsilon)
        wide = F.pad(value, (0, size - value.shape[2]))
        return torch.cat((qkv[:, :turned], wide.flatten(1)), 1)

    def _normed_whole(self, qkv: Tensor, query_scale: Tensor, key_scale: Tensor) -> Tensor:
        """qkv [T, N] with all query heads normalised together, and all key heads, over every rank's."""
        sizes = [query_scale.shape[0], key_scale.shape[0]]
        *parts, value = torch.split(qkv, [*sizes, sizes[1]], dim=1)
        means = torch.stack([x.float().square().mean(1) for x in parts], 1)
        if self.ranks is not None:
            means = self.ranks.sum(means) / self.ranks.size
        factors, scales = (means + self.epsilon).rsqrt().unbind(1), (query_scale, key_scale)
        normed = [
            ((x.float() * factor[:, None]).to(qkv.dtype) * scale).to(qkv.dtype)
            for x, factor, scale in zip(parts, factors, scales, strict=True)
        ]
        return torch.cat([*normed, value], 1)


class LatentAttention:
    """One layer's attention over a paged cache of latent vectors; the absorbed form in every program."""

    def __init__(self, layout: LatentLayout, tensors: Tensors, build: LayerBuilder) -> None:
        """Of what `down` makes, the latent side stands behind the query side.

        That is queries, or what `query` makes them of.
        """
        order, latent = layout.rotary.order, layout.latent
        if order is not None:
            head = [*range(latent.nope_dim), *(latent.nope_dim + i for i in order)]
            queries = "query" if "query" in tensors else "down"
            build.reorder(tensors, queries, head, slice(layout.query_rows))
            build.reorder(tensors, "down", order, slice(-latent.rope_dim, None))
        self.latent, self.layout, self.scale = latent, layout, layout.scale
        self.kernels, native = build.kernels, build.kernels.native
        self.query: tuple[Tensor, AnyLinear] | None = None
        if "query" in tensors:
            self.query = tensors["query_norm"], build.matrix(tensors, "query")
        self.down, self.latent_norm = build.after_norm(tensors, "down"), tensors["latent_norm"]
        self.output = build.summed(tensors, "output")
        heads = tensors["up"].view(
            layout.num_heads, latent.nope_dim + latent.value_dim, latent.rank
        )
        key_up = heads[:, : latent.nope_dim].contiguous()
        value_up = heads[:, latent.nope_dim :].transpose(1, 2).contiguous()
        self.key_up: HeadMatrices = key_up
        self.value_up: HeadMatrices = value_up
        if native is not None:
            self.key_up = native.pack(key_up.mT)
            self.value_up = native.pack(value_up.mT)

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The stream [T, hidden] with this block added; stores what is kept of the T rows, then attends."""
        (pages,) = cache.pools
        query, latent = self._project(stream, batch)
        still, turning = torch.split(query, [self.latent.nope_dim, self.latent.rope_dim], dim=-1)
        rows = RotatedRows(rotary.cos, rotary.sin, rotary.positions, batch.kv_slots)
        turned = self.kernels.latent_store(
            turning, latent, rows, self.latent_norm, LATENT_EPSILON, pages
        )
        absorbed = in_tiles(
            lambda rows: self.kernels.head_linear(rows, self.key_up), still, batch.tile
        )
        plan = batch.plan[self.layout.heads]
        whole = torch.cat((absorbed, turned), dim=-1)
        mixed = attended(
            whole,
            batch,
            lambda rows: self.kernels.mla_attention(
                rows, pages, plan, self.latent.rank, self.scale
            ),
        )
        mixed = mixed.view(-1, self.layout.num_heads, self.latent.rank)
        values = in_tiles(
            lambda rows: self.kernels.head_linear(rows, self.value_up), mixed, batch.tile
        )
        return self.output(Residual(values.flatten(1)), batch, stream)

    def _project(self, stream: Residual, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Queries [T, H, N + R], neither rotated nor absorbed, and what is to be kept [T, L + R]."""
        kept = self.latent.rank + self.latent.rope_dim
        down = self.down(stream, batch).x
        query, latent = down[:, :-kept], down[:, -kept:]
        if self.query is not None:
            norm, product = self.query
            query = product(
                Residual(normed(Residual(query), norm, LATENT_EPSILON, self.kernels)), batch
            ).x
        return query.reshape(query.shape[0], self.layout.num_heads, -1), latent


def _gates_last(layout: GqaLayout) -> list[int]:
    """The old index of each row: all queries, keys, values, then the gates, which stood beside queries."""
    size, heads = layout.head_dim, layout.num_heads
    starts = [2 * size * head for head in range(heads)]
    rest = range(2 * size * heads, 2 * size * heads + 2 * layout.num_kv_heads * size)
    queries = [start + i for start in starts for i in range(size)]
    return [*queries, *rest, *(row + size for row in queries)]
