# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `ngram_lookup`: a few programs a slot walk its tokens, and one picks among their finds.

A find is one int64, the length of the match above the position of its end, so that the greatest is the
longest and of equals the latest. Short rows are walked by one program, in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spd.kernels.launch import power_of_two
from spd.kernels.round.window import RoundTensors

BLOCK = 1024
PARTS = 16
ONE_PROGRAM = 5 * BLOCK
"""Rows up to here are walked by one program: a second launch costs more than the walk."""


@triton.jit
def suffix_lengths(row, ends, last, ngram_max):
    """How many tokens back from each end equal those back from `last`, at most ngram_max; int64."""
    TOGETHER: tl.constexpr = 4
    final = tl.load(row + last)
    there = tl.load(row + ends, mask=ends < last, other=0)
    matching = (ends < last) & (there == final)
    suffix = matching.to(tl.int64)
    back = 1
    # Several tokens a turn, so that their loads do not wait for each other's comparisons.
    while (back < ngram_max) & (tl.max(matching.to(tl.int32)) > 0):
        alive = matching
        for i in tl.static_range(TOGETHER):
            current = tl.load(row + last - back - i, mask=last >= back + i, other=0)
            shifted = tl.load(row + ends - back - i, mask=alive & (ends >= back + i), other=0)
            matching = matching & (shifted == current) & (ends >= back + i)
            suffix += matching.to(tl.int64)
        back += TOGETHER
    return tl.minimum(suffix, ngram_max)


@triton.jit
def write_draft(row, best, last, live, ngram_min, k, draft, num_drafts, match, DRAFTS, OVER):
    """Write what followed the best find, its period going on behind the last token, and its length."""
    end = best & 0xFFFFFFFF
    found = (best >> 32) >= ngram_min
    taken = (found & live) | (OVER == 0)
    count = tl.where(found, k, 0)
    lane = tl.arange(0, DRAFTS)
    period = tl.where(found, last - end, 1)
    ids = tl.load(row + end + 1 + lane % period, mask=lane < count, other=0)
    tl.store(draft + lane, ids, mask=lane < tl.where(taken, k, 0))
    tl.store(num_drafts, tl.where(taken, count, tl.load(num_drafts)))
    tl.store(match, tl.where(live, tl.where(found, best >> 32, 0), tl.load(match)))


_VARYING = ("tokens_stride", "draft_stride", "k", "ngram_min", "ngram_max")


@triton.jit(do_not_specialize=_VARYING)
def walk_kernel(
    tokens, length, active, finds, draft, num_drafts, match, tokens_stride, draft_stride, k, ngram_min,
    ngram_max, BLOCK: tl.constexpr, PARTS: tl.constexpr, DRAFTS: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    """Blocks part, part + PARTS, ... of one slot; alone, it also writes the draft."""
    s = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tokens + s * tokens_stride
    # A silent slot has nothing before its last token.
    live = tl.load(active + s) != 0
    last = tl.where(live, tl.load(length + s) - 1, 0)
    best = tl.zeros((BLOCK,), dtype=tl.int64)
    start = (part * BLOCK).to(tl.int64)
    while start < last:
        ends = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, (suffix_lengths(row, ends, last, ngram_max) << 32) | ends)
        start += PARTS * BLOCK
    found = tl.max(best)
    if PARTS == 1:
        place = draft + s * draft_stride
        write_draft(
            row, found, last, live, ngram_min, k, place, num_drafts + s, match + s, DRAFTS, OVER
        )
    else:
        tl.store(finds + s * PARTS + part, found)


@triton.jit(do_not_specialize=_VARYING[:-1])
def pick_kernel(
    tokens, length, active, finds, draft, num_drafts, match, tokens_stride, draft_stride, k, ngram_min,
    PARTS: tl.constexpr, DRAFTS: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    """The best of one slot's finds."""
    s = tl.program_id(0).to(tl.int64)
    best = tl.max(tl.load(finds + s * PARTS + tl.arange(0, PARTS)))
    last = tl.load(length + s) - 1
    row = tokens + s * tokens_stride
    live = tl.load(active + s) != 0
    place = draft + s * draft_stride
    write_draft(row, best, last, live, ngram_min, k, place, num_drafts + s, match + s, DRAFTS, OVER)


def ngram_lookup(
    state: RoundTensors,
    k: int,
    ngram_min: int,
    ngram_max: int,
    bound: int,
    keep_drafts: bool = False,
) -> None:
    """Bound is not used."""
    tokens = state.tokens
    num_drafts = state.num_drafts
    slots, width = tokens.shape
    parts = 1 if width <= ONE_PROGRAM else PARTS
    finds = (
        num_drafts
        if parts == 1
        else torch.empty(slots, PARTS, dtype=torch.int64, device=tokens.device)
    )
    arguments = (
        tokens,
        state.length,
        state.active,
        finds,
        state.draft,
        num_drafts,
        state.match,
        tokens.stride(0),
        state.draft.stride(0),
        k,
        ngram_min,
    )
    constants = {"PARTS": parts, "DRAFTS": power_of_two(k), "OVER": keep_drafts}
    walk_kernel[(slots, parts)](*arguments, ngram_max, BLOCK=BLOCK, **constants, num_warps=4)
    if parts > 1:
        pick_kernel[(slots,)](*arguments, **constants, num_warps=1)
