# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `skinny_linear` that work on a row each: embedding, the last norm, the best of a draw."""

from __future__ import annotations

import triton
import triton.language as tl

from spd.kernels.overlap_triton import release, wait
from spd.kernels.philox_triton import NO_RANK, rank_is_finite, rank_token


@triton.jit
def choose_kernel(ranks, token, finite, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a row: the best of its tiles [T, tiles]."""
    wait(PDL)
    release(PDL)
    row = tl.program_id(0)
    best = tl.full((BLOCK,), NO_RANK, dtype=tl.int64)
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(ranks + row * tiles + at, mask=at < tiles, other=NO_RANK))
    chosen = tl.max(best, 0)
    tl.store(token + row, rank_token(chosen))
    tl.store(finite + row, rank_is_finite(chosen))


@triton.jit
def embed_kernel(
    token_ids, table, x, squares, h, SCALE: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    """One program a row and part of it: table[id], times SCALE if there is one, and the part's squares."""
    wait(PDL)
    release(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    token = tl.load(token_ids + row).to(tl.int64)
    column = part * BLOCK_H + tl.arange(0, BLOCK_H)
    value = tl.load(table + token * h + column, mask=column < h, other=0.0)
    if SCALE is not None:
        value = (value.to(tl.float32) * SCALE).to(value.dtype)
    tl.store(x + row * h + column, value, mask=column < h)
    wide = value.to(tl.float32)
    tl.store(squares + row * tl.num_programs(1) + part, tl.sum(wide * wide, 0))


@triton.jit
def rms_norm_rows_kernel(
    x,
    squares,
    weight,
    y,
    k,
    epsilon,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row and part of it."""
    wait(PDL)
    release(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    part = tl.arange(0, BLOCK_P)
    total = tl.sum(tl.load(squares + row * PARTS + part, mask=part < PARTS, other=0.0), 0)
    value = tl.load(x + row * k + column, mask=column < k, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(total / k + epsilon) * factor
    tl.store(y + row * k + column, value.to(y.dtype.element_ty), mask=column < k)
