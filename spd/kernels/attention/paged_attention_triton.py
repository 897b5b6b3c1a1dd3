"""Triton twin of `paged_attention`: split-KV attention whose splits are fixed by the absolute
position.

A plan kernel lists runs of a slot's chunks that hold context, the programs of a grid attend to them
in turn, each chunk separately, and the last one of a tile of rows combines the chunks in their
order. A row's bits depend on its query, its position and the keys up to it: other rows only add
tiles, chunks that the row never reads, or keys that are masked and add exact zeros. Chunks before a
layer's sliding window are not listed, so every window has its own list.

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
    LARGE_FROM,
    TWICE_FROM,
    num_chunks,
    small_chunk,
)
from spd.kernels.attention.attention_kernels_triton import (
    attend_chunk_kernel,
    prefill_attention_kernel,
)
from spd.kernels.attention.attention_plan_triton import plan_attention_kernel
from spd.kernels.attention.cache_rows_triton import KvPools
from spd.kernels.attention.combine_triton import LOG2_E, combine_chunks_kernel
from spd.kernels.attention.paged_attention import (
    AttentionHeads,
    AttentionParams,
    AttentionPlan,
    Windows,
)
from spd.kernels.attention.rotary_store import Pools, RotatedRows
from spd.kernels.attention.rotary_store_triton import HEADS_A_PROGRAM, Projection, rotary_store
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
MAX_PROGRAMS = 2
"""The most programs a processor: more would only share the memory's rate."""
PROGRAM_BYTES = 1024
"""Shared memory that each program takes besides its own, of which none is left for one more."""
WARPS = (8, 4)
"""Warps of a program that has a processor for itself, and of each of two that share one.

So either holds all registers. Fewer warps repeat less of what each has to know of a block.
"""
WIDE = 256
"""Elements of a head, of which four warps' registers hold a prompt's tile."""
MAX_REGISTERS = 255
"""Registers of a thread whose program has a processor for itself: all that there are.

The assembler would rather keep some values in memory, for the sake of a second program.
"""
COMBINED_VALUES = 4096
"""Values of a row that make a block of chunks; a block's sums are added to those before it."""
COMBINED_CHUNKS = (16, 32)
"""The minimum and the maximum of chunks of such a block."""
LAST_COMBINES = True
"""True if the last program of a tile combines its chunks, False if a second launch does.

A launch takes as long as a program takes for 20 rows of about 2,000 positions.
"""
LAST_VALUES = 2048
"""Values of the rows that the last program combines at a time."""
LAST_ROWS = (4, 16)
"""The minimum and the maximum of such rows."""
ROTATED_PAIRS = 256
"""Pairs that a warp rotates at a time, of at most `HEADS_A_PROGRAM` heads.

So a thread holds what it does in `rotary_store`, which leaves a head's sum its order.
"""
MAX_RUN_PAGES = 32
"""Pages of a run: their ids are in a warp's registers."""
PLANNED_CHUNKS = 128
"""Runs that the plan's kernel lists at a time."""
PLANNED_SLOTS = 128
"""Slots whose contexts one of its warps compares."""


@dataclass(frozen=True)
class ChunkList:
    """Runs of chunks to attend, on the device: items [0, counts[0])."""

    last: Tensor  # [S] int32: the last valid position, -1 if none
    runs: Tensor  # [S] int32: runs of the slot
    items: Tensor  # [S * max_chunks] int32: slot << 16 | first chunk
    counts: Tensor  # [3] int32: items, chunks of a run, and turns that were asked for


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
    arrived: Tensor  # [S * K * tiles] int32: runs of a tile of rows that have ended
    heads: AttentionHeads
    page_size: int
    max_chunks: int
    programs: int


def tile_shape(
    dtype: torch.dtype, head_dim: int, device: Device, *, rounded: bool = False
) -> tuple[int, int, int]:
    """Return rows and keys a tile, and pipeline stages, by model and device, independent of the
    rows.

    rounded: True if keys and values are codes. A block is also held in the dtype then, and a stage
    has half the bytes.
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
        stages = 2 if wide else 3 + rounded
    size = max(16, power_of_two(head_dim))
    width = size * dtype.itemsize
    room = device.shared - RESERVED_BYTES - rows * width  # for stages of keys and values each
    if rounded:
        room -= keys * width
    stored = size if rounded else width
    return rows, keys, max(1, min(stages, room // (2 * keys * stored)))


def chunk_constants(heads: AttentionHeads) -> dict[str, int]:
    """Return the chunks' size and borders as constants of a kernel."""
    small = small_chunk(rounded=heads.rounded)
    return {"SMALL": small, "TWICE_FROM": TWICE_FROM, "LARGE_FROM": LARGE_FROM}


