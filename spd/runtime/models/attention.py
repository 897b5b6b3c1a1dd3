"""Grouped-query attention of one layer: norm, project, rotate, store, attend, project back, add."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import Scores
from spd.kernels.attention.rotary_store import RotatedRows, apply_rotary
from spd.kernels.linear.rms_norm import rms_norm
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual, attended
from spd.runtime.layers.linear import unscaled_norm
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.layouts import GqaLayout


class Attention:
    """One layer's attention over a paged cache of keys and values."""

    def __init__(self, layout: GqaLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.layout, self.epsilon, self.kernels = layout, build.epsilon, build.kernels
        scale = layout.head_dim**-0.5 if layout.scale is None else layout.scale
        self.scores = Scores(scale, layout.sliding, layout.softcap, tensors.get("sinks"))
        if layout.gated:
            build.reorder(tensors, "qkv", _gates_last(layout))
        if (order := layout.rotary.order) is not None:
            turned = slice((layout.num_heads + layout.num_kv_heads) * layout.head_dim)
            for name in ("qkv", "q_norm", "k_norm"):
                build.reorder(tensors, name, order, turned)
        self.qkv = build.matrix(tensors, "qkv") if layout.reads_pairs else build.after_norm(tensors, "qkv")
        self.output = build.summed(tensors, "output", centred=layout.centred_output)
        self.parts = [layout.widest, layout.num_heads * layout.head_dim]
        """Columns of queries, keys and values, and of gates behind them."""
        self.pair_norms = (tensors["norm"], tensors["state_norm"]) if layout.reads_pairs else None
        """Of a token and a state, where what is read is both side by side, normed already."""
        self.qk_weight: Tensor | None = None
        if layout.qk_norm:
            heads = [("q_norm", layout.num_heads), ("k_norm", layout.num_kv_heads)]
            heads = heads[: 1 if layout.reads is not None else 2]
            self.qk_weight = torch.cat([tensors[name].expand(count, -1) for name, count in heads])
        self.query_factor: Tensor | None = None
        """Of norms behind the rotation: their scales [D] meet in products of queries and keys alone."""
        if layout.late_norms and self.qk_weight is not None:
            self.query_factor = (tensors["q_norm"].float() * tensors["k_norm"].float()).to(build.dtype)
            self.qk_weight = torch.ones_like(self.qk_weight)
        self.whole_norms: list[Tensor] | None = None
        """Scales of one norm over all query heads, and of one over all key heads."""
        self.ranks = build.ranks
        if layout.whole_norms:
            self.whole_norms = [tensors["q_norm"], tensors["k_norm"]]
        if self.qk_weight is not None and self.kernels.facts.float32_norms:
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
        kernels, pools, scores = self.kernels, cache.pools, self.scores
        rows = RotatedRows(rotary.cos, rotary.sin, rotary.positions, batch.kv_slots)
        given = (self.qk_weight, self.epsilon, pools, self.layout.num_heads)
        qkv, gates = self.qkv(stream, batch).x, None
        if self.layout.gated:
            qkv, gates = (part.contiguous() for part in torch.split(qkv, self.parts, dim=1))
        if self.whole_norms is not None:
            qkv = self._normed_whole(qkv, *self.whole_norms)
        if self.layout.reads is not None:
            query = self._turned(qkv, rows)
        else:
            qkv = self._valued(qkv) if self.layout.value_norm else qkv
            query = kernels.rotary_store(qkv, rows, *given)
        if self.query_factor is not None:
            query = query * self.query_factor
        if self.layout.query_growth is not None:
            slope, period = self.layout.query_growth
            grown = 1 + slope * torch.log1p(torch.floor(batch.positions.float() / period))
            query = query * grown.to(query.dtype)[:, None, None]
        mixed = attended(
            query,
            batch,
            lambda windows: kernels.paged_attention(windows, pools, self._plan(batch), scores),
            lambda chunk, *where: kernels.prefill_attention(chunk, pools, *where, scores, batch.first_key),
        )
        if gates is not None:
            mixed = mixed * gates.sigmoid()
        return self.output(Residual(mixed), batch, stream if onto is None else onto)

    def _plan(self, batch: ForwardBatch) -> object:
        """What was prepared for heads of this layer's shape."""
        return batch.plan[self.layout.heads] if isinstance(batch.plan, dict) else batch.plan

    def _turned(self, query: Tensor, rows: RotatedRows) -> Tensor:
        """Queries [T, H, D] of [T, H * D], normed and rotated: keys are another layer's."""
        heads = query.view(query.shape[0], self.layout.num_heads, -1)
        if self.qk_weight is not None:
            heads = rms_norm(heads, self.qk_weight, self.epsilon)
        return apply_rotary(heads, *rows.own()).to(query.dtype)

    def _valued(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values [T, (H + 2 K) * D], values normed, of [T, N] with values or without."""
        size, keys = self.layout.head_dim, self.layout.num_kv_heads
        turned = (self.layout.num_heads + keys) * size
        value = qkv[:, turned - keys * size : turned] if self.layout.key_is_value else qkv[:, turned:]
        normed = unscaled_norm(value.reshape(qkv.shape[0], keys, size), self.epsilon)
        return torch.cat((qkv[:, :turned], normed.flatten(1)), 1)

    def _normed_whole(self, qkv: Tensor, query_scale: Tensor, key_scale: Tensor) -> Tensor:
        """qkv [T, N] with all query heads normalised together, and all key heads, over every rank's."""
        sizes = [query_scale.shape[0], key_scale.shape[0]]
        *parts, value = torch.split(qkv, [*sizes, sizes[1]], dim=1)
        scales = (query_scale, key_scale)
        if self.ranks is None:
            normed = [rms_norm(x, scale, self.epsilon) for x, scale in zip(parts, scales, strict=True)]
            return torch.cat([*normed, value], 1)
        squares = torch.stack([x.float().square().sum(1) for x in parts], 1)
        widths = self.ranks.size * torch.tensor(sizes, device=qkv.device)
        factors = (self.ranks.sum(squares) / widths + self.epsilon).rsqrt()
        normed = [
            ((x.float() * factor[:, None]).to(qkv.dtype) * scale).to(qkv.dtype)
            for x, factor, scale in zip(parts, factors.unbind(1), scales, strict=True)
        ]
        return torch.cat([*normed, value], 1)


def _gates_last(layout: GqaLayout) -> list[int]:
    """The old index of each row: all queries, keys, values, then the gates, which stood beside queries."""
    size, heads = layout.head_dim, layout.num_heads
    starts = [2 * size * head for head in range(heads)]
    rest = range(2 * size * heads, 2 * size * heads + 2 * layout.num_kv_heads * size)
    queries = [start + i for start in starts for i in range(size)]
    return [*queries, *rest, *(row + size for row in queries)]
