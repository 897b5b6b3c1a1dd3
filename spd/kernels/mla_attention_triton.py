"""Triton twin of `mla_attention`: attention over latents, split into the chunks of `paged_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spd.kernels.attention_kernels_triton import LOG2_E, combine_chunks_kernel
from spd.kernels.launch import Signature, ceil_div, overlap, power_of_two
from spd.kernels.mla_kernels_triton import (
    attend_latent_chunk_kernel,
    head_linear_kernel,
    latent_store_kernel,
    prefill_latent_kernel,
)
from spd.kernels.paged_attention import AttentionPlan
from spd.kernels.paged_attention_triton import COMBINED_CHUNKS, RESERVED_BYTES, SplitPlan, chunk_constants
from spd.kernels.rotary import pairs_of
from spd.kernels.skinny_config import SUMS_APART, TOKEN_TILE, shared_limit
from spd.kernels.skinny_linear import capability_of

HEADS_A_PROGRAM = 8
ROW_TILE, KEY_BLOCK = 64, 32
"""Rows and positions a tile: all heads of a query or half of them, so that latents are read once or twice.
128 sums a thread leave room for little else: see how `mla_kernels_triton` keeps it out of local memory."""
WARPS = 8
BLOCK_A, BLOCK_B = 64, 64


def tile_shape(dtype: torch.dtype, latent: int, capability: tuple[int, int]) -> tuple[int, int, int]:
    """Rows and positions a tile and pipeline stages, by model and device alone; latent counts L + R."""
    size = dtype.itemsize
    if size == 4:
        return ROW_TILE // 4, KEY_BLOCK // 2, 1
    room = shared_limit(capability) - RESERVED_BYTES
    if capability[0] in SUMS_APART:
        return ROW_TILE // 2, KEY_BLOCK, min(3, (room // size // latent - ROW_TILE // 2) // KEY_BLOCK)
    for rows, keys in ((ROW_TILE, KEY_BLOCK), (ROW_TILE // 2, KEY_BLOCK // 2)):
        stages = (room - (latent + keys) * rows * size) // (keys * latent * size)
        if stages >= 1:
            return rows, keys, min(3, stages)
    return ROW_TILE // 4, KEY_BLOCK // 2, 1


def latent_store(
    query: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    kv_slots: Tensor,
    norm: Tensor,
    epsilon: float,
    pages: Tensor,
) -> Tensor:
    """See `mla_attention.latent_store`; query and latent may be strided but for their last dimension."""
    assert positions is not None and query.stride(-1) == latent.stride(-1) == 1
    rows, heads, size = query.shape
    rank, pairs = norm.shape[0], pairs_of(size)
    turned = torch.empty(rows, heads, size, dtype=query.dtype, device=query.device)
    several = min(HEADS_A_PROGRAM, power_of_two(heads))
    latent_store_kernel[(rows, ceil_div(heads, several))](
        query,
        latent,
        cos,
        sin,
        positions,
        kv_slots,
        norm,
        pages,
        turned,
        epsilon,
        query.stride(0),
        query.stride(1),
        latent.stride(0),
        H=heads,
        L=rank,
        HALF=pairs,
        HEADS=several,
        BLOCK_L=power_of_two(rank),
        BLOCK=power_of_two(pairs),
        num_warps=4,
        **overlap(query.device),
    )
    return turned


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `mla_attention.head_linear`; x may be strided but for its last dimension."""
    heads, a, b = weight.shape
    rows = x.shape[0]
    assert x.stride(-1) == 1
    y = torch.empty(rows, heads, b, dtype=x.dtype, device=x.device)
    head_linear_kernel[(ceil_div(rows, TOKEN_TILE), heads, ceil_div(b, BLOCK_B))](
        weight,
        x,
        y,
        rows,
        x.stride(0),
        x.stride(1),
        y.stride(0),
        y.stride(1),
        A=a,
        B=b,
        BLOCK_A=min(BLOCK_A, max(16, power_of_two(a))),
        BLOCK_B=BLOCK_B,
        BLOCK_T=TOKEN_TILE,
        num_warps=4,
        num_stages=min(3, ceil_div(a, BLOCK_A)),  # more than there are steps cost registers
        **overlap(x.device),
    )
    return y


def _shape(query: Tensor, pages: Tensor, rank: int) -> tuple[dict[str, int], int]:
    """Constants that both programs share, and stages."""
    size = query.shape[-1]
    tile, keys, stages = tile_shape(query.dtype, size, capability_of(query.device))
    keys = min(keys, pages.shape[1])
    assert pages.shape[1] % keys == 0
    return _constants(query.shape[-2], rank, size - rank, pages.shape[1], tile, keys), stages


def _constants(heads: int, rank: int, turned: int, page: int, tile: int, keys: int) -> dict[str, int]:
    return {
        "H": heads,
        "L": rank,
        "R": turned,
        "PAGE": page,
        "TILE": tile,
        "BLOCK": keys,
        "BLOCK_L": max(32, power_of_two(rank)),
        "BLOCK_R": max(16, power_of_two(turned)),
    }


