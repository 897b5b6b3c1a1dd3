"""Grouped-query attention of one layer: project, normalise, rotate, store, attend, project back."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.paged_attention import paged_attention
from spd.kernels.rms_norm import rms_norm
from spd.kernels.rotary import apply_rotary
from spd.kernels.store_kv import store_kv
from spd.runtime.layers.linear import Linear
from spd.runtime.models.base import ForwardBatch, LayerCache


class Attention:
    """One layer's attention over a paged cache."""

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        qk_norm: tuple[Tensor, Tensor] | None,
        epsilon: float,
    ) -> None:
        self.qkv, self.output = qkv, output
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, num_heads, num_kv_heads
        self.epsilon = epsilon
        self.scale = head_dim**-0.5
        self.qk_weight: Tensor | None = None
        if qk_norm is not None:
            query, key = qk_norm
            self.qk_weight = torch.cat(
                (query.expand(num_heads, -1), key.expand(num_kv_heads, -1))
            ).contiguous()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """x [T, hidden] to [T, hidden]; writes this layer's KV of the T rows, then reads the pages."""
        rotated_heads = self.num_heads + self.num_kv_heads
        fused = self.qkv(x, batch.tile).view(-1, rotated_heads + self.num_kv_heads, self.head_dim)
        rotated, value = fused[:, :rotated_heads], fused[:, rotated_heads:]
        if self.qk_weight is not None:
            rotated = rms_norm(rotated, self.qk_weight, self.epsilon)
        rotated = apply_rotary(rotated, cos, sin)
        store_kv(rotated[:, self.num_heads :], value, cache.key, cache.value, batch.kv_slots)
        rows = batch.num_slots * batch.width
        query = rotated[:rows, : self.num_heads].reshape(
            batch.num_slots, batch.width, self.num_heads, self.head_dim
        )
        mixed = paged_attention(
            query, cache.key, cache.value, batch.page_table, batch.biases, batch.first_pages, self.scale
        ).reshape(rows, self.num_heads * self.head_dim)
        if rows < x.shape[0]:
            mixed = torch.cat((mixed, mixed.new_zeros(x.shape[0] - rows, mixed.shape[1])))
        return self.output(mixed, batch.tile)