def tile_bytes(dtype: torch.dtype, heads: AttentionHeads, device: Device) -> int:
    """Return the bytes of shared memory of a program, whose tiles have `tile_shape`."""
    rows, keys, stages = tile_shape(dtype, heads.head_dim, device, rounded=heads.rounded)
    size = max(16, power_of_two(heads.head_dim))
    width = size * dtype.itemsize
    if heads.rounded:
        return (rows + keys) * width + 2 * keys * stages * size
    return (rows + 2 * keys * stages) * width


def programs_that_fit(device: Device, program_bytes: int) -> int:
    """Return how many programs of so much shared memory the device runs at the same time."""
    fitting = (device.shared + PROGRAM_BYTES) // (program_bytes + PROGRAM_BYTES)
    return device.processors * max(1, min(MAX_PROGRAMS, fitting))


def run_pages(page_size: int, heads: AttentionHeads) -> tuple[int, int]:
    """Return the most chunks of a run, and the most pages that it may lie on, a power of two."""
    large = 4 * small_chunk(rounded=heads.rounded)
    chunks = max(1, min(8, MAX_RUN_PAGES * page_size // large))
    return chunks, power_of_two(ceil_div(chunks * large, page_size) + (page_size > large // 4))


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
    properties = device_properties(device)
    rows, _, _ = tile_shape(dtype, heads.head_dim, properties, rounded=heads.rounded)
    tiles = heads.num_kv_heads * ceil_div(width * heads.num_heads // heads.num_kv_heads, rows)

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
                runs=empty(torch.int32, slots),
                items=empty(torch.int32, slots * max_chunks),
                counts=empty(torch.int32, 3),
            )
            for sliding in heads.sliding
        },
        partial=empty(torch.float32, results * heads.head_dim),
        stats=empty(torch.float32, results * 2),
        arrived=empty(torch.int32, slots * tiles),
        heads=heads,
        page_size=page_size,
        max_chunks=max_chunks,
        programs=programs_that_fit(properties, tile_bytes(dtype, heads, properties)),
    )
    _list_runs(plan, slots, width, tiles)
    return plan


def _list_runs(plan: SplitPlan, slots: int, width: int, tiles: int) -> None:
    """Launch the plan's kernel for each of its lists; tiles: of rows, of all key heads of a slot."""
    for sliding, chunks in plan.lists.items():
        plan_attention_kernel[(slots,)](
            plan.positions,
            plan.valid,
            plan.row_last,
            chunks.last,
            chunks.runs,
            chunks.items,
            chunks.counts,
            plan.arrived,
            slots,
            width,
            plan.max_chunks,
            tiles,
            plan.programs,
            SLIDING=sliding,
            MAX_RUN=run_pages(plan.page_size, plan.heads)[0],
            SLOTS=power_of_two(slots),
            BLOCK=PLANNED_CHUNKS,
            num_warps=max(1, power_of_two(slots) // PLANNED_SLOTS),
            **chunk_constants(plan.heads),
        )


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
    programs: int,
    **options: Any,
) -> None:
    """Launch a kernel over the listed runs of all slots; it writes to the plan's buffers."""
    slots, width = query.shape[:2]
    chunks = plan.lists[params.sliding]
    table = plan.page_table
    alone = programs <= device_properties(query.device).processors
    kernel[(programs,)](
        query.contiguous(),
        *pools,
        table,
        plan.positions,
        chunks.last,
        chunks.runs,
        chunks.items,
        chunks.counts,
        plan.partial,
        plan.stats,
        score_scale(params),
        slots,
        width,
        table.shape[1],
        plan.max_chunks,
        PAGE=plan.page_size,
        FIRST=plan.heads.first_key,
        maxnreg=MAX_REGISTERS if alone else None,
        **options,
        **chunk_constants(plan.heads),
        **pdl_options(query.device),
    )


def combined_chunks(size: int) -> int:
    """Return the chunks that are combined at a time, of rows of `size` values."""
    min_chunks, max_chunks = COMBINED_CHUNKS
    return max(min_chunks, min(max_chunks, COMBINED_VALUES // power_of_two(size)))


def combine_chunks(out: Tensor, plan: SplitPlan, sinks: Tensor | None, **options: Any) -> Tensor:
    """Fill out [S, Q, H, D] with the sums of each row's chunks and its head's sink [H].

    Return it.
    """
    slots, width, heads, size = out.shape
    key_heads = options["K"]
    combine_chunks_kernel[(slots * key_heads, width * heads // key_heads)](
        plan.partial,
        plan.stats,
        plan.positions,
        plan.valid,
        plan.row_last,
        sinks,
        out,
        width,
        plan.max_chunks,
        BLOCK=combined_chunks(size),
        ROWS=1,
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
    return _attend_windows(query, pools, plan, params)


def rotary_attention(
    qkv: Tensor,
    rows: RotatedRows,
    qk_weight: Tensor | None,
    epsilon: float,
    pools: Pools,
    plan: AttentionPlan,
    params: AttentionParams,
) -> Tensor:
    """Launch `Kernels.rotary_attention`: one kernel, or two for wide heads of codes.

    Those leave a thread no registers for both.
    """
    assert isinstance(plan, SplitPlan) and plan.row_last is None
    assert rows.positions is not None
    slots, width, row_size = qkv.shape
    size = pools[0].shape[-1]
    num_heads = row_size // size - 2 * plan.heads.num_kv_heads
    shape = (slots, width, num_heads, size)
    if len(pools) > 2 and size > WIDE:
        query = rotary_store(qkv.flatten(0, 1), rows, qk_weight, epsilon, pools, num_heads)
        return paged_attention(query.view(shape), pools, plan, params)
    query = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    projection = Projection(qkv.contiguous(), rows.cos, rows.sin, qk_weight, epsilon)
    return _attend_windows(query, pools, plan, params, projection, rows)


def _attend_windows(
    query: Tensor,
    pools: Pools,
    plan: SplitPlan,
    params: AttentionParams,
    projection: Projection | None = None,
    rows: RotatedRows | None = None,
) -> Tensor:
    """Attend windows of query [S, Q, H, D].

    With a projection and its rows the kernel writes query first, and the rows' keys and values.
    """
    slots, width, num_heads, size = query.shape
    kv_heads = plan.heads.num_kv_heads
    device = device_properties(query.device)
    tile, block, stages = tile_shape(query.dtype, size, device, rounded=len(pools) > 2)
    padded = max(16, power_of_two(size))
    shape: dict[str, Any] = {"K": kv_heads, "GROUPS": num_heads // kv_heads, "D": size}
    shape |= {"BLOCK_D": padded, "SLIDING": params.sliding}
    tiles = {"SOFTCAP": params.softcap, "TILE": tile, "BLOCK": block, "num_stages": stages}
    min_rows, max_rows = LAST_ROWS
    pairs = padded // 2
    warps = WARPS[plan.programs > device.processors]
    out = torch.empty((slots, width, num_heads, size), dtype=query.dtype, device=query.device)
    attend_chunks(
        kernel=attend_chunk_kernel,
        query=query,
        pools=(KvPools.of(pools),),
        plan=plan,
        params=params,
        programs=plan.programs,
        valid=plan.valid,
        row_last=plan.row_last,
        sinks=params.sinks,
        arrived=plan.arrived,
        out=out if LAST_COMBINES else None,
        PAGES=run_pages(plan.page_size, plan.heads)[1],
        COMBINED=combined_chunks(size),
        COMBINED_ROWS=max(min_rows, min(max_rows, LAST_VALUES // padded)),
        BLOCK_HALF=pairs,
        ROTATED=warps * max(1, min(HEADS_A_PROGRAM, ROTATED_PAIRS // pairs)),
        num_warps=warps,
        projection=projection,
        angles=None if rows is None or rows.positions is None else rows.positions.contiguous(),
        kv_slots=None if rows is None else rows.kv_slots.contiguous(),
        **tiles,
        **shape,
    )
    if LAST_COMBINES:
        return out
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
