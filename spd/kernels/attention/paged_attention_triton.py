"""Triton twin of `paged_attention`: split-KV attention whose splits are fixed by the absolute position.

A plan kernel lists the (slot, chunk) pairs that hold context, a persistent grid attends each chunk for
itself, and a last kernel combines a row's chunks in their order. A row's bits depend on its query, its
position and the keys up to it: other rows only bring more tiles, more chunks that the row never reads,
or keys that are masked and add exact zeros. Chunks that a layer's sliding window has left behind are not
listed, so every window has a list of its own.

Of a prompt chunk a program takes a tile of one head's rows over all their keys: nothing but the rows and the
start decides a bit. Source: Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spd.kernels.attention.attention_chunks import LARGE_CHUNK, LARGE_FROM, SMALL_CHUNK, num_chunks
from spd.kernels.attention.attention_kernels_triton import (
    LOG2_E,
    attend_chunk_kernel,
    combine_chunks_kernel,
    plan_attention_kernel,
    prefill_attention_kernel,
)
from spd.kernels.attention.paged_attention import (
    AttentionHeads,
    AttentionParams,
    AttentionPlan,
    Windows,
)
from spd.kernels.attention.rotary_store import Pools
from spd.kernels.launch import Device, ceil_div, device_properties, pdl_options, power_of_two

ROW_TILE = 64
KEY_BLOCK = 64
"""The least rows Hopper's matrix units take at once: padding them costs no time where memory is the limit,
while a second tile would read the keys a second time. float32 has no such units, and elsewhere wide heads
leave no room for stages beside so many rows; see `tile_shape`."""
RESERVED_BYTES = 4096
"""Of shared memory, for what a program sums across its threads."""
PROGRAMS_A_PROCESSOR = 2
"""As many as shared memory holds at a time."""
WARPS = (8, 4)
"""Off Hopper and on it: four hold a tile's sums there alone, of heads of at most `WIDE` elements."""
WIDE = 256  # elements of a head
COMBINED_VALUES = 4096
COMBINED_CHUNKS = (16, 32)
"""Values of results that a warp combines at a time, and chunks, from and to: more need too many registers."""
PLANNED_CHUNKS = 128


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
    """Work of one forward pass: a list for each sliding window, and float32 room for the results."""

    positions: Tensor  # [S, Q] int64
    valid: Tensor  # [S, Q] bool
    lists: Mapping[int | None, ChunkList]
    partial: (
        Tensor  # [S, max_chunks, K, Q * H / K, D] float32: values weighted by exp2(score - maximum)
    )
    stats: Tensor  # [S, max_chunks, K, Q * H / K, 2] float32: maximum and sum of the weights
    heads: AttentionHeads
    max_chunks: int
    programs: int


