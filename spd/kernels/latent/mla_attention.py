"""Latent attention over pages, absorbed: every head attends to the same small vectors.

A position is stored as one row of a pool [P, page, L + R]: L latent values, normed, and R values of
a key that all heads share, rotated. In eight bits the two parts have a scale each. A query head has
the same L + R dimensions, for its key matrix has been absorbed into it. The result is L values a
head, which its value matrix multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.attention.cache_rows import round_entries
from spd.kernels.attention.paged_attention import AttentionParams, AttentionPlan, paged_attention
from spd.kernels.attention.rotary_store import (
    Pools,
    RotatedRows,
    apply_rotary,
    replace_non_finite,
)
from spd.kernels.linear.norm_gate import rms_norm
from spd.kernels.native.packed import PackedWeight

HeadMatrices = Tensor | PackedWeight
"""A matrix for each of H heads: [H, A, B], or packed for the C kernels."""


def latent_store(
    query: Tensor,
    latent: Tensor,
    rows: RotatedRows,
    norm: Tensor,
    epsilon: float,
    pages: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute `Kernels.latent_store` by torch."""
    rank = norm.shape[0]
    query_and_key = torch.cat((query, latent[:, None, rank:]), dim=1)
    cos, sin = rows.select_cos_sin()
    rotated = apply_rotary(query_and_key, cos, sin).to(query.dtype)
    key = rotated[:, -1]
    value = rms_norm(latent[:, :rank], norm, epsilon)
    if scales is None:
        key, value = replace_non_finite(key, value)
    else:
        key, value, key_scale, value_scale = round_entries(key, value)
        entry_scales = torch.stack((value_scale, key_scale), dim=-1)
        scales.flatten(0, 1).index_copy_(0, rows.kv_slots, entry_scales)
    entries = torch.cat((value, key), dim=-1)
    pages.flatten(0, 1).index_copy_(0, rows.kv_slots, entries)
    return rotated[:, :-1]


def head_linear(x: Tensor, weight: HeadMatrices) -> Tensor:
    """Compute `Kernels.head_linear` by torch."""
    assert isinstance(weight, Tensor)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def mla_attention(
    query: Tensor,
    pages: Tensor,
    plan: AttentionPlan,
    rank: int,
    scale: float,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute `Kernels.mla_attention` by torch."""
    pool = pages.unsqueeze(2)  # rows are both keys and values; R columns of the values are unused
    pools: Pools = (pool, pool)
    if scales is not None:
        pools = (*pools, scales.unsqueeze(2), scales.unsqueeze(2))
    return paged_attention(query, pools, plan, AttentionParams(scale), rank)[..., :rank]
