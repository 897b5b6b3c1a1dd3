"""What lies between the fused projection and attention: per-head norm, rotation, and the cache write."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.linear.norm_gate import rms_norm

Pools = tuple[Tensor, Tensor]  # keys and values of all pages [P, page, K, D]


@dataclass(frozen=True)
class RotatedRows:
    """How T rows are rotated, and where in the pools their entries go."""

    cos: Tensor  # [M, D], whose halves repeat each other, in the rows' dtype or float32
    sin: Tensor  # as cos, but for the sign of its first half; see `apply_rotary`
    positions: (
        Tensor | None
    )  # int64 [T] below M; None (torch form only): cos and sin are the rows' own
    kv_slots: Tensor  # int64 [T] as in `store_kv`

    def select_cos_sin(self) -> tuple[Tensor, Tensor]:
        """The rows' own cosines and sines, for all heads: [T, 1, D]."""
        cos = self.cos
        sin = self.sin
        if self.positions is not None:
            cos = cos[self.positions]
            sin = sin[self.positions]
        return cos.unsqueeze(1), sin.unsqueeze(1)


def count_pairs(size: int) -> int:
    """How many pairs `size` values of a head are rotated in. Raises ValueError where they are odd."""
    if size % 2:
        raise ValueError(f"{size} values of a head cannot be rotated in pairs")
    return size // 2


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D], D even, by cos and sin [T, 1, D], whose halves repeat each other.

    `sin` carries the sign: its first half is negated, so that the partner is one half-swap away.
    Source: Su et al. 2021, in the half-split form of Hugging Face checkpoints.
    """
    first, second = torch.split(x, count_pairs(x.shape[-1]), dim=-1)
    # Separate roundings: a fused multiply-add rounds otherwise in vector bodies than in scalar tails.
    return x * cos + torch.cat((second, first), dim=-1) * sin


def is_known_finite(x: Tensor) -> bool:
    """Whether all of x is finite, where the host can look: on a GPU it does not wait to see."""
    return x.device.type == "cpu" and math.isfinite(x.sum())


def replace_non_finite(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [..., D] as they are kept: with no value that is not finite, but a key of NaN there.

    A row that does not see a position weighs its value by zero, and zero times infinity is NaN. A key of NaN
    does the same to those that see it, and to no others.
    """
    if is_known_finite(key) and is_known_finite(value):
        return key, value
    wild = ~(key.isfinite().all(-1, keepdim=True) & value.isfinite().all(-1, keepdim=True))
    return key.masked_fill(wild, math.nan), value.nan_to_num(0.0, 0.0, 0.0)


def store_kv(key: Tensor, value: Tensor, pools: Pools, slots: Tensor) -> None:
    """Write key and value [T, K, D] to positions slots [T] of the pools, in place.

    A slot is page * page_size + offset. Rows that must not be kept
    point into the trash page. Of rows that share a slot, one wins, whichever. See `replace_non_finite`.
    """
    for pool, rows in zip(pools, replace_non_finite(key, value), strict=True):
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
    rotated = apply_rotary(rotated, *rows.select_cos_sin()).to(qkv.dtype)
    store_kv(rotated[:, num_heads:], value, pools, rows.kv_slots)
    return rotated[:, :num_heads]
