# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton twin of `rotary_store`: one launch, float32 inside, rounded once.

A key's program reads and writes its value too, for a key of NaN marks what is not finite in either.
Attention's programs do the same with the rows of a window: see `rotate_run`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.attention.attention_plan_triton import chunk_begin
from spd.kernels.attention.cache_rows_triton import (
    KvPools,
    codes_of,
    entry_scales,
    is_not_finite,
)
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
def store_entries(pools, entry, key_first, key_second, value_first, value_second, mask, HALF):
    """Store keys and values [HEADS, BLOCK] in halves; see `replace_non_finite`."""
    is_faulty = are_faulty(key_first, key_second, value_first, value_second)[:, None]
    to_key = pools.key_pages + entry
    tl.store(to_key, tl.where(is_faulty, float("nan"), key_first), mask=mask)
    tl.store(to_key + HALF, tl.where(is_faulty, float("nan"), key_second), mask=mask)
    to_value = pools.value_pages + entry
    first = tl.where(is_not_finite(value_first), 0.0, value_first)
    second = tl.where(is_not_finite(value_second), 0.0, value_second)
    tl.store(to_value, first.to(pools.value_pages.dtype.element_ty), mask=mask)
    tl.store(to_value + HALF, second.to(pools.value_pages.dtype.element_ty), mask=mask)