def tile_shape(dtype: torch.dtype, head_dim: int, device: Device) -> tuple[int, int, int]:
    """Rows and keys a tile, and pipeline stages: functions of model and device, never of the rows."""
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
    width = max(16, power_of_two(head_dim)) * dtype.itemsize
    room = device.shared - RESERVED_BYTES - rows * width  # for stages of keys and values each
    return rows, keys, max(1, min(stages, room // (2 * keys * width)))


def chunk_constants() -> dict[str, int]:
    return {"SMALL": SMALL_CHUNK, "LARGE": LARGE_CHUNK, "FROM": LARGE_FROM}


def plan_attention(
    windows: Windows, heads: AttentionHeads, page_size: int, dtype: torch.dtype
) -> AttentionPlan:
    """A small kernel for each sliding window, no look by the host: lengths are the device's.

    For a whole prompt chunk nothing is prepared. S is below 32768; the room taken goes by the page table's
    width. Raises ValueError unless pages are of a power of two positions, 16 or more, for a matrix unit
    takes so many keys at once.
    """
    if windows.chunk_start is not None:
        return ChunkPlan(windows.page_table.contiguous(), windows.chunk_start, heads.first_key)
    if page_size < 16 or page_size != power_of_two(page_size):
        raise ValueError(f"pages of {page_size} positions: a power of two from 16 on is needed")
    slots, width = windows.positions.shape
    device = windows.positions.device
    capacity = windows.page_table.shape[1] * page_size
    max_chunks = num_chunks(capacity)
    results = slots * max_chunks * heads.num_heads * width

    def empty(dtype: torch.dtype, size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    plan = SplitPlan(
        windows.page_table.contiguous(),
        windows.positions.contiguous(),
        windows.valid.contiguous(),
        {
            sliding: ChunkList(
                *(empty(torch.int32, size) for size in (slots, slots * max_chunks, 1))
            )
            for sliding in heads.sliding
        },
        partial=empty(torch.float32, results * heads.head_dim),
        stats=empty(torch.float32, results * 2),
        heads=heads,
        max_chunks=max_chunks,
        programs=PROGRAMS_A_PROCESSOR * device_properties(device).processors,
    )
    sizes = {
        "SLOTS": power_of_two(slots),
        "BLOCK": PLANNED_CHUNKS,
        "num_warps": 1,
        **chunk_constants(),
    }
    for sliding, chunks in plan.lists.items():
        plan_attention_kernel[(slots,)](
            *(
                plan.positions,
                plan.valid,
                chunks.last,
                chunks.items,
                chunks.count,
                slots,
                width,
                max_chunks,
            ),
            SLIDING=sliding,
            **sizes,
        )
    return plan


def score_scale(params: AttentionParams) -> float:
    """What kernels multiply a product by: weights are powers of two; a score to be capped is in caps."""
    return params.scale * LOG2_E if params.softcap is None else params.scale / params.softcap


def attend_chunks(
    kernel: Any,
    query: Tensor,
    pools: Sequence[Tensor],
    plan: SplitPlan,
    params: AttentionParams,
    **options: Any,
) -> None:
    """Launch a kernel over the listed chunks of all slots; the results are the plan's."""
    slots, width = query.shape[:2]
    chunks = plan.lists[params.sliding]
    table = plan.page_table
    kernel[(plan.programs,)](
        *(
            query.contiguous(),
            *pools,
            table,
            plan.positions,
            chunks.last,
            chunks.items,
            chunks.count,
        ),
        *(
            plan.partial,
            plan.stats,
            score_scale(params),
            slots,
            width,
            table.shape[1],
            plan.max_chunks,
        ),
        PAGE=pools[0].shape[1],
        FIRST=plan.heads.first_key,
        **options,
        **chunk_constants(),
        **pdl_options(query.device),
    )


def combine_chunks(out: Tensor, plan: SplitPlan, sinks: Tensor | None, **options: Any) -> Tensor:
    """Fill out [S, Q, H, D] with the sums of each row's chunks, and of its head's sink [H]."""
    slots, width, heads, size = out.shape
    least, most = COMBINED_CHUNKS
    combine_chunks_kernel[(heads, slots * width)](
        *(plan.partial, plan.stats, plan.positions, plan.valid, sinks, out, width, plan.max_chunks),
        BLOCK=max(least, min(most, COMBINED_VALUES // power_of_two(size))),
        **options,
        **chunk_constants(),
        **pdl_options(out.device),
    )
    return out


def paged_attention(
    query: Tensor, pools: Pools, plan: AttentionPlan, params: AttentionParams
) -> Tensor:
    """With a plan of this file; invalid rows give zeros. The pools are contiguous."""
    if isinstance(plan, ChunkPlan):
        return _attend_prompt(query[0], pools, plan, params)[None]
    assert isinstance(plan, SplitPlan)
    slots, width, num_heads, size = query.shape
    kv_heads = plan.heads.num_kv_heads
    facts = device_properties(query.device)
    tile, block, stages = tile_shape(query.dtype, size, facts)
    shape: dict[str, Any] = {"K": kv_heads, "GROUPS": num_heads // kv_heads, "D": size}
    shape |= {"BLOCK_D": max(16, power_of_two(size)), "SLIDING": params.sliding}
    tiles = {"SOFTCAP": params.softcap, "TILE": tile, "BLOCK": block, "num_stages": stages}
    warps = WARPS[facts.capability[0] == 9 and size <= WIDE]
    attend_chunks(
        attend_chunk_kernel, query, pools, plan, params, num_warps=warps, **tiles, **shape
    )
    out = torch.empty((slots, width, num_heads, size), dtype=query.dtype, device=query.device)
    return combine_chunks(out, plan, params.sinks, num_warps=1 + (size > WIDE), **shape)


def _attend_prompt(query: Tensor, pools: Pools, plan: ChunkPlan, params: AttentionParams) -> Tensor:
    """Attend query [Q, H, D] at the positions from the plan's start on; returns [Q, H, D]."""
    rows, num_heads, size = query.shape
    page_size, kv_heads = pools[0].shape[1:3]
    out = torch.empty((rows, num_heads, size), dtype=query.dtype, device=query.device)
    tile, block, stages = tile_shape(query.dtype, size, device_properties(query.device))
    shape = {"K": kv_heads, "GROUPS": num_heads // kv_heads, "D": size, "PAGE": page_size}
    shape |= {
        "BLOCK_D": max(16, power_of_two(size)),
        "TILE": tile,
        "BLOCK": block,
        "num_stages": stages,
    }
    where = plan.page_table[0], params.sinks, out, score_scale(params), rows, plan.start
    prefill_attention_kernel[(num_heads, ceil_div(rows, tile))](
        *(query.contiguous(), *pools, *where),
        FIRST=plan.first_key,
        SLIDING=params.sliding,
        SOFTCAP=params.softcap,
        num_warps=WARPS[size <= WIDE],
        **shape,
    )
    return out
