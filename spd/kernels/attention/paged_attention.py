"""Grouped-query attention over pages with a causal query window.

Windows are planned once a forward pass. Torch form: the shape of the arithmetic depends on the
window's width and on blocks of `KV_BLOCK` positions only. Positions beyond the context are masked
and add exact zeros, so a row's result does not depend on the host's bound of its context. Whole
blocks before a layer's sliding window would add exact zeros, too, and are not read.

With `sliding` W a layer's rows attend to their own position and the W - 1 before it. With `softcap`
C a score s becomes C tanh(s / C). Source: Beltagy et al. 2020; Gemma Team 2024 (Gemma 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.attention.attention_chunks import KV_BLOCK
from spd.kernels.attention.cache_rows import widen_rows
from spd.kernels.attention.rotary_store import Pools, is_known_finite

KV_PART = KV_BLOCK // 4
"""Positions that capped attention sums over at a time."""


@dataclass(frozen=True)
class AttentionHeads:
    """The shape of a model's attention: query head h reads KV head h // (num_heads /
    num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    first_key: int = 0  # the first position that holds a key; see `causal_bias`
    sliding: tuple[int | None, ...] = (None,)
    """The sliding windows of all layers, each once; None stands for layers without one."""
    sees_block: bool = False
    """True for the layers whose rows attend to all rows of a block."""
    rounded: bool = False
    """True where keys and values, or latents, are codes of eight bits."""


@dataclass(frozen=True)
class AttentionParams:
    """The attention parameters of one layer."""

    scale: float
    sliding: int | None = None  # positions that a row attends to, its own included
    softcap: float | None = None
    sinks: Tensor | None = None
    """float32 [H]: for each head an additional score of every row, with the value 0. Source:
    gpt-oss."""


@dataclass(frozen=True)
class Windows:
    """The rows of a forward pass: Q for each of S slots."""

    positions: Tensor  # int64 [S, Q], ascending in a slot
    valid: Tensor
    """bool [S, Q]; other rows hold any position within the cache and give any finite result."""
    page_table: Tensor  # int64 [S, pages]
    bounds: Sequence[int]
    """For each slot an upper bound of its rows' positions plus one, 0 without valid rows.

    A multiple of `KV_BLOCK`, for a partial last block may be computed in another order.
    """
    first_pages: Sequence[int | None]
    """The first page's number of each slot whose pages up to its bound are consecutive, else
    None."""
    chunk_start: int | None = None
    """The first position of one slot's full prompt chunk, for which programs may differ."""
    last: Tensor | None = None
    """int64 [S, Q]: the last position that each row attends to, within the bound; None: its own.
    Sliding windows end at `positions` nevertheless."""


@dataclass(frozen=True)
class AttentionPlan:
    """Attention tensors shared by all layers of a forward pass; each form extends it."""

    page_table: Tensor  # [S, pages] int64


@dataclass(frozen=True)
class SlotMask:
    """The mask of a slot's rows over its pages from index `first` on, a whole number of blocks.

    `bias` is that of `causal_bias`. `run` is the number of the page at `first` where the pages from
    there on are consecutive, else None.
    """

    bias: Tensor
    first: int = 0
    run: int | None = None


@dataclass(frozen=True)
class MaskPlan(AttentionPlan):
    """The torch form's plan: for each sliding window one mask a slot, None for a slot without
    rows."""

    masks: Mapping[int | None, tuple[SlotMask | None, ...]]
    width: int  # rows of a window; narrower windows are padded to it


