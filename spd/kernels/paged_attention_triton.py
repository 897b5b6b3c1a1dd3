"""Triton twin of `paged_attention`: split-KV attention whose splits are fixed by the absolute position.

A plan kernel lists the (slot, chunk) pairs that hold context, a persistent grid attends each chunk for
itself, and a last kernel combines a row's chunks in their order. A row's bits depend on its query, its
position and the keys up to it: other rows only bring more tiles, more chunks that the row never reads,
or keys that are masked and add exact zeros. Chunks that a layer's sliding window has left behind are not
listed, so every window has a list of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spd.kernels.attention_chunks import LARGE_CHUNK, LARGE_FROM, SMALL_CHUNK, num_chunks
from spd.kernels.attention_kernels_triton import (
    LOG2_E,
    attend_chunk_kernel,
    combine_chunks_kernel,
    plan_attention_kernel,
)
from spd.kernels.launch import Signature, overlap, power_of_two
from spd.kernels.paged_attention import AttentionHeads, AttentionPlan
from spd.kernels.skinny_config import shared_limit
from spd.kernels.skinny_linear import capability_of

ROW_TILE, KEY_BLOCK = 64, 64
"""The least rows Hopper's matrix units take at once: padding them costs no time where memory is the limit,
while a second tile would read the keys a second time. float32 has no such units, and elsewhere wide heads
leave no room for stages beside so many rows; see `tile_shape`."""
RESERVED_BYTES = 4096
"""Of shared memory, for what a program sums across its threads."""
PROGRAMS_A_PROCESSOR = 2
"""As many as shared memory holds at a time."""
PROCESSORS = 132
"""Assumed where there is no CUDA device to ask."""
WARPS = (8, 4)
"""Off Hopper and on it: four hold a tile's sums there alone."""
COMBINED_CHUNKS = 16
PLANNED_CHUNKS = 128


@dataclass(frozen=True)
class ChunkList:
    """Chunks to attend, on the device: items [0, count)."""

    last: Tensor  # [S] int32: the last valid position, -1 where there is none
    items: Tensor  # [S * max_chunks] int32: slot << 16 | chunk
    count: Tensor  # [1] int32


@dataclass(frozen=True)
class SplitPlan(AttentionPlan):
    """Work of one forward pass: a list for each sliding window, and float32 room for the results."""

    positions: Tensor  # [S, Q] int64
    valid: Tensor  # [S, Q] bool
    lists: Mapping[int | None, ChunkList]
    partial: Tensor  # [S, max_chunks, K, Q * H / K, D] float32: values weighted by exp2(score - maximum)
    stats: Tensor  # [S, max_chunks, K, Q * H / K, 2] float32: maximum and sum of the weights
    heads: AttentionHeads
    max_chunks: int
    programs: int


