# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `pool_lookup`: one program a slot reads the one bucket of its suffix."""

from __future__ import annotations

import triton
import triton.language as tl

from spd.kernels.launch import power_of_two
from spd.kernels.round.ngram_lookup_triton import takes_part
from spd.kernels.round.pool_lookup import FACTOR, SHIFT, TextPool
from spd.kernels.round.window import RoundTensors

_NOT_SPECIALIZED = ("tokens_stride", "draft_stride", "k", "behind", "ngram_min", "ngram_max")


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def pool_kernel(
    tokens, length, active, pool, buckets, draft, num_drafts, match, tokens_stride, draft_stride, k, behind,
    ngram_min, ngram_max, SIZE: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr,
    DRAFTS: tl.constexpr, FACTOR: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Draft what followed the longest match of one slot's suffix among the entries of its bucket."""
    s = tl.program_id(0).to(tl.int64)
    row = tokens + s * tokens_stride
    last = tl.load(length + s) - 1 + behind
    key = tl.zeros((1,), dtype=tl.int64)
    back = 0
    while back < ngram_min:
        key = key * FACTOR + tl.load(row + last - back, mask=last >= back, other=-2)
        back += 1
    number = tl.max((key >> SHIFT) & (BUCKETS - 1))
    entry = tl.arange(0, ENTRIES)
    places = tl.load(buckets + number * ENTRIES + entry).to(tl.int64)
    next_tokens = tl.load(pool + (places + 1) % SIZE)
    matching = (places >= 0) & (next_tokens >= 0)
    lengths = tl.zeros((ENTRIES,), dtype=tl.int64)
    back = 0
    while back < ngram_max:
        own = tl.load(row + last - back, mask=last >= back, other=-2)
        earlier = tl.load(pool + (places - back + SIZE) % SIZE)
        matching = matching & (earlier == own)
        lengths += matching.to(tl.int64)
        back += 1
    best = tl.max(lengths * ENTRIES + (ENTRIES - 1 - entry))
    matched = best // ENTRIES
    place = tl.max(tl.where(entry == ENTRIES - 1 - best % ENTRIES, places, -1))
    shortest = tl.maximum(tl.load(match + s), ngram_min - 1)
    is_active = takes_part(active + s, num_drafts + s, match + s, behind)
    is_longer = is_active & (last + 1 >= ngram_min) & (matched > shortest)
    step = tl.arange(0, DRAFTS)
    ids = tl.load(pool + (place + 1 + step) % SIZE, mask=step < k - behind, other=-1)
    num_leading = tl.sum((tl.cumsum((ids < 0).to(tl.int32), 0) == 0).to(tl.int64))
    place_of_first = draft + s * draft_stride + behind
    tl.store(place_of_first + step, ids, mask=step < tl.where(is_longer, num_leading, 0))
    count = tl.where(is_longer, behind + num_leading, tl.load(num_drafts + s))
    size = tl.where(behind > 0, -behind, matched)
    tl.store(match + s, tl.where(is_longer, size, tl.load(match + s)))
    tl.store(num_drafts + s, count)


def pool_lookup(
    state: RoundTensors, pool: TextPool, k: int, ngram_min: int, ngram_max: int, behind: int = 0
) -> None:
    """Launch `Kernels.pool_lookup`."""
    buckets, entries = pool.buckets.shape
    pool_kernel[(state.length.shape[0],)](
        state.tokens,
        state.length,
        state.active,
        pool.tokens,
        pool.buckets,
        state.draft,
        state.num_drafts,
        state.match,
        state.tokens.stride(0),
        state.draft.stride(0),
        k,
        behind,
        ngram_min,
        ngram_max,
        SIZE=pool.tokens.shape[0],
        BUCKETS=buckets,
        ENTRIES=entries,
        DRAFTS=power_of_two(max(1, k - behind)),
        FACTOR=FACTOR,
        SHIFT=SHIFT,
        num_warps=1,
    )
