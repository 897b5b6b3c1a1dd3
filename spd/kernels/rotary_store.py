"""What lies between the fused projection and attention: per-head norm, rotation, and the cache write."""

from __future__ import annotations

from torch import Tensor

from spd.kernels.rms_norm import rms_norm
from spd.kernels.rotary import apply_rotary
from spd.kernels.store_kv import store_kv


def rotary_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    kv_slots: Tensor,
    qk_weight: Tensor | None,
    epsilon: float,
    key_pages: Tensor,
    value_pages: Tensor,
    num_heads: int,
) -> Tensor:
    """Rotate a fused projection's queries and keys, write keys and values to the pools, return the queries.

    qkv [T, (H + 2K) * D], D even: queries, keys, values; cos and sin [M, D], whose halves repeat each other
    but for the sign of the sine's first half (see `apply_rotary`), in qkv's dtype or float32; positions
    int64 [T] below M, or None (torch form only) where cos and sin are the rows' own [T, D]; kv_slots
    int64 [T] as in `store_kv`; qk_weight [H + K, D] or None: the norm's scale of every rotated head,
    with epsilon; num_heads is H. key_pages and value_pages [P, page, K, D] are written in place.
    Returns [T, H, D] in qkv's dtype.
    """
    kv_heads, size = key_pages.shape[2:]
    rotated_heads = num_heads + kv_heads
    fused = qkv.view(-1, rotated_heads + kv_heads, size)
    rotated, value = fused[:, :rotated_heads], fused[:, rotated_heads:]
    if qk_weight is not None:
        rotated = rms_norm(rotated, qk_weight, epsilon)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    rotated = apply_rotary(rotated, cos.unsqueeze(1), sin.unsqueeze(1)).to(qkv.dtype)
    store_kv(rotated[:, num_heads:], value, key_pages, value_pages, kv_slots)
    return rotated[:, :num_heads]
