"""Triton twin of `paged_attention`: split-KV attention whose splits are fixed by the absolute
position.

A plan kernel lists the (slot, chunk) pairs that hold context, a persistent grid attends to each
chunk separately, and a last kernel combines a row's chunks in their order. A row's bits depend on
its query, its position and the keys up to it: other rows only add tiles, chunks that the row never
reads, or keys that are masked and add exact zeros. Chunks before a layer's sliding window are not
listed, so every window has its own list.

For a prompt chunk a program attends a tile of one head's rows to all their keys: bits depend on the
rows and the start alone. Source: Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spd.kernels.attention.attention_chunks import (
    CODE_CHUNKS,
    LARGE_CHUNK,
    LARGE_FROM,
    SMALL_CHUNK,
    num_chunks,
)
from spd.kernels.attention.attention_kernels_triton import (
    LOG2_E,
    attend_chunk_kernel,
    combine_chunks_kernel,
    plan_attention_kernel,
    prefill_attention_kernel,
)
from spd.kernels.attention.cache_rows_triton import KvPools
from spd.kernels.attention.paged_attention import (
    AttentionHeads,
    AttentionParams,
    AttentionPlan,
    Windows,
)
from spd.kernels.attention.rotary_store import Pools
from spd.kernels.launch import Device, ceil_div, device_properties, pdl_options, power_of_two

ROW_TILE = 64
"""Rows of a tile: the minimum that Hopper's matrix units multiply at once.

Padding them costs no time where memory is the limit, while a second tile would read the keys a
second time. float32 has no such units, and on other devices wide heads leave no shared memory for
pipeline stages next to so many rows; see `tile_shape`.
"""
KEY_BLOCK = 64
"""Keys that a tile is multiplied by at a time; see `tile_shape`."""
RESERVED_BYTES = 4096
"""Shared memory reserved for sums across a program's threads."""
PROGRAMS_A_PROCESSOR = 2
"""Programs whose shared memory fits a processor at a time."""
WARPS = (8, 4)
"""Warps of a program, on other devices and on Hopper.

Four warps' registers hold a tile's sums on Hopper only, for heads of at most `WIDE` elements.
"""
WIDE = 256
"""Elements of a head."""
COMBINED_VALUES = 4096
"""Values that a warp combines at a time; more need too many registers."""
COMBINED_CHUNKS = (16, 32)
"""The minimum and the maximum of chunks that a warp combines at a time."""
PLANNED_CHUNKS = 128
"""Chunks that the plan's kernel lists at a time."""


@dataclass(frozen=True)
class ChunkList:
    """Chunks to attend, on the device: items [0, count)."""

    last: Tensor  # [S] int32: the last valid position, -1 if none
    items: Tensor  # [S * max_chunks] int32: slot << 16 | chunk
    count: Tensor  # [1] int32


@dataclass(frozen=True)
class ChunkPlan(AttentionPlan):
    """A prompt chunk of one slot, which has a program of its own."""

    start: int
    first_key: int


@dataclass(frozen=True)
class SplitPlan(AttentionPlan):
    """The chunk lists of one forward pass, one a sliding window, and float32 buffers for partial
    results."""

    positions: Tensor  # [S, Q] int64
    valid: Tensor  # [S, Q] bool
    row_last: Tensor | None  # [S, Q] int64: each row's last key; None: its position
    lists: Mapping[int | None, ChunkList]
    partial: Tensor
    """[S, max_chunks, K, Q * H / K, D] float32: values weighted by exp2(score - maximum)."""
    stats: Tensor  # [S, max_chunks, K, Q * H / K, 2] float32: maximum and sum of the weights
    heads: AttentionHeads
    page_size: int
    max_chunks: int
    programs: int


