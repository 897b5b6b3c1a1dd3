# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton twin of `rotary_store`: one launch, float32 inside, rounded once.

A key's program reads its value too, for a key of NaN marks what is not finite in either. Where
pools are codes it also writes the value, and no program is a value's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.attention.attention_kernels_triton import is_not_finite
from spd.kernels.attention.cache_rows_triton import KvPools, codes_of, entry_scales
from spd.kernels.attention.rotary_store import Pools, RotatedRows, count_pairs
from spd.kernels.launch import ceil_div, pdl_options, power_of_two
from spd.kernels.overlap_triton import wait_and_release

HEADS_A_PROGRAM = 4
"""Heads of one program: 16-byte loads of 128 16-bit elements a head fill a warp, which sums a
head."""


@triton.jit
def are_faulty(key_first, key_second, value_first, value_second):
    """Return which heads [HEADS] have keys or values that are not finite, given in halves."""
    keys = is_not_finite(key_first) | is_not_finite(key_second)
    values = is_not_finite(value_first) | is_not_finite(value_second)
    return tl.max((keys | values).to(tl.int32), 1) > 0


@triton.jit
def largest_of(first, second):
    """Return the largest absolute value of rows in halves [HEADS, BLOCK]."""
    return tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))


@triton.jit
def store_codes(to, first, second, scale, mask, HALF):
    """Store the codes of rows [HEADS, BLOCK] in halves, which have a scale each."""
    tl.store(to, codes_of(first, scale[:, None]), mask=mask)
    tl.store(to + HALF, codes_of(second, scale[:, None]), mask=mask)


@triton.jit
def store_entries(
    pools, entry, to_scale, key_first, key_second, value_first, value_second, mask, HALF
):  # fmt: skip
    """Round and store keys and values float32 [HEADS, BLOCK] in halves, and their scales [HEADS].

    See `cache_rows.round_entries`.
    """
    is_faulty = are_faulty(key_first, key_second, value_first, value_second)
    key_scale, value_scale, is_faulty = entry_scales(
        largest_of(key_first, key_second), largest_of(value_first, value_second), is_faulty
    )
    store_codes(pools.key_pages + entry, key_first, key_second, key_scale, mask, HALF)
    store_codes(pools.value_pages + entry, value_first, value_second, value_scale, mask, HALF)
    is_key = tl.max(mask.to(tl.int32), 1) > 0
    key_scale = tl.where(is_faulty, float("nan"), key_scale)
    tl.store(pools.key_scales + to_scale, key_scale, mask=is_key)
    tl.store(pools.value_scales + to_scale, value_scale, mask=is_key)


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_slots"])
def rotary_store_kernel(
    qkv, cos, sin, positions, kv_slots, qk_weight, pools, query, epsilon,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate and store HEADS of one row's H + 2K heads, each two halves of HALF elements padded to
    BLOCK."""
    wait_and_release(PDL)
    D: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    within = column < HALF
    position = tl.load(positions + row)
    slot = tl.load(kv_slots + row)
    source = qkv + row * ((H + 2 * K) * D) + head[:, None] * D + column[None, :]
    mask = (head < H + 2 * K)[:, None] & within[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + position * D + column, mask=within, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + position * D + HALF + column, mask=within, other=0.0).to(tl.float32)[
        None, :
    ]

    x = first
    y = second
    if qk_weight is not None:
        scales = qk_weight + head[:, None] * D + column[None, :]
        has_scale = (head < H + K)[:, None] & within[None, :]
        inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + epsilon)[:, None]
        x = x * inverse * tl.load(scales, mask=has_scale, other=0.0).to(tl.float32)
        y = y * inverse * tl.load(scales + HALF, mask=has_scale, other=0.0).to(tl.float32)
    rotated_first = (x * cosine - y * sine).to(query.dtype.element_ty)
    rotated_second = (y * cosine + x * sine).to(query.dtype.element_ty)

    to_query = query + row * (H * D) + head[:, None] * D + column[None, :]
    is_query = (head < H)[:, None] & within[None, :]
    tl.store(to_query, rotated_first, mask=is_query)
    tl.store(to_query + HALF, rotated_second, mask=is_query)
    is_key = ((head >= H) & (head < H + K))[:, None] & within[None, :]
    value_first = tl.load(source + K * D, mask=is_key, other=0.0).to(tl.float32)
    value_second = tl.load(source + K * D + HALF, mask=is_key, other=0.0).to(tl.float32)
    entry = slot * (K * D) + (head - H)[:, None] * D + column[None, :]
    if pools.key_scales is not None:
        to_scale = slot // PAGE * (K * PAGE) + (head - H) * PAGE + slot % PAGE
        store_entries(
            pools, entry, to_scale, rotated_first.to(tl.float32), rotated_second.to(tl.float32),
            value_first, value_second, is_key, HALF,
        )  # fmt: skip
    else:
        is_faulty = are_faulty(rotated_first, rotated_second, value_first, value_second)[:, None]
        to_key = pools.key_pages + entry
        tl.store(to_key, tl.where(is_faulty, float("nan"), rotated_first), mask=is_key)
        tl.store(to_key + HALF, tl.where(is_faulty, float("nan"), rotated_second), mask=is_key)
        to_value = pools.value_pages + (entry - K * D)
        is_value = (head >= H + K)[:, None] & mask
        first = tl.where(is_not_finite(first), 0.0, first).to(pools.value_pages.dtype.element_ty)
        second = tl.where(is_not_finite(second), 0.0, second).to(pools.value_pages.dtype.element_ty)
        tl.store(to_value, first, mask=is_value)
        tl.store(to_value + HALF, second, mask=is_value)


def rotary_store(
    qkv: Tensor,
    rows: RotatedRows,
    qk_weight: Tensor | None,
    epsilon: float,
    pools: Pools,
    num_heads: int,
) -> Tensor:
    """Launch `Kernels.rotary_store`.

    All tensors but the rows' indices are contiguous, positions not None.
    """
    assert rows.positions is not None
    kv_heads, size = pools[0].shape[2:]
    pairs = count_pairs(size)
    count = qkv.shape[0]
    query = torch.empty((count, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    written = num_heads + kv_heads * (1 if len(pools) > 2 else 2)
    sizes = {"H": num_heads, "K": kv_heads, "HALF": pairs, "BLOCK": power_of_two(pairs)}
    sizes |= {"HEADS": HEADS_A_PROGRAM, "num_warps": 1}
    rotary_store_kernel[(count, ceil_div(written, HEADS_A_PROGRAM))](
        qkv.contiguous(),
        rows.cos,
        rows.sin,
        rows.positions.contiguous(),
        rows.kv_slots.contiguous(),
        qk_weight,
        KvPools.of(pools),
        query,
        epsilon,
        PAGE=pools[0].shape[1],
        **sizes,
        **pdl_options(qkv.device),
    )
    return query