def causal_bias(
    positions: Tensor,
    context: int,
    groups: int,
    dtype: torch.dtype,
    first_key: int = 0,
    sliding: int | None = None,
    start: int = 0,
    last: Tensor | None = None,
) -> Tensor:
    """Return the additive mask [1, 1, groups * Q, context - start] of keys start to context - 1.

    It is 0 where a row at positions [Q] attends to the key, else -inf. A row attends to the keys
    from first_key to its own position, `sliding` of them at most; a row before first_key to its own
    alone. last [Q]: the row's last key where that is not its own position.
    """
    keys = torch.arange(start, context, device=positions.device)
    # Invalid rows may lie beyond the context: they attend to its end, for a row without keys gives
    # NaN.
    rows = positions.clamp(max=context - 1).unsqueeze(-1)
    ends = rows if last is None else last.clamp(max=context - 1).unsqueeze(-1)
    hidden = (keys > ends) | (keys < rows.clamp(max=first_key))
    if sliding is not None:
        hidden |= keys <= rows - sliding
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(
        hidden, float("-inf")
    )
    return bias.repeat(groups, 1)[None, None]


def gather_pages(pages: Tensor, run: int | Tensor, count: int) -> Tensor:
    """Return keys or values of `count` pages in order as [1, K, count * page, D], scales with D = 1.

    run: the first page's number where the pages are consecutive (a view of the contiguous pool,
    without a copy), or the numbers of all of them, int64 [count].
    """
    if isinstance(run, Tensor):
        return pages.index_select(0, run).flatten(0, 1).transpose(0, 1).unsqueeze(0)
    page_size, heads, size = pages.shape[1:]
    shape = (1, heads, count * page_size, size)
    strides = (0, size, heads * size, 1)
    return pages.as_strided(shape, strides, pages.storage_offset() + run * pages.stride(0))


def read_entries(
    pools: Pools, run: int | Tensor, count: int, rank: int | None
) -> tuple[Tensor, Tensor]:
    """Return keys and values of `count` pages as in `gather_pages`.

    Those of a cache in eight bits are float32. rank: of latents, whose scales are [P, page, K, 2];
    see `widen_rows`.
    """
    entries = [
        gather_pages(pages if pages.dim() == 4 else pages.unsqueeze(-1), run, count)
        for pages in pools
    ]
    if len(entries) == 2:
        return entries[0], entries[1]
    keys, values, key_scales, value_scales = entries
    return widen_rows(keys, key_scales, rank), widen_rows(values, value_scales, rank)


