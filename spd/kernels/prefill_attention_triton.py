# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton twin of `prefill_attention`: online softmax over key blocks for a tile of one head's rows.

Source: Dao 2023 (FlashAttention-2). Nothing but the rows and the start decides a bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.attention_kernels_triton import UNSEEN, softmax_step
from spd.kernels.launch import Signature, ceil_div, power_of_two
from spd.kernels.paged_attention_triton import fitting_stages, score_scale, tile_shape
from spd.kernels.skinny_linear import capability_of

ROW_TILE = 128
FEW_HEADS = 32
"""Below this many, half the rows a tile: chunks of 512 rows then still reach most processors."""


@triton.jit
def attend_range(
    maximum, total, acc, q, key_pages, value_pages, page_row, head, position, begin, end, scale,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SLIDING: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Take keys [begin, end) into a tile's online softmax; MASKED unless every row sees all of them.

    begin is a multiple of BLOCK; for scale see `score_scale`. One loop over all of the keys, however many:
    nested ones over spans of pages were measured slower.
    """
    column = tl.arange(0, BLOCK_D)
    kept = (column < D)[None, :]
    page = tl.load(page_row + begin // PAGE, mask=begin < end, other=0)
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        # Beyond `end` the pools may hold anything, NaN too, and zero times NaN is NaN.
        live = (key < end)[:, None] & kept if MASKED else kept
        offsets = head * D + column[None, :]
        if PAGE % BLOCK == 0:
            first = (page * PAGE + start % PAGE) * (K * D)
            offsets += tl.arange(0, BLOCK)[:, None] * (K * D)
            # One block ahead: keys that wait for their page's number could not be fetched early.
            following = start + BLOCK
            page = tl.load(page_row + following // PAGE, mask=following < end, other=0)
        else:
            pages = tl.load(page_row + key // PAGE, mask=key < end, other=0)
            first = ((pages * PAGE + key % PAGE) * (K * D))[:, None]
        k = tl.load(key_pages + first + offsets, mask=live, other=0.0)
        v = tl.load(value_pages + first + offsets, mask=live, other=0.0)
        maximum, total, acc = softmax_step(
            maximum, total, acc, q, k, v, key, position, scale, SLIDING, SOFTCAP, MASKED, FIRST
        )
    return maximum, total, acc


@triton.jit(do_not_specialize=["rows", "start"], do_not_specialize_on_alignment=["page_row"])
def prefill_attention_kernel(
    query, key_pages, value_pages, page_row, out, scale, rows, start,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """TILE rows of one head. The last tiles see the most keys and go first."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_D)
    wanted = (row < rows)[:, None] & (column < D)[None, :]
    at = (row * (K * GROUPS) + head)[:, None] * D + column[None, :]
    q = tl.load(query + at, mask=wanted, other=0.0)
    position = start + row
    seen_by_all = (start + tile * TILE + 1) // BLOCK * BLOCK
    end = start + tl.minimum(rows, (tile + 1) * TILE)

    maximum = tl.full((TILE,), UNSEEN, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, BLOCK_D), tl.float32)
    begin = 0
    if SLIDING is not None:
        # Blocks that the last row's window cuts, then those that all rows see whole, then the last ones.
        begin = tl.maximum(start + tile * TILE - (SLIDING - 1), 0) // BLOCK * BLOCK
        cut = tl.maximum(end - SLIDING + BLOCK - 1, 0) // BLOCK * BLOCK
        cut = tl.minimum(tl.maximum(cut, begin), seen_by_all)
        maximum, total, acc = attend_range(
            maximum, total, acc, q, key_pages, value_pages, page_row, head // GROUPS, position,
            begin, cut, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True, FIRST,
        )  # fmt: skip
        begin = cut
    maximum, total, acc = attend_range(
        maximum, total, acc, q, key_pages, value_pages, page_row, head // GROUPS, position,
        begin, seen_by_all, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, FIRST > 0, FIRST,
    )  # fmt: skip
    maximum, total, acc = attend_range(
        maximum, total, acc, q, key_pages, value_pages, page_row, head // GROUPS, position,
        seen_by_all, end, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True, FIRST,
    )  # fmt: skip
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)


def tile_of(dtype: torch.dtype, head_dim: int, num_heads: int, capability: tuple[int, int]) -> dict[str, int]:
    """Launch choices, functions of model and device alone."""
    rows, keys, stages = tile_shape(dtype, head_dim, capability)
    warps = 4
    tall = fitting_stages(stages, ROW_TILE, keys, head_dim, dtype.itemsize, capability)
    if dtype != torch.float32 and (num_heads >= FEW_HEADS or head_dim > 128) and tall >= 2:
        rows, warps, stages = ROW_TILE, 8, tall
    return {"TILE": rows, "BLOCK": keys, "num_stages": stages, "num_warps": warps}


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_row: Tensor,
    start: int,
    scale: float,
    first_key: int = 0,
    sliding: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend query [Q, H, D] at positions start to start + Q - 1, whose KV is stored; returns [Q, H, D].

    As in `spd.kernels.prefill_attention`; the pools and page_row contiguous.
    """
    rows, num_heads, size = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    out = torch.empty((rows, num_heads, size), dtype=query.dtype, device=query.device)
    tile = tile_of(query.dtype, size, num_heads, capability_of(query.device))
    prefill_attention_kernel[(num_heads, ceil_div(rows, tile["TILE"]))](
        query.contiguous(),
        key_pages,
        value_pages,
        page_row,
        out,
        score_scale(scale, softcap),
        rows,
        start,
        K=kv_heads,
        GROUPS=num_heads // kv_heads,
        D=size,
        PAGE=page_size,
        BLOCK_D=max(16, power_of_two(size)),
        SLIDING=sliding,
        SOFTCAP=softcap,
        FIRST=first_key,
        **tile,
    )
    return out


def signatures(capability: tuple[int, int] = (9, 0)) -> dict[str, Signature]:
    """The kernel as launched for an 8B model, and for layers that slide and cap as Gemma 2's do."""
    plain, gemma = {"SLIDING": None, "SOFTCAP": None}, {"SLIDING": 4096, "SOFTCAP": 50.0}
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found[f"prefill_attention_{name}"] = _signature(name, dtype, 8, 4, 128, plain, capability)
        found[f"prefill_attention_sliding_{name}"] = _signature(name, dtype, 4, 2, 256, gemma, capability)
    return found


def _signature(
    name: str,
    dtype: torch.dtype,
    kv_heads: int,
    groups: int,
    size: int,
    kind: dict[str, Any],
    capability: tuple[int, int],
) -> Signature:
    tile = tile_of(dtype, size, kv_heads * groups, capability)
    types = dict.fromkeys(("query", "key_pages", "value_pages", "out"), f"*{name}")
    types |= {"page_row": "*i64", "scale": "fp32", "rows": "i32", "start": "i32"}
    return Signature(
        prefill_attention_kernel,
        types,
        {"K": kv_heads, "GROUPS": groups, "D": size, "PAGE": 64, "BLOCK_D": size, "FIRST": 0}
        | kind
        | {key: tile[key] for key in ("TILE", "BLOCK")},
        {key: tile[key] for key in ("num_stages", "num_warps")},
        unspecialized=("page_row", "rows", "start"),
        hot=False,
    )