@triton.jit
def store_codes_of_entries(
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


@triton.jit
def rotate_heads(
    qkv, cos, sin, qk_weight, epsilon, row, head, position, is_asked,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return heads [R] of rows [R] of a projection, rotated, as two halves [R, BLOCK] float32.

    Rows have WIDTH elements, halves HALF. position: of each row's angles. Then return which
    elements are asked for, and the place of each in the projection.
    """
    D: tl.constexpr = 2 * HALF
    column = tl.arange(0, BLOCK)[None, :]
    mask = is_asked[:, None] & (column < HALF)
    source = qkv + row[:, None] * WIDTH + head[:, None] * D + column
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    angle = position[:, None] * D + column
    cosine = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle + HALF, mask=mask, other=0.0).to(tl.float32)
    if qk_weight is not None:
        scales = qk_weight + head[:, None] * D + column
        inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + epsilon)[:, None]
        x = x * inverse * tl.load(scales, mask=mask, other=0.0).to(tl.float32)
        y = y * inverse * tl.load(scales + HALF, mask=mask, other=0.0).to(tl.float32)
    return x * cosine - y * sine, y * cosine + x * sine, mask, source


@triton.jit
def store_queries(
    query, first, second, row, head, mask,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store rotated query heads [R] of rows [R]."""
    to = query + row[:, None] * (2 * H * HALF) + head[:, None] * (2 * HALF)
    to += tl.arange(0, BLOCK)[None, :]
    tl.store(to, first.to(query.dtype.element_ty), mask=mask)
    tl.store(to + HALF, second.to(query.dtype.element_ty), mask=mask)


@triton.jit
def store_keys(
    pools, source, first, second, head, slot, mask,
    K: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Store rotated key heads [R], and the value of each, in entries `slot` [R].

    source: places of the keys in the projection.
    """
    D: tl.constexpr = 2 * HALF
    first = first.to(source.dtype.element_ty)
    second = second.to(source.dtype.element_ty)
    value_first = tl.load(source + K * D, mask=mask, other=0.0).to(tl.float32)
    value_second = tl.load(source + K * D + HALF, mask=mask, other=0.0).to(tl.float32)
    entry = slot[:, None] * (K * D) + head[:, None] * D + tl.arange(0, BLOCK)[None, :]
    if pools.key_scales is not None:
        to_scale = slot // PAGE * (K * PAGE) + head * PAGE + slot % PAGE
        store_codes_of_entries(
            pools, entry, to_scale, first.to(tl.float32), second.to(tl.float32), value_first,
            value_second, mask, HALF,
        )  # fmt: skip
    else:
        store_entries(pools, entry, first, second, value_first, value_second, mask, HALF)


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_slots"])
def rotary_store_kernel(
    qkv, cos, sin, positions, kv_slots, qk_weight, pools, query, epsilon,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate and store HEADS of one row's H + K heads of queries and keys."""
    wait_and_release(PDL)
    row = tl.full((HEADS,), tl.program_id(0), tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first, second, mask, source = rotate_heads(
        qkv, cos, sin, qk_weight, epsilon, row, head, tl.load(positions + row), head < H + K,
        (H + 2 * K) * 2 * HALF, HALF, BLOCK,
    )  # fmt: skip
    is_query = mask & (head < H)[:, None]
    store_queries(query, first, second, row, head, is_query, H, HALF, BLOCK)
    is_key = mask & (head >= H)[:, None]
    slot = tl.load(kv_slots + row)
    store_keys(pools, source, first, second, head - H, slot, is_key, K, HALF, BLOCK, PAGE)


class Projection(NamedTuple):
    """A window's queries, keys and values before their rotation, and what they are rotated by.

    Tensors as in `rotary_store`: a kernel has pointers in their place.
    """

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    qk_weight: Tensor | None
    epsilon: float


@triton.jit
def rotate_rows(
    projection, angles, token, head, is_row,
    K: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Return heads [R] of a projection's rows `token` [R] as `rotate_heads` does."""
    position = tl.load(angles + token, mask=is_row, other=0)
    return rotate_heads(
        projection.qkv, projection.cos, projection.sin, projection.qk_weight, projection.epsilon,
        token, head, position, is_row, (K * GROUPS + 2 * K) * 2 * HALF, HALF, BLOCK_HALF,
    )  # fmt: skip


@triton.jit
def rotate_run(
    projection, query, pools, positions, angles, kv_slots, slot, head, first_row, tile,
    chunk, run, queries,
    K, GROUPS, HALF, BLOCK_HALF: tl.constexpr, ROWS: tl.constexpr, PAGE, SMALL, TWICE_FROM,
    LARGE_FROM,
):  # fmt: skip
    """Rotate a tile of queries, and those keys of its slot's window that lie in a run.

    Queries are written to `query`, keys and values to their entries, ROWS at a time, all visible to
    this program afterwards. Other programs may write the same bits: none reads what only another
    one has written.
    """
    end_row = tl.minimum(first_row + tile, queries * GROUPS)
    for start in range(first_row, end_row, ROWS):
        row = start + tl.arange(0, ROWS)
        token = slot * queries + row // GROUPS
        at = head * GROUPS + row % GROUPS
        first, second, mask, source = rotate_rows(
            projection, angles, token, at, row < end_row, K, GROUPS, HALF, BLOCK_HALF
        )
        store_queries(query, first, second, token, at, mask, K * GROUPS, HALF, BLOCK_HALF)
    begin = chunk_begin(chunk, SMALL, TWICE_FROM, LARGE_FROM)
    end = chunk_begin(chunk + run, SMALL, TWICE_FROM, LARGE_FROM)
    # Positions ascend in a slot. Most runs end before its window.
    keys = tl.where(tl.load(positions + slot * queries) < end, queries, 0)
    for start in range(0, keys, ROWS):
        row = start + tl.arange(0, ROWS)
        token = slot * queries + row
        position = tl.load(positions + token, mask=row < queries, other=-1)
        is_inside = (position >= begin) & (position < end)
        of_key = tl.full((ROWS,), K * GROUPS, tl.int32) + head
        first, second, mask, source = rotate_rows(
            projection, angles, token, of_key, is_inside, K, GROUPS, HALF, BLOCK_HALF
        )
        entry = tl.load(kv_slots + token, mask=is_inside, other=0)
        store_keys(
            pools, source, first, second, of_key - K * GROUPS, entry, mask, K, HALF, BLOCK_HALF,
            PAGE,
        )  # fmt: skip
    tl.debug_barrier()


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
    sizes = {"H": num_heads, "K": kv_heads, "HALF": pairs, "BLOCK": power_of_two(pairs)}
    sizes |= {"HEADS": HEADS_A_PROGRAM, "num_warps": 1}
    rotary_store_kernel[(count, ceil_div(num_heads + kv_heads, HEADS_A_PROGRAM))](
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