def plan_attention(
    windows: Windows, heads: AttentionHeads, page_size: int, dtype: torch.dtype
) -> AttentionPlan:
    """Compute `Kernels.plan_attention` by torch: a mask a slot for each sliding window."""
    groups = heads.num_heads // heads.num_kv_heads
    positions = windows.positions
    bounds = windows.bounds

    def mask(s: int, sliding: int | None) -> SlotMask | None:
        """Return slot s's mask for a sliding window."""
        if not bounds[s]:
            return None
        context = -(-bounds[s] // page_size) * page_size
        start = first_visible(positions[s], context, sliding)
        first = start // page_size
        run = windows.first_pages[s]
        bias = causal_bias(
            positions=positions[s],
            context=context,
            groups=groups,
            dtype=dtype,
            first_key=heads.first_key,
            sliding=sliding,
            start=start,
            last=None if windows.last is None else windows.last[s],
        )
        return SlotMask(bias, first, None if run is None else run + first)

    return MaskPlan(
        windows.page_table,
        {sliding: tuple(mask(s, sliding) for s in range(len(bounds))) for sliding in heads.sliding},
        positions.shape[1],
    )


def first_visible(positions: Tensor, context: int, sliding: int | None) -> int:
    """Return the first position to read for rows at positions [Q]: a multiple of `KV_BLOCK`.

    Whole blocks that no row attends to are skipped; on a GPU, where the host does not know the
    positions, none are.
    """
    if sliding is None or positions.device.type != "cpu":
        return 0
    lowest = min(int(positions.min()), context - 1) - sliding + 1
    return max(0, lowest) // KV_BLOCK * KV_BLOCK


def paged_attention(
    query: Tensor,
    pools: Pools,
    plan: AttentionPlan,
    params: AttentionParams,
    rank: int | None = None,
) -> Tensor:
    """Compute `Kernels.paged_attention` by torch.

    rank: of latents in eight bits; see `read_entries`.
    """
    assert isinstance(plan, MaskPlan)
    slots, query_width, heads, size = query.shape
    width = plan.width
    masks = plan.masks[params.sliding]
    if query_width < width:
        query = F.pad(query, (0, 0, 0, 0, 0, width - query_width))
    page_size, kv_heads = pools[0].shape[1:3]
    groups = heads // kv_heads
    rows = query.view(slots, width, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(slots, kv_heads, groups * width, size)
    outputs = []
    for s, mask in enumerate(masks):
        slot_query = rows if slots == 1 else rows[s : s + 1]
        if mask is None:
            outputs.append(torch.zeros_like(slot_query))
            continue
        count = mask.bias.shape[-1] // page_size
        run = plan.page_table[s, mask.first : mask.first + count] if mask.run is None else mask.run
        keys, values = read_entries(pools, run, count, rank)
        outputs.append(attend(slot_query, keys, values, mask.bias, params))
    mixed = outputs[0] if slots == 1 else torch.cat(outputs)
    mixed = mixed.view(slots, kv_heads, groups, width, size).permute(0, 3, 1, 2, 4)
    return mixed.reshape(slots, width, heads, size)[:, :query_width]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, params: AttentionParams
) -> Tensor:
    """Attend query [1, K, R, D] to keys and values [1, K, C, D]; bias [1, 1, R, C] is added to
    scores.

    A key of NaN (see `replace_non_finite`) makes its scores NaN even where the bias masks it. So
    NaN keys are replaced by zeros, and rows that attend to one are filled with NaN.
    """
    run: Callable[[Tensor, Tensor], Tensor]
    is_widened = keys.dtype != query.dtype
    if params.softcap is None and params.sinks is None and not is_widened:
        run = partial(F.scaled_dot_product_attention, query, attn_mask=bias, scale=params.scale)
    else:
        run = partial(capped_attention, query, bias=bias, params=params)
    if query.device.type == "cpu" and is_known_finite(out := run(keys, values)):
        return out
    is_nan = keys.isnan().any(-1).unsqueeze(2)
    out = run(keys.nan_to_num(), values)
    return out.masked_fill((is_nan & (bias == 0)).any(-1, keepdim=True), math.nan)


def capped_attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, params: AttentionParams
) -> Tensor:
    """Attend query [1, K, R, D] to keys and values [1, K, C, D], capped or with sinks: [1, K, R,
    D].

    bias [1, 1, R, C] is added to the capped scores. In float32, `KV_PART` positions at a time: the
    order of sums in a product over all keys would depend on their number.
    """
    query32 = query.float()
    cap = params.softcap
    blocks = [slice(at, at + KV_PART) for at in range(0, keys.shape[2], KV_PART)]
    block_scores = []
    for block in blocks:
        score = (query32 @ keys[:, :, block].float().mT) * (params.scale / (cap or 1.0))
        block_scores.append((score if cap is None else score.tanh_() * cap) + bias[..., block])
    peak = torch.stack([block.amax(-1, keepdim=True) for block in block_scores]).amax(0)
    total = torch.zeros_like(peak)
    mixed = torch.zeros_like(query32)
    if params.sinks is not None:
        heads, rows = query.shape[1:3]
        sinks = params.sinks.view(1, heads, -1, 1)
        sinks = sinks.repeat_interleave(rows // sinks.shape[2], 2)
        peak = torch.maximum(peak, sinks)
        total = (sinks - peak).exp()
    for block, score in zip(blocks, block_scores, strict=True):
        weights = score.sub_(peak).exp_()
        total += weights.sum(-1, keepdim=True)
        mixed += weights @ values[:, :, block].float()
    return (mixed / total).to(query.dtype)
