"""Causal grouped-query attention of a run of prompt positions over one slot's pages."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.paged_attention import KV_BLOCK, SlotMask, attend_pages, causal_bias, first_seen


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

    key_pages, value_pages [P, page, K, D] with H a multiple of K, query head h using KV head
    h // (H / K); page_row int64 [pages]: the slot's pages in order; first_key and sliding: see
    `causal_bias`; softcap as in `spd.kernels.paged_attention`.
    """
    rows, heads, _ = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    blocks = -(-(start + rows) // KV_BLOCK)
    context = min(blocks * KV_BLOCK, page_row.shape[0] * page_size)
    positions = torch.arange(start, start + rows, device=query.device)
    begin = first_seen(positions, context, sliding)
    bias = causal_bias(positions, context, heads // kv_heads, query.dtype, first_key, sliding, begin)
    masks = [SlotMask(bias, begin // page_size)]
    mixed = attend_pages(query[None], key_pages, value_pages, page_row[None], masks, scale, softcap)
    return mixed[0]
