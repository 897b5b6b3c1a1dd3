"""The steps between the fused projection and attention: per-head norm, rotation and cache write."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.attention.cache_rows import round_entries
from spd.kernels.linear.norm_gate import rms_norm

Pools = tuple[Tensor, ...]
"""Keys and values of all pages, [P, page, K, D] each.

With a cache in eight bits both are codes int8, and their scales follow, float16 [P, page, K] each.
"""


@dataclass(frozen=True)
class RotatedRows:
    """Cosines and sines of T rows, and the cache slots of their keys and values."""

    cos: Tensor  # [M, D], whose halves repeat each other, in the rows' dtype or float32
    sin: Tensor  # as cos, but for the sign of its first half; see `apply_rotary`
    positions: Tensor | None
    """int64 [T] below M; None (torch form only): cos and sin have one row for each of the T
    rows."""
    kv_slots: Tensor  # int64 [T] as in `store_kv`

    def select_cos_sin(self) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of each row, for all heads: [T, 1, D]."""
        cos = self.cos
        sin = self.sin
        if self.positions is not None:
            cos = cos[self.positions]
            sin = sin[self.positions]
        return cos.unsqueeze(1), sin.unsqueeze(1)


def count_pairs(size: int) -> int:
    """Return size / 2, the pairs that a head is rotated in. Raises ValueError where size is odd."""
    if size % 2:
        raise ValueError(f"{size} values of a head cannot be rotated in pairs")
    return size // 2


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D], D even, by cos and sin [T, 1, D], whose halves repeat each other.

    `sin` carries the sign: its first half is negated, so that the partner is one half-swap away.
    Source: Su et al. 2021, in the half-split form of Hugging Face checkpoints.
    """
    first, second = torch.split(x, count_pairs(x.shape[-1]), dim=-1)
    # Separate roundings: a fused multiply-add rounds otherwise in vector bodies than in scalar
    # tails.
    return x * cos + torch.cat((second, first), dim=-1) * sin


def is_known_finite(x: Tensor) -> bool:
    """True if the host knows that all of x is finite.

    Always False on a GPU, without synchronizing.
    """
    return x.device.type == "cpu" and math.isfinite(x.sum())


def replace_non_finite(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [..., D] as they are stored: non-finite values as 0, and their keys as
    NaN.

    A row that does not attend to a position weighs its value by zero, and zero times infinity is
    NaN. A key of NaN makes the rows that attend to it NaN, and no others.
    """
    if is_known_finite(key) and is_known_finite(value):
        return key, value
    is_faulty = ~(key.isfinite().all(-1, keepdim=True) & value.isfinite().all(-1, keepdim=True))
    return key.masked_fill(is_faulty, math.nan), value.nan_to_num(0.0, 0.0, 0.0)


def store_kv(key: Tensor, value: Tensor, pools: Pools, slots: Tensor) -> None:
    """Write key and value [T, K, D] to positions slots [T] of the pools, in place.

    A slot is page * page_size + offset. Rows that must not be stored have a slot of the trash page.
    Of rows that share a slot any one is stored. See `replace_non_finite` and `round_entries`.
    """
    is_rounded = pools[0].dtype == torch.int8
    entries = round_entries(key, value) if is_rounded else replace_non_finite(key, value)
    for pool, rows in zip(pools, entries, strict=True):
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, rows)


def rotary_store(
    qkv: Tensor,
    rows: RotatedRows,
    qk_weight: Tensor | None,
    epsilon: float,
    pools: Pools,
    num_heads: int,
) -> Tensor:
    """Compute `Kernels.rotary_store` by torch."""
    kv_heads, size = pools[0].shape[2:]
    rotated_heads = num_heads + kv_heads
    fused = qkv.view(-1, rotated_heads + kv_heads, size)
    rotated = fused[:, :rotated_heads]
    value = fused[:, rotated_heads:]
    if qk_weight is not None:
        rotated = rms_norm(rotated, qk_weight, epsilon)
    cos, sin = rows.select_cos_sin()
    rotated = apply_rotary(rotated, cos, sin).to(qkv.dtype)
    store_kv(rotated[:, num_heads:], value, pools, rows.kv_slots)
    return rotated[:, :num_heads]