def tile_shape(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> tuple[int, int, int]:
    """Rows and keys a tile, and pipeline stages: functions of model and device, never of the rows."""
    wide = head_dim > 128
    if dtype == torch.float32:
        rows, keys, stages = ROW_TILE // 4, KEY_BLOCK // (4 if wide else 2), 2
    else:
        rows = ROW_TILE // 2 if wide and capability[0] != 9 else ROW_TILE
        keys, stages = KEY_BLOCK // (2 if wide else 1), 2 if wide else 3
    return rows, keys, fitting_stages(stages, rows, keys, head_dim, dtype.itemsize, capability)


def fitting_stages(
    stages: int, rows: int, keys: int, head_dim: int, itemsize: int, capability: tuple[int, int]
) -> int:
    """As many of the stages, of keys and values each, as shared memory holds beside the rows."""
    width = max(16, power_of_two(head_dim)) * itemsize
    room = shared_limit(capability) - RESERVED_BYTES - rows * width
    return max(1, min(stages, room // (2 * keys * width)))


def chunk_constants() -> dict[str, int]:
    return {"SMALL": SMALL_CHUNK, "LARGE": LARGE_CHUNK, "FROM": LARGE_FROM}


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def plan_attention(
    positions: Tensor,
    valid: Tensor,
    page_table: Tensor,
    heads: AttentionHeads,
    page_size: int,
    dtype: torch.dtype,
    bounds: Sequence[int],
    first_pages: Sequence[int | None],
) -> AttentionPlan:
    """Prepare `paged_attention` of windows at positions int64 [S, Q]: a small kernel for each sliding window,
    no look by the host.

    As in `spd.kernels.paged_attention`, but lengths are the device's: bounds and first_pages are not
    used. S is below 32768; the room taken goes by the page table's width. Raises ValueError unless pages
    are of a power of two positions, 16 or more, for a matrix unit takes so many keys at once.
    """
    if page_size < 16 or page_size != power_of_two(page_size):
        raise ValueError(f"pages of {page_size} positions: a power of two from 16 on is needed")
    slots, width = positions.shape
    capacity = page_table.shape[1] * page_size
    max_chunks = num_chunks(capacity, SMALL_CHUNK, LARGE_CHUNK, LARGE_FROM)
    results = slots * max_chunks * heads.num_heads * width
    device = positions.device
    plan = SplitPlan(
        page_table=page_table.contiguous(),
        positions=positions.contiguous(),
        valid=valid.contiguous(),
        lists={
            sliding: ChunkList(
                last=torch.empty(slots, dtype=torch.int32, device=device),
                items=torch.empty(slots * max_chunks, dtype=torch.int32, device=device),
                count=torch.empty(1, dtype=torch.int32, device=device),
            )
            for sliding in heads.sliding
        },
        partial=torch.empty(results * heads.head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(results * 2, dtype=torch.float32, device=device),
        heads=heads,
        max_chunks=max_chunks,
        programs=PROGRAMS_A_PROCESSOR * _processors(device),
    )
    for sliding, chunks in plan.lists.items():
        plan_attention_kernel[(slots,)](
            plan.positions,
            plan.valid,
            chunks.last,
            chunks.items,
            chunks.count,
            slots,
            width,
            max_chunks,
            SLOTS=power_of_two(slots),
            BLOCK=PLANNED_CHUNKS,
            SLIDING=sliding,
            num_warps=1,
            **chunk_constants(),
        )
    return plan


def score_scale(scale: float, softcap: float | None) -> float:
    """What kernels multiply a product by: weights are powers of two; a score to be capped is in caps."""
    return scale * LOG2_E if softcap is None else scale / softcap


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    plan: AttentionPlan,
    scale: float,
    sliding: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend the planned windows' query [S, Q, H, D] to each slot's pages; returns [S, Q, H, D].

    As in `spd.kernels.paged_attention`, with a plan of this file; invalid rows give zeros.
    """
    assert isinstance(plan, SplitPlan)
    slots, width, num_heads, size = query.shape
    chunks = plan.lists[sliding]
    kv_heads = plan.heads.num_kv_heads
    tile, block, stages = tile_shape(query.dtype, size, capability_of(query.device))
    shape: dict[str, Any] = {"K": kv_heads, "GROUPS": num_heads // kv_heads, "D": size} | chunk_constants()
    shape |= {"BLOCK_D": max(16, power_of_two(size)), "SLIDING": sliding}
    attend_chunk_kernel[(plan.programs,)](
        query.contiguous(),
        key_pages,
        value_pages,
        plan.page_table,
        plan.positions,
        chunks.last,
        chunks.items,
        chunks.count,
        plan.partial,
        plan.stats,
        score_scale(scale, softcap),
        slots,
        width,
        plan.page_table.shape[1],
        plan.max_chunks,
        PAGE=key_pages.shape[1],
        SOFTCAP=softcap,
        TILE=tile,
        BLOCK=block,
        FIRST=plan.heads.first_key,
        num_warps=WARPS[capability_of(query.device)[0] == 9],
        num_stages=stages,
        **shape,
        **overlap(query.device),
    )
    out = torch.empty((slots, width, num_heads, size), dtype=query.dtype, device=query.device)
    combine_chunks_kernel[(num_heads, slots * width)](
        plan.partial,
        plan.stats,
        plan.positions,
        plan.valid,
        out,
        width,
        plan.max_chunks,
        BLOCK=COMBINED_CHUNKS,
        num_warps=1,
        **shape,
        **overlap(query.device),
    )
    return out


def signatures(capability: tuple[int, int] = (9, 0)) -> dict[str, Signature]:
    """The three kernels as launched for an 8B model, and for layers that slide and cap as Gemma 2's do."""
    plain = {"SLIDING": None, "SOFTCAP": None}
    found = _signatures("", 8, 4, 128, plain, capability)
    return found | _signatures("_sliding", 4, 2, 256, {"SLIDING": 4096, "SOFTCAP": 50.0}, capability)


def _signatures(
    suffix: str, kv_heads: int, groups: int, size: int, kind: dict[str, Any], capability: tuple[int, int]
) -> dict[str, Signature]:
    chunks = chunk_constants()
    sliding = {"SLIDING": kind["SLIDING"]}
    plan_types = {"positions": "*i64", "valid": "*i1"} | dict.fromkeys(("last", "items", "count"), "*i32")
    plan_types |= dict.fromkeys(("slots", "queries", "max_chunks"), "i32")
    loose = ("positions", "valid", "page_table", "slots", "queries", "pages", "max_chunks")
    found = {
        f"plan_attention{suffix}": Signature(
            plan_attention_kernel,
            plan_types,
            {"SLOTS": 16, "BLOCK": PLANNED_CHUNKS} | chunks | sliding,
            {"num_warps": 1},
            loose,
        )
    }
    tile, block, stages = tile_shape(torch.bfloat16, size, capability)
    shape = {"K": kv_heads, "GROUPS": groups, "D": size, "BLOCK_D": size} | chunks
    work = {"positions": "*i64", "partial": "*fp32", "stats": "*fp32", "queries": "i32", "max_chunks": "i32"}
    lists = {"page_table": "*i64", "last": "*i32", "items": "*i32", "count": "*i32"}
    lists |= {"slots": "i32", "pages": "i32", "scale": "fp32"}
    for name in ("bf16", "fp16"):
        found[f"attend_chunk{suffix}_{name}"] = Signature(
            attend_chunk_kernel,
            dict.fromkeys(("query", "key_pages", "value_pages"), f"*{name}") | work | lists,
            shape | kind | {"PAGE": 64, "TILE": tile, "BLOCK": block, "FIRST": 0, "PDL": True},
            {"num_warps": WARPS[capability[0] == 9], "num_stages": stages},
            loose,
        )
        found[f"combine_chunks{suffix}_{name}"] = Signature(
            combine_chunks_kernel,
            work | {"valid": "*i1", "out": f"*{name}"},
            shape | sliding | {"BLOCK": COMBINED_CHUNKS, "PDL": True},
            {"num_warps": 1},
            loose,
        )
    return found