def tile_shape(
    dtype: torch.dtype, head_dim: int, device: Device, *, rounded: bool = False
) -> tuple[int, int, int]:
    """Return rows and keys a tile, and pipeline stages, by model and device, independent of the
    rows.

    rounded: True if keys and values are codes. A block of each is also held in the dtype then.
    """
    wide = head_dim > 128
    if dtype == torch.float32:
        rows = ROW_TILE // 4
        keys = KEY_BLOCK // (4 if wide else 2)
        stages = 2
    else:
        rows = (
            ROW_TILE // 2 if wide and (device.capability[0] != 9 or head_dim > WIDE) else ROW_TILE
        )
        keys = KEY_BLOCK // (2 if wide else 1)
        stages = 2 if wide else 3
    size = max(16, power_of_two(head_dim))
    width = size * dtype.itemsize
    room = device.shared - RESERVED_BYTES - rows * width  # for stages of keys and values each
    if rounded:
        room -= 2 * keys * width
    stored = size if rounded else width
    return rows, keys, max(1, min(stages, room // (2 * keys * stored)))


def chunk_constants(heads: AttentionHeads) -> dict[str, int]:
    """Return the chunk sizes as constants of a kernel."""
    factor = CODE_CHUNKS if heads.rounded else 1
    return {"SMALL": SMALL_CHUNK * factor, "LARGE": LARGE_CHUNK * factor, "FROM": LARGE_FROM}


def plan_attention(
    windows: Windows, heads: AttentionHeads, page_size: int, dtype: torch.dtype
) -> AttentionPlan:
    """Launch `Kernels.plan_attention`: a small kernel a sliding window; the host reads no lengths.

    For a full prompt chunk nothing is launched. S is below 32768; buffers are sized by the page
    table's width. Raises ValueError unless pages hold a power of two of positions, 16 or more, the
    minimum of keys that a matrix unit multiplies at once.
    """
    if windows.chunk_start is not None:
        return ChunkPlan(windows.page_table.contiguous(), windows.chunk_start, heads.first_key)
    if page_size < 16 or page_size != power_of_two(page_size):
        raise ValueError(f"pages of {page_size} positions: a power of two from 16 on is needed")
    slots, width = windows.positions.shape
    device = windows.positions.device
    capacity = windows.page_table.shape[1] * page_size
    max_chunks = num_chunks(capacity, rounded=heads.rounded)
    results = slots * max_chunks * heads.num_heads * width

    def empty(dtype: torch.dtype, size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    plan = SplitPlan(
        windows.page_table.contiguous(),
        windows.positions.contiguous(),
        windows.valid.contiguous(),
        None if windows.last is None else windows.last.contiguous(),
        {
            sliding: ChunkList(
                last=empty(torch.int32, slots),
                items=empty(torch.int32, slots * max_chunks),
                count=empty(torch.int32, 1),
            )
            for sliding in heads.sliding
        },
        partial=empty(torch.float32, results * heads.head_dim),
        stats=empty(torch.float32, results * 2),
        heads=heads,
        page_size=page_size,
        max_chunks=max_chunks,
        programs=PROGRAMS_A_PROCESSOR * device_properties(device).processors,
    )
    sizes = {"SLOTS": power_of_two(slots), "BLOCK": PLANNED_CHUNKS, "num_warps": 1}
    for sliding, chunks in plan.lists.items():
        plan_attention_kernel[(slots,)](
            plan.positions,
            plan.valid,
            plan.row_last,
            chunks.last,
            chunks.items,
            chunks.count,
            slots,
            width,
            max_chunks,
            SLIDING=sliding,
            **sizes,
            **chunk_constants(heads),
        )
    return plan


def score_scale(params: AttentionParams) -> float:
    """Return the factor of products in kernels: with log2(e) for exp2, or 1 / softcap before
    capping."""
    return params.scale * LOG2_E if params.softcap is None else params.scale / params.softcap


def attend_chunks(
    kernel: Any,
    query: Tensor,
    pools: Sequence[KvPools | Tensor | None],
    plan: SplitPlan,
    params: AttentionParams,
    **options: Any,
) -> None:
    """Launch a kernel over the listed chunks of all slots; it writes to the plan's buffers."""
    slots, width = query.shape[:2]
    chunks = plan.lists[params.sliding]
    table = plan.page_table
    kernel[(plan.programs,)](
        query.contiguous(),
        *pools,
        table,
        plan.positions,
        chunks.last,
        chunks.items,
        chunks.count,
        plan.partial,
        plan.stats,
        score_scale(params),
        slots,
        width,
        table.shape[1],
        plan.max_chunks,
        PAGE=plan.page_size,
        FIRST=plan.heads.first_key,
        **options,
        **chunk_constants(plan.heads),
        **pdl_options(query.device),
    )


def combine_chunks(out: Tensor, plan: SplitPlan, sinks: Tensor | None, **options: Any) -> Tensor:
    """Fill out [S, Q, H, D] with the sums of each row's chunks and its head's sink [H].

    Return it.
    """
    slots, width, heads, size = out.shape
    min_chunks, max_chunks = COMBINED_CHUNKS
    combine_chunks_kernel[(heads, slots * width)](
        plan.partial,
        plan.stats,
        plan.positions,
        plan.valid,
        plan.row_last,
        sinks,
        out,
        width,
        plan.max_chunks,
        BLOCK=max(min_chunks, min(max_chunks, COMBINED_VALUES // power_of_two(size))),
        **options,
        **chunk_constants(plan.heads),
        **pdl_options(out.device),
    )
    return out


def paged_attention(
    query: Tensor, pools: Pools, plan: AttentionPlan, params: AttentionParams
) -> Tensor:
    """Launch `Kernels.paged_attention`; invalid rows give zeros. The pools are contiguous."""
    if isinstance(plan, ChunkPlan):
        return _attend_prompt(query[0], pools, plan, params)[None]
    assert isinstance(plan, SplitPlan)
    slots, width, num_heads, size = query.shape
    kv_heads = plan.heads.num_kv_heads
    device = device_properties(query.device)
    tile, block, stages = tile_shape(query.dtype, size, device, rounded=len(pools) > 2)
    shape: dict[str, Any] = {"K": kv_heads, "GROUPS": num_heads // kv_heads, "D": size}
    shape |= {"BLOCK_D": max(16, power_of_two(size)), "SLIDING": params.sliding}
    tiles = {"SOFTCAP": params.softcap, "TILE": tile, "BLOCK": block, "num_stages": stages}
    warps = WARPS[device.capability[0] == 9 and size <= WIDE]
    attend_chunks(
        kernel=attend_chunk_kernel,
        query=query,
        pools=(KvPools.of(pools),),
        plan=plan,
        params=params,
        row_last=plan.row_last,
        num_warps=warps,
        **tiles,
        **shape,
    )
    out = torch.empty((slots, width, num_heads, size), dtype=query.dtype, device=query.device)
    return combine_chunks(out, plan, params.sinks, num_warps=1 + (size > WIDE), **shape)


def _attend_prompt(query: Tensor, pools: Pools, plan: ChunkPlan, params: AttentionParams) -> Tensor:
    """Attend query [Q, H, D] at the positions from the plan's start on: [Q, H, D]."""
    rows, num_heads, size = query.shape
    page_size, kv_heads = pools[0].shape[1:3]
    out = torch.empty((rows, num_heads, size), dtype=query.dtype, device=query.device)
    device = device_properties(query.device)
    tile, block, stages = tile_shape(query.dtype, size, device, rounded=len(pools) > 2)
    shape = {"K": kv_heads, "GROUPS": num_heads // kv_heads, "D": size, "PAGE": page_size}
    shape |= {
        "BLOCK_D": max(16, power_of_two(size)),
        "TILE": tile,
        "BLOCK": block,
        "num_stages": stages,
    }
    prefill_attention_kernel[(num_heads, ceil_div(rows, tile))](
        query.contiguous(),
        KvPools.of(pools),
        plan.page_table[0],
        params.sinks,
        out,
        score_scale(params),
        rows,
        plan.start,
        FIRST=plan.first_key,
        SLIDING=params.sliding,
        SOFTCAP=params.softcap,
        num_warps=WARPS[size <= WIDE],
        **shape,
    )
    return out
