# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `mla_attention`: what is kept of a row, each head's own product, latent attention.

A latent is loaded once and is both key and value of every head, so that a tile of rows, heads of one or of
several queries, reads L + R values a position where the heads' own keys and values would be hundreds of times
as many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spd.kernels.attention_kernels_triton import UNSEEN
from spd.kernels.overlap_triton import release, wait


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_slots", "query", "latent"])
def latent_store_kernel(
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
    query_row,
    query_head,
    latent_row,
    H: tl.constexpr,
    L: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and HEADS of its H rotated query heads; the first of a row's programs also keeps the row."""
    wait(PDL)
    release(PDL)
    R: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    within = column < HALF
    position = tl.load(positions + row)
    turn = tl.load(cos + position * R + column, mask=within, other=0.0).to(tl.float32)
    lift = tl.load(sin + position * R + HALF + column, mask=within, other=0.0).to(tl.float32)
    source = query + row * query_row + head[:, None] * query_head + column[None, :]
    mask = (head < H)[:, None] & within[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    to = turned + row * (H * R) + head[:, None] * R + column[None, :]
    kind = turned.dtype.element_ty
    tl.store(to, (x * turn[None, :] - y * lift[None, :]).to(kind), mask=mask)
    tl.store(to + HALF, (y * turn[None, :] + x * lift[None, :]).to(kind), mask=mask)
    if tl.program_id(1) == 0:
        kept = pages + tl.load(kv_slots + row) * (L + R)
        wide = tl.arange(0, BLOCK_L)
        value = tl.load(latent + row * latent_row + wide, mask=wide < L, other=0.0).to(tl.float32)
        scale = tl.load(norm + wide, mask=wide < L, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / L + epsilon) * scale
        tl.store(kept + wide, value.to(kind), mask=wide < L)
        key = latent + row * latent_row + L + column
        first = tl.load(key, mask=within, other=0.0).to(tl.float32)
        second = tl.load(key + HALF, mask=within, other=0.0).to(tl.float32)
        tl.store(kept + L + column, (first * turn - second * lift).to(kind), mask=within)
        tl.store(kept + L + HALF + column, (second * turn + first * lift).to(kind), mask=within)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["x", "y"])
def head_linear_kernel(
    w,
    x,
    y,
    rows,
    x_row,
    x_head,
    y_row,
    y_head,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_T rows of one head and BLOCK_B of its B columns: x [T, A] by w [A, B]."""
    head = tl.program_id(1).to(tl.int64)
    row_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    wait(PDL)
    total = tl.zeros((BLOCK_B, BLOCK_T), dtype=tl.float32)
    for start in range(0, A, BLOCK_A):
        inner = start + tl.arange(0, BLOCK_A)
        at = w + head * (A * B) + inner[:, None] * B + column[None, :]
        weights = tl.load(at, mask=(inner < A)[:, None] & (column < B)[None, :], other=0.0)
        inside = (row_t[None, :] < rows) & (inner < A)[:, None]
        tokens = tl.load(
            x + row_t[None, :].to(tl.int64) * x_row + head * x_head + inner[:, None], mask=inside, other=0.0
        )
        total = tl.dot(tl.trans(weights), tokens, total, input_precision="ieee")
    release(PDL)
    at = y + row_t[None, :].to(tl.int64) * y_row + head * y_head + column[:, None]
    tl.store(at, total.to(y.dtype.element_ty), mask=(row_t[None, :] < rows) & (column < B)[:, None])


@triton.jit
def attend_latents(
    maximum,
    total,
    acc,
    q,
    turned,
    pool,
    page_row,
    position,
    begin,
    end,
    scale,
    L: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Take positions [begin, end) into a tile's online softmax, masked by each row's position.

    q [rows, BLOCK_L] and turned [rows, BLOCK_R]: the two sides of the queries; begin is a multiple of BLOCK,
    which divides PAGE; scale includes log2(e), for weights are powers of two.
    """
    wide, narrow = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    page = tl.load(page_row + begin // PAGE, mask=begin < end, other=0)
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        # Beyond `end` the pool may hold anything, NaN too, and zero times NaN is NaN.
        live = (key < end)[:, None]
        first = (page * PAGE + start % PAGE) * (L + R)
        rows = pool + first + tl.arange(0, BLOCK)[:, None] * (L + R)
        # One block ahead: latents that wait for their page's number could not be fetched early.
        following = start + BLOCK
        page = tl.load(page_row + following // PAGE, mask=following < end, other=0)
        c = tl.load(rows + wide[None, :], mask=live & (wide < L)[None, :], other=0.0)
        r = tl.load(rows + L + narrow[None, :], mask=live & (narrow < R)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(c), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(r), scores, input_precision="ieee") * scale
        seen = key[None, :] <= position[:, None]
        if FIRST > 0:
            seen = seen & (key[None, :] >= tl.minimum(position, FIRST)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])
        shrink = tl.exp2(maximum - raised)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(c.dtype), c, acc * shrink[:, None], input_precision="ieee")
        maximum = raised
    return maximum, total, acc


@triton.jit(
    do_not_specialize=["slots", "queries", "pages", "max_chunks"],
    do_not_specialize_on_alignment=["page_table", "positions"],
)
def attend_latent_chunk_kernel(
    query,
    pool,
    page_table,
    positions,
    last,
    items,
    count,
    partial,
    stats,
    scale,
    slots,
    queries,
    pages,
    max_chunks,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
    FROM: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """TILE rows (a slot's queries by heads) against one chunk, item by item; see `attend_chunk_kernel`."""
    wait(PDL)
    release(PDL)
    FEW: tl.constexpr = FROM // SMALL
    rows = queries * H
    tiles = tl.cdiv(rows, TILE)
    wide, narrow = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    most, first = slots * max_chunks, tl.program_id(0) // tiles
    item = tl.load(items + first, mask=first < most, other=0)
    for work in range(tl.program_id(0), tl.load(count) * tiles, tl.num_programs(0)):
        slot = (item >> 16).to(tl.int64)
        chunk = item & 0xFFFF
        row = (work % tiles) * TILE + tl.arange(0, TILE)
        token = slot * queries + row // H
        seen = tl.load(positions + token, mask=row < rows, other=-1).to(tl.int32)
        source = query + (slot * rows + row)[:, None] * (L + R)
        q = tl.load(source + wide[None, :], mask=(row < rows)[:, None] & (wide < L)[None, :], other=0.0)
        at = source + L + narrow[None, :]
        turned = tl.load(at, mask=(row < rows)[:, None] & (narrow < R)[None, :], other=0.0)
        begin = tl.where(chunk < FEW, chunk * SMALL, FROM + (chunk - FEW) * LARGE)
        following = (work + tl.num_programs(0)) // tiles
        item = tl.load(items + following, mask=following < most, other=0)
        end = tl.minimum(begin + tl.where(chunk < FEW, SMALL, LARGE), tl.load(last + slot) + 1)
        maximum, total, acc = attend_latents(
            tl.full((TILE,), UNSEEN, tl.float32), tl.zeros((TILE,), tl.float32),
            tl.zeros((TILE, BLOCK_L), tl.float32), q, turned, pool, page_table + slot * pages,
            seen, begin, end, scale, L, R, PAGE, BLOCK, BLOCK_L, BLOCK_R, FIRST,
        )  # fmt: skip
        to = (slot * max_chunks + chunk) * rows + row
        kept = (row < rows)[:, None] & (wide < L)[None, :]
        tl.store(partial + to[:, None] * L + wide[None, :], acc, mask=kept)
        tl.store(stats + to * 2, maximum, mask=row < rows)
        tl.store(stats + to * 2 + 1, total, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "start"], do_not_specialize_on_alignment=["page_row"])
def prefill_latent_kernel(
    query,
    pool,
    page_row,
    out,
    scale,
    rows,
    start,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """TILE rows (positions by heads) of a prompt chunk against all before them; the last go first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    wide, narrow = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    source = query + row[:, None] * (L + R)
    q = tl.load(source + wide[None, :], mask=(row < rows)[:, None] & (wide < L)[None, :], other=0.0)
    at = source + L + narrow[None, :]
    turned = tl.load(at, mask=(row < rows)[:, None] & (narrow < R)[None, :], other=0.0)
    position = (start + row // H).to(tl.int32)
    end = start + tl.minimum(rows - 1, tile * TILE + TILE - 1) // H + 1
    _, total, acc = attend_latents(
        tl.full((TILE,), UNSEEN, tl.float32), tl.zeros((TILE,), tl.float32),
        tl.zeros((TILE, BLOCK_L), tl.float32), q, turned, pool, page_row,
        position, 0, end, scale, L, R, PAGE, BLOCK, BLOCK_L, BLOCK_R, 0,
    )  # fmt: skip
    to = out + row[:, None] * L + wide[None, :]
    kept = (row < rows)[:, None] & (wide < L)[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=kept)