def mla_attention(query: Tensor, pages: Tensor, plan: AttentionPlan, rank: int, scale: float) -> Tensor:
    """See `mla_attention.mla_attention`, with a plan of `paged_attention_triton`."""
    assert isinstance(plan, SplitPlan)
    slots, width, heads, _ = query.shape
    shape, stages = _shape(query, pages, rank)
    chunks = plan.lists[None]
    attend_latent_chunk_kernel[(plan.programs,)](
        query.contiguous(),
        pages,
        plan.page_table,
        plan.positions,
        chunks.last,
        chunks.items,
        chunks.count,
        plan.partial,
        plan.stats,
        scale * LOG2_E,
        slots,
        width,
        plan.page_table.shape[1],
        plan.max_chunks,
        FIRST=plan.heads.first_key,
        num_warps=WARPS,
        num_stages=stages,
        **shape,
        **chunk_constants(),
        **overlap(query.device),
    )
    out = torch.empty((slots, width, heads, rank), dtype=query.dtype, device=query.device)
    combine_chunks_kernel[(heads, slots * width)](
        plan.partial,
        plan.stats,
        plan.positions,
        plan.valid,
        out,
        width,
        plan.max_chunks,
        K=1,
        GROUPS=heads,
        D=rank,
        BLOCK=COMBINED_CHUNKS,
        BLOCK_D=shape["BLOCK_L"],
        SLIDING=None,
        num_warps=4,
        **chunk_constants(),
        **overlap(query.device),
    )
    return out


def mla_prefill(
    query: Tensor, pages: Tensor, page_row: Tensor, start: int, rank: int, scale: float
) -> Tensor:
    """See `mla_attention.mla_prefill`."""
    rows, heads, _ = query.shape
    shape, stages = _shape(query, pages, rank)
    out = torch.empty((rows, heads, rank), dtype=query.dtype, device=query.device)
    prefill_latent_kernel[(ceil_div(rows * heads, shape["TILE"]),)](
        query.contiguous(),
        pages,
        page_row,
        out,
        scale * LOG2_E,
        rows * heads,
        start,
        num_warps=WARPS,
        num_stages=stages,
        **shape,
    )
    return out


def signatures(capability: tuple[int, int] = (9, 0)) -> dict[str, Signature]:
    """The kernels as launched for DeepSeek-V3: 128 heads, 512 latent values and 64 rotated ones."""
    heads, rank, turned = 128, 512, 64
    found = {}
    for name in ("bf16", "fp16"):
        kind: dict[str, Any] = dict.fromkeys(("query", "latent", "norm", "pages", "turned"), f"*{name}")
        kind |= dict.fromkeys(("cos", "sin"), "*fp32") | dict.fromkeys(("positions", "kv_slots"), "*i64")
        kind |= dict.fromkeys(("query_row", "query_head", "latent_row"), "i32") | {"epsilon": "fp32"}
        one = {"H": heads, "L": rank, "HALF": turned // 2, "HEADS": HEADS_A_PROGRAM, "BLOCK_L": rank}
        loose = ("positions", "kv_slots", "query", "latent", "epsilon")
        found[f"latent_store_{name}"] = Signature(
            latent_store_kernel, kind, one | {"BLOCK": turned // 2, "PDL": True}, {"num_warps": 4}, loose
        )
        kind = dict.fromkeys(("w", "x", "y"), f"*{name}")
        kind |= dict.fromkeys(("rows", "x_row", "x_head", "y_row", "y_head"), "i32")
        blocks = {"BLOCK_A": BLOCK_A, "BLOCK_B": BLOCK_B, "BLOCK_T": TOKEN_TILE, "PDL": True}
        for suffix, a, b in (("", 128, rank), ("_out", rank, 128)):
            found[f"head_linear{suffix}_{name}"] = Signature(
                head_linear_kernel,
                kind,
                {"A": a, "B": b} | blocks,
                {"num_warps": 4, "num_stages": min(3, ceil_div(a, BLOCK_A))},
                ("rows", "x", "y"),
            )
        tile, keys, stages = tile_shape(torch.bfloat16, rank + turned, capability)
        shape = _constants(heads, rank, turned, 64, tile, keys)
        options = {"num_warps": WARPS, "num_stages": stages}
        types = {"query": f"*{name}", "pool": f"*{name}", "scale": "fp32"}
        lists = {"page_table": "*i64", "positions": "*i64", "last": "*i32", "items": "*i32", "count": "*i32"}
        lists |= {"partial": "*fp32", "stats": "*fp32"}
        sizes_types = dict.fromkeys(("slots", "queries", "pages", "max_chunks"), "i32")
        found[f"attend_latent_{name}"] = Signature(
            attend_latent_chunk_kernel,
            types | lists | sizes_types,
            shape | chunk_constants() | {"FIRST": 0, "PDL": True},
            options,
            ("page_table", "positions", "slots", "queries", "pages", "max_chunks"),
        )
        found[f"prefill_latent_{name}"] = Signature(
            prefill_latent_kernel,
            types | {"page_row": "*i64", "out": f"*{name}", "rows": "i32", "start": "i32"},
            shape,
            options,
            ("page_row", "rows", "start"),
        )
        combined = {"K": 1, "GROUPS": heads, "D": rank, "BLOCK": COMBINED_CHUNKS, "BLOCK_D": rank}
        found[f"combine_latent_{name}"] = Signature(
            combine_chunks_kernel,
            {"partial": "*fp32", "stats": "*fp32", "positions": "*i64", "valid": "*i1", "out": f"*{name}"}
            | {"queries": "i32", "max_chunks": "i32"},
            combined | {"SLIDING": None, "PDL": True} | chunk_constants(),
            {"num_warps": 4},
            ("positions", "valid", "queries", "max_chunks"),
        )
    return found
