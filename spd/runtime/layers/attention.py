"""Grouped-query attention of one layer: norm, project, rotate, store, attend, project back, add."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.runtime.layers.linear import AnyLinear
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.base import ForwardBatch, LayerCache, Residual


class Attention:
    """One layer's attention over a paged cache of keys and values."""

    def __init__(
        self,
        norm: Tensor,
        qkv: AnyLinear,
        output: AnyLinear,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        qk_norm: tuple[Tensor, Tensor] | None,
        epsilon: float,
        kernels: Kernels,
        *,
        scale: float | None = None,
        sliding: int | None = None,
        softcap: float | None = None,
        local_rope: bool = False,
        post_norm: Tensor | None = None,
    ) -> None:
        self.norm, self.qkv, self.output, self.kernels = norm, qkv, output, kernels
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, num_heads, num_kv_heads
        self.epsilon = epsilon
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sliding, self.softcap = sliding, softcap
        self.local_rope, self.post_norm = local_rope, post_norm
        self.qk_weight: Tensor | None = None
        if qk_norm is not None:
            query, key = qk_norm
            self.qk_weight = torch.cat(
                (query.expand(num_heads, -1), key.expand(num_kv_heads, -1))
            ).contiguous()
            if kernels.native is not None:
                self.qk_weight = self.qk_weight.float()

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The stream [T, hidden] with this block added; stores the KV of the T rows, then reads the pages."""
        return self._onto(
            self.qkv.after_norm(stream, self.norm, self.epsilon, batch), stream, rotary, batch, cache
        )

    def of_pairs(
        self, pairs: Tensor, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The same of normed pairs [T, 2 * hidden] of token and state, added to the stream [T, hidden]."""
        return self._onto(self.qkv.product(pairs, batch), stream, rotary, batch, cache)

    def _onto(
        self, qkv: Tensor, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        key_pages, value_pages = cache.pools
        if self.local_rope and rotary.local is not None:
            rotary = rotary.local
        query = self.kernels.rotary_store(
            qkv,
            rotary.cos,
            rotary.sin,
            rotary.positions,
            batch.kv_slots,
            self.qk_weight,
            self.epsilon,
            key_pages,
            value_pages,
            self.num_heads,
        )
        mixed = self._attend(query, batch, key_pages, value_pages)
        if self.post_norm is not None:
            return self.output.normed_onto(mixed, stream, self.post_norm, self.epsilon, batch)
        return self.output.onto(mixed, stream, batch)

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run."""
        return self.qkv, self.output

    def _attend(self, query: Tensor, batch: ForwardBatch, key_pages: Tensor, value_pages: Tensor) -> Tensor:
        """query [T, H, D] to [T, H * D]."""
        total, width = query.shape[0], self.num_heads * self.head_dim
        if batch.chunk_start is not None and batch.plan is None:
            mixed: Tensor = self.kernels.prefill_attention(
                query,
                key_pages,
                value_pages,
                batch.page_table[0],
                batch.chunk_start,
                self.scale,
                batch.first_key,
                sliding=self.sliding,
                softcap=self.softcap,
            )
            return mixed.view(total, width)
        rows = batch.num_slots * batch.width
        window = query[:rows].view(batch.num_slots, batch.width, self.num_heads, self.head_dim)
        mixed = self.kernels.paged_attention(
            window, key_pages, value_pages, batch.plan, self.scale, self.sliding, self.softcap
        )
        mixed = mixed.reshape(rows, width)
        return mixed if rows == total else torch.cat((mixed, mixed.new_zeros(total - rows, width)))
