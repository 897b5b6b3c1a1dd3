# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `ngram_lookup`: a few programs a slot scan its tokens, and one picks the best
match.

A match is one int64, its length in the upper half and the position of its end in the lower, so that
the greatest is the longest and of equals the latest. Short rows are scanned by one program, in one
launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spd.kernels.launch import power_of_two
from spd.kernels.round.window import RoundTensors

BLOCK = 1024
"""Tokens that a program compares at a time."""
PARTS = 16
"""Programs of a slot with a long row."""
ONE_PROGRAM = 5 * BLOCK
"""Tokens up to which one program scans a row: a second launch would take longer than the scan."""


@triton.jit
def suffix_lengths(row, ends, last, ngram_max):
    """Return how many tokens back from each end equal those back from `last`, at most ngram_max;
    int64."""
    TOKENS_A_TURN: tl.constexpr = 4
    final = tl.load(row + last)
    end_tokens = tl.load(row + ends, mask=ends < last, other=0)
    matching = (ends < last) & (end_tokens == final)
    suffix = matching.to(tl.int64)
    back = 1
    # Several tokens an iteration, so that their loads do not wait for each other's comparisons.
    while (back < ngram_max) & (tl.max(matching.to(tl.int32)) > 0):
        was_matching = matching
        for i in tl.static_range(TOKENS_A_TURN):
            current = tl.load(row + last - back - i, mask=last >= back + i, other=0)
            shifted = tl.load(
                row + ends - back - i, mask=was_matching & (ends >= back + i), other=0
            )
            matching = matching & (shifted == current) & (ends >= back + i)
            suffix += matching.to(tl.int64)
        back += TOKENS_A_TURN
    return tl.minimum(suffix, ngram_max)


@triton.jit
def write_draft(
    row, best, last, is_active, ngram_min, k, behind, draft, num_drafts, match, DRAFTS, KEEP_DRAFTS
):
    """Write the tokens after the best match, repeated periodically beyond the last token, and its
    length, or how many drafts they continue."""
    end = best & 0xFFFFFFFF
    has_match = (best >> 32) >= ngram_min
    is_replaced = (has_match & is_active) | (KEEP_DRAFTS == 0)
    count = tl.where(has_match, k, 0)
    lane = behind + tl.arange(0, DRAFTS)
    period = tl.where(has_match, last - end, 1)
    ids = tl.load(row + end + 1 + (lane - behind) % period, mask=lane < count, other=0)
    tl.store(draft + lane, ids, mask=lane < tl.where(is_replaced, k, 0))
    tl.store(num_drafts, tl.where(is_replaced, count, tl.load(num_drafts)))
    size = tl.where(behind > 0, -behind, best >> 32)
    tl.store(match, tl.where(is_active, tl.where(has_match, size, 0), tl.load(match)))


@triton.jit
def takes_part(active, num_drafts, match, behind):
    """True for an active slot; with drafts to continue, only where it has so many and no match."""
    can_continue = (tl.load(match) == 0) & (tl.load(num_drafts) == behind)
    return (tl.load(active) != 0) & ((behind == 0) | can_continue)


_NOT_SPECIALIZED = ("tokens_stride", "draft_stride", "k", "behind", "ngram_min", "ngram_max")


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def walk_kernel(
    tokens, length, active, matches, draft, num_drafts, match, tokens_stride, draft_stride, k, behind,
    ngram_min, ngram_max, BLOCK: tl.constexpr, PARTS: tl.constexpr, DRAFTS: tl.constexpr,
    KEEP_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Find the best match in blocks part, part + PARTS, ... of one slot.

    A single part writes the draft.
    """
    s = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tokens + s * tokens_stride
    # A slot that takes no part is treated as one without tokens before its last.
    is_active = takes_part(active + s, num_drafts + s, match + s, behind)
    last = tl.where(is_active, tl.load(length + s) - 1 + behind, 0)
    best = tl.zeros((BLOCK,), dtype=tl.int64)
    start = (part * BLOCK).to(tl.int64)
    while start < last:
        ends = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, (suffix_lengths(row, ends, last, ngram_max) << 32) | ends)
        start += PARTS * BLOCK
    best_match = tl.max(best)
    if PARTS == 1:
        place = draft + s * draft_stride
        write_draft(
            row,
            best_match,
            last,
            is_active,
            ngram_min,
            k,
            behind,
            place,
            num_drafts + s,
            match + s,
            DRAFTS,
            KEEP_DRAFTS,
        )
    else:
        tl.store(matches + s * PARTS + part, best_match)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED[:-1])
def pick_kernel(
    tokens, length, active, matches, draft, num_drafts, match, tokens_stride, draft_stride, k, behind,
    ngram_min, PARTS: tl.constexpr, DRAFTS: tl.constexpr, KEEP_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Write the draft of the best of one slot's matches."""
    s = tl.program_id(0).to(tl.int64)
    best = tl.max(tl.load(matches + s * PARTS + tl.arange(0, PARTS)))
    last = tl.load(length + s) - 1 + behind
    row = tokens + s * tokens_stride
    is_active = takes_part(active + s, num_drafts + s, match + s, behind)
    place = draft + s * draft_stride
    write_draft(
        row,
        best,
        last,
        is_active,
        ngram_min,
        k,
        behind,
        place,
        num_drafts + s,
        match + s,
        DRAFTS,
        KEEP_DRAFTS,
    )


def ngram_lookup(
    state: RoundTensors,
    k: int,
    ngram_min: int,
    ngram_max: int,
    bound: int,
    keep_drafts: bool = False,
    behind: int = 0,
) -> None:
    """Launch `Kernels.ngram_lookup`; bound is not used."""
    tokens = state.tokens
    num_drafts = state.num_drafts
    if behind:
        columns = state.length.unsqueeze(-1) + torch.arange(behind, device=tokens.device)
        tokens.scatter_(1, columns, state.draft[:, :behind])
    slots, width = tokens.shape
    parts = 1 if width <= ONE_PROGRAM else PARTS
    matches = (
        num_drafts
        if parts == 1
        else torch.empty(slots, PARTS, dtype=torch.int64, device=tokens.device)
    )
    arguments = (
        tokens,
        state.length,
        state.active,
        matches,
        state.draft,
        num_drafts,
        state.match,
        tokens.stride(0),
        state.draft.stride(0),
        k,
        behind,
        ngram_min,
    )
    constants = {
        "PARTS": parts,
        "DRAFTS": power_of_two(k),
        "KEEP_DRAFTS": keep_drafts or behind > 0,
    }
    walk_kernel[(slots, parts)](*arguments, ngram_max, BLOCK=BLOCK, **constants, num_warps=4)
    if parts > 1:
        pick_kernel[(slots,)](*arguments, **constants, num_warps=1)
