# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton twin of `rotary_store`: one launch, float32 inside, rounded once.

A key's program reads its value too, for a key of NaN marks what is not finite in either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.attention.attention_kernels_triton import is_not_finite
from spd.kernels.attention.rotary_store import Pools, RotatedRows, count_pairs
from spd.kernels.launch import ceil_div, pdl_options, power_of_two
from spd.kernels.overlap_triton import wait_and_release

HEADS_A_PROGRAM = 4
"""Heads of one program: 16-byte loads of 128 16-bit elements a head fill a warp, which sums a
head."""


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_slots"])
def rotary_store_kernel(
    qkv, cos, sin, positions, kv_slots, qk_weight, key_pages, value_pages, query, epsilon,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
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
    rotated_first = x * cosine - y * sine
    rotated_second = y * cosine + x * sine

    to_query = query + row * (H * D) + head[:, None] * D + column[None, :]
    is_query = (head < H)[:, None] & within[None, :]
    tl.store(to_query, rotated_first.to(query.dtype.element_ty), mask=is_query)
    tl.store(to_query + HALF, rotated_second.to(query.dtype.element_ty), mask=is_query)
    to_key = key_pages + slot * (K * D) + (head - H)[:, None] * D + column[None, :]
    is_key = ((head >= H) & (head < H + K))[:, None] & within[None, :]
    rotated_first = rotated_first.to(key_pages.dtype.element_ty)
    rotated_second = rotated_second.to(key_pages.dtype.element_ty)
    value_first = tl.load(source + K * D, mask=is_key, other=0.0).to(tl.float32)
    value_second = tl.load(source + K * D + HALF, mask=is_key, other=0.0).to(tl.float32)
    is_faulty = (
        is_not_finite(rotated_first)
        | is_not_finite(rotated_second)
        | is_not_finite(value_first)
        | is_not_finite(value_second)
    ).to(tl.int32)
    is_faulty = (tl.max(is_faulty, 1) > 0)[:, None]
    tl.store(to_key, tl.where(is_faulty, float("nan"), rotated_first), mask=is_key)
    tl.store(to_key + HALF, tl.where(is_faulty, float("nan"), rotated_second), mask=is_key)
    to_value = value_pages + slot * (K * D) + (head - H - K)[:, None] * D + column[None, :]
    is_value = (head >= H + K)[:, None] & mask
    first = tl.where(is_not_finite(first), 0.0, first)
    second = tl.where(is_not_finite(second), 0.0, second)
    tl.store(to_value, first.to(value_pages.dtype.element_ty), mask=is_value)
    tl.store(to_value + HALF, second.to(value_pages.dtype.element_ty), mask=is_value)


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
    keys, values = pools
    sizes = {"H": num_heads, "K": kv_heads, "HALF": pairs, "BLOCK": power_of_two(pairs)}
    sizes |= {"HEADS": HEADS_A_PROGRAM, "num_warps": 1}
    rotary_store_kernel[(count, ceil_div(num_heads + 2 * kv_heads, HEADS_A_PROGRAM))](
        qkv.contiguous(),
        rows.cos,
        rows.sin,
        rows.positions.contiguous(),
        rows.kv_slots.contiguous(),
        qk_weight,
        keys,
        values,
        query,
        epsilon,
        **sizes,
        **pdl_options(qkv.device),
    )
    return query
