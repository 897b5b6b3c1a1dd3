"""Lookup in a pool: propose what followed the suffix in texts other than the slot's own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.round.window import RoundTensors

FACTOR = 1_000_003
SHIFT = 20
"""A key is the sum of tokens times powers of FACTOR, the latest token times the highest one; its bits from
SHIFT on choose a bucket."""


class TextPool(NamedTuple):
    """Texts to look up in, and where the n-grams in them end.

    An entry of a bucket may be out of date: it is compared with the tokens before it is used.
    """

    tokens: Tensor  # int64 [P], a ring; -1 between texts and where none is
    buckets: Tensor  # int32 [B, E], B a power of two: places in `tokens`, -1 where none is


def bucket_numbers(ngrams: Tensor, buckets: int) -> Tensor:
    """Return the bucket of each n-gram int64 [..., n], the latest token first: int64 [...]."""
    key = torch.zeros_like(ngrams[..., 0])
    for back in range(ngrams.shape[-1]):
        key = key * FACTOR + ngrams[..., back]
    return (key >> SHIFT) & (buckets - 1)


def pool_lookup(
    state: RoundTensors, pool: TextPool, k: int, ngram_min: int, ngram_max: int, behind: int = 0
) -> None:
    """Compute `Kernels.pool_lookup` by torch."""
    draft = state.draft
    num_drafts = state.num_drafts
    match = state.match
    size = pool.tokens.shape[0]
    entries = pool.buckets.shape[1]
    last = state.length - 1 + behind
    takes_part = state.active & (last + 1 >= ngram_min)
    if behind:
        takes_part = takes_part & (match == 0) & (num_drafts == behind)
    backs = torch.arange(ngram_max, device=draft.device)
    columns = last.unsqueeze(-1) - backs
    own = state.tokens.gather(1, columns.clamp(min=0))
    own = torch.where(columns < 0, -2, own)
    number = bucket_numbers(own[:, :ngram_min], pool.buckets.shape[0])
    places = pool.buckets[number].long()
    is_equal = pool.tokens[(places.unsqueeze(-1) - backs) % size] == own.unsqueeze(1)
    lengths = is_equal.long().cumprod(dim=-1).sum(dim=-1)
    is_continued = (places >= 0) & (pool.tokens[(places + 1) % size] >= 0)
    lengths = torch.where(is_continued, lengths, 0)
    # The longest match first, then the first entry: one number orders both.
    entry = torch.arange(entries, device=draft.device)
    best = (lengths * entries + entries - 1 - entry).argmax(dim=-1, keepdim=True)
    matched = lengths.gather(1, best).squeeze(-1)
    is_longer = takes_part & (matched > match.clamp(min=ngram_min - 1))
    steps = torch.arange(k - behind, device=draft.device)
    ids = pool.tokens[(places.gather(1, best) + 1 + steps) % size]
    leads = (ids >= 0).long().cumprod(dim=-1)
    is_written = is_longer.unsqueeze(-1) & (leads > 0)
    draft[:, behind:k] = torch.where(is_written, ids, draft[:, behind:k])
    num_drafts.copy_(torch.where(is_longer, behind + leads.sum(dim=-1), num_drafts))
    match.copy_(torch.where(is_longer, -behind if behind else matched, match))
