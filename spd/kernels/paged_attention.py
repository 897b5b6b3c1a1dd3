"""Grouped-query attention over pages with a causal query window.

Planned once a forward pass, run by every layer. Torch form: the shape of the arithmetic depends on
the window's width and on whole blocks of `KV_BLOCK` positions only, or of a part of it where the runner
saw equal bits. Blocks beyond the context are masked and add exact zeros, so a row's result does not
depend on how far the host's bound of its context lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

KV_BLOCK = 512
"""Positions a block: torch's CPU flash attention walks keys in blocks of this many."""


@dataclass(frozen=True)
class AttentionHeads:
    """The shape of a model's attention: query head h reads KV head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    first_key: int = 0
    """The first position that holds anything; see `causal_bias`."""


@dataclass(frozen=True)
class AttentionPlan:
    """What a forward pass prepares for all its layers; each form of the operation adds its own."""

    page_table: Tensor  # [S, pages] int64


@dataclass(frozen=True)
class MaskPlan(AttentionPlan):
    """The torch form's plan: one additive mask a slot (None: no rows), and where its pages lie in a run."""

    biases: tuple[Tensor | None, ...]
    first_pages: tuple[int | None, ...]


def causal_bias(
    positions: Tensor, context: int, groups: int, dtype: torch.dtype, first_key: int = 0
) -> Tensor:
    """Additive mask [1, 1, groups * Q, context]: 0 where a row at positions [Q] sees the key, else -inf.

    A row sees keys from first_key to its own position; before first_key, where there is nothing to see,
    its own alone.
    """
    keys, rows = torch.arange(context, device=positions.device), positions.unsqueeze(-1)
    hidden = (keys > rows) | (keys < rows.clamp(max=first_key))
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
    return bias.repeat(groups, 1)[None, None]


def gather_pages(pages: Tensor, page_ids: Tensor, first: int | None, count: int) -> Tensor:
    """Keys or values of `count` pages in order as [1, K, count * page, D].

    `first` is the first page's number where the pages are consecutive (a view, nothing copied);
    None reads them through page_ids [count].
    """
    run = pages[first : first + count] if first is not None else pages.index_select(0, page_ids)
    return run.flatten(0, 1).transpose(0, 1).unsqueeze(0)


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
    """Prepare `paged_attention` of windows at positions int64 [S, Q], ascending in a slot.

    valid bool [S, Q]: rows that are not hold any position within the cache, and their result is any
    finite number; page_table int64 [S, pages] of pages of page_size positions; dtype the model's;
    bounds: for each slot a number of positions that its rows do not reach beyond, 0 for a slot without
    valid rows, in blocks of a size that was seen to change no bit (`KV_BLOCK` or a part of it);
    first_pages: see `gather_pages`, for as many pages as the bound takes.
    """
    groups = heads.num_heads // heads.num_kv_heads
    biases = tuple(
        causal_bias(positions[s], -(-bound // page_size) * page_size, groups, dtype, heads.first_key)
        if bound
        else None
        for s, bound in enumerate(bounds)
    )
    return MaskPlan(page_table, biases, tuple(first_pages))


def paged_attention(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """Attend the planned windows' query [S, Q, H, D] to each slot's pages; returns [S, Q, H, D].

    key_pages, value_pages [P, page, K, D] with H a multiple of K; plan: of this file's
    `plan_attention`. A row sees what its `causal_bias` leaves; a slot without valid rows gives zeros.
    """
    assert isinstance(plan, MaskPlan)
    return attend_pages(query, key_pages, value_pages, plan.page_table, plan.biases, plan.first_pages, scale)


def attend_pages(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    biases: Sequence[Tensor | None],
    first_pages: Sequence[int | None],
    scale: float,
) -> Tensor:
    """Attend query [S, Q, H, D] to each slot's pages; returns [S, Q, H, D].

    key_pages, value_pages [P, page, K, D] with H a multiple of K; page_table int64 [S, pages];
    biases: one `causal_bias` a slot, or None for a slot without rows (zeros are returned);
    first_pages: see `gather_pages`. Query head h uses KV head h // (H / K).
    """
    slots, width, heads, size = query.shape
    kv_heads = key_pages.shape[2]
    groups = heads // kv_heads
    page_size = key_pages.shape[1]
    folded = query.view(slots, width, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
    outputs = []
    for s, (bias, first) in enumerate(zip(biases, first_pages, strict=True)):
        if bias is None:
            outputs.append(query.new_zeros(width, heads, size))
            continue
        count = bias.shape[-1] // page_size
        ids = page_table[s, :count]
        keys = gather_pages(key_pages, ids, first, count)
        values = gather_pages(value_pages, ids, first, count)
        rows = folded[s].reshape(1, kv_heads, groups * width, size)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=scale)
        outputs.append(
            out.view(kv_heads, groups, width, size).permute(2, 0, 1, 3).reshape(width, heads, size)
        )
    return outputs[0].unsqueeze(0) if slots == 1 else torch.stack(outputs)
