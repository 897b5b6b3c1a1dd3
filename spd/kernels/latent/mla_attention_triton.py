# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `mla_attention`: attention over latents, split into the chunks of
`paged_attention`.

A latent is loaded once and is both key and value of every head, so that a tile of rows, heads of
one or of several queries, reads L + R values a position where keys and values of each head would be
hundreds of times as many. Latents are multiplied in halves, and rows are loaded and stored in
pieces of their columns, so that a thread has few rows: their addresses, live over the loop, would
not fit in registers together with a tile's sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.arrivals_triton import next_turn
from spd.kernels.attention.attention_kernels_triton import load_item, mask_scores
from spd.kernels.attention.attention_plan_triton import chunk_begin
from spd.kernels.attention.cache_rows_triton import (
    codes_of,
    entry_scales,
    is_not_finite,
    weight_type,
)
from spd.kernels.attention.combine_triton import EMPTY_MAXIMUM, LOG2_E
from spd.kernels.attention.paged_attention import AttentionParams, AttentionPlan
from spd.kernels.attention.paged_attention_triton import (
    RESERVED_BYTES,
    ChunkPlan,
    SplitPlan,
    attend_chunks,
    combine_chunks,
    programs_that_fit,
)
from spd.kernels.attention.rotary_store import RotatedRows, count_pairs
from spd.kernels.launch import Device, ceil_div, device_properties, pdl_options, power_of_two
from spd.kernels.linear.skinny_config import TENSOR_MEMORY_ARCHITECTURES
from spd.kernels.overlap_triton import wait_and_release

HEADS_A_PROGRAM = 8
"""Query heads that a program rotates."""
ROW_TILE = 64
"""Rows of a tile: all heads of a query or half of them, so that latents are read once or twice.

128 sums a thread leave few registers: the module's docstring says what keeps them out of local
memory.
"""
KEY_BLOCK = 32
"""Positions that a tile attends to at a time."""
FEW_HEADS = 16
"""Heads of which a window's tiles hold one query's: more rows would mostly be padding."""
WARPS = 8


@triton.jit
def store_latent(entry, scales, slot, value, first, second, has_value, has_key, L, HALF):
    """Store a normed latent part, and a rotated key in halves: as codes where there are scales.

    See `replace_non_finite` and `cache_rows.round_entries`.
    """
    is_faulty = tl.max(is_not_finite(value).to(tl.int32), 0)
    of_key = tl.max((is_not_finite(first) | is_not_finite(second)).to(tl.int32), 0)
    is_faulty = (is_faulty | of_key) > 0
    if scales is not None:
        value = value.to(tl.float32)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        key_scale, value_scale, is_faulty = entry_scales(
            tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 0),
            tl.max(tl.abs(value), 0),
            is_faulty,
        )
        value = codes_of(value, value_scale)
        first = codes_of(first, key_scale)
        second = codes_of(second, key_scale)
        tl.store(scales + slot * 2, value_scale)
        tl.store(scales + slot * 2 + 1, tl.where(is_faulty, float("nan"), key_scale))
    else:
        value = tl.where(is_not_finite(value), 0.0, value)
        first = tl.where(is_faulty, float("nan"), first)
        second = tl.where(is_faulty, float("nan"), second)
    column = tl.arange(0, first.shape[0])
    tl.store(entry + tl.arange(0, value.shape[0]), value, mask=has_value)
    tl.store(entry + L + column, first, mask=has_key)
    tl.store(entry + L + HALF + column, second, mask=has_key)


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_slots", "query", "latent"])
def latent_store_kernel(
    query, latent, cos, sin, positions, kv_slots, norm, pages, scales, rotated_query, epsilon, query_row,
    query_head, latent_row,
    H: tl.constexpr, L: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS of one row's H query heads.

    The first of a row's programs also stores its latent.
    """
    wait_and_release(PDL)
    R: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    within = column < HALF
    position = tl.load(positions + row)
    cosine = tl.load(cos + position * R + column, mask=within, other=0.0).to(tl.float32)
    sine = tl.load(sin + position * R + HALF + column, mask=within, other=0.0).to(tl.float32)
    source = query + row * query_row + head[:, None] * query_head + column[None, :]
    mask = (head < H)[:, None] & within[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    to = rotated_query + row * (H * R) + head[:, None] * R + column[None, :]
    dtype = rotated_query.dtype.element_ty
    tl.store(to, (x * cosine[None, :] - y * sine[None, :]).to(dtype), mask=mask)
    tl.store(to + HALF, (y * cosine[None, :] + x * sine[None, :]).to(dtype), mask=mask)
    if tl.program_id(1) == 0:
        slot = tl.load(kv_slots + row)
        entry = pages + slot * (L + R)
        latent_column = tl.arange(0, BLOCK_L)
        value = tl.load(
            latent + row * latent_row + latent_column, mask=latent_column < L, other=0.0
        ).to(tl.float32)
        scale = tl.load(norm + latent_column, mask=latent_column < L, other=0.0).to(tl.float32)
        value = (value * tl.rsqrt(tl.sum(value * value, 0) / L + epsilon) * scale).to(dtype)
        key = latent + row * latent_row + L + column
        first = tl.load(key, mask=within, other=0.0).to(tl.float32)
        second = tl.load(key + HALF, mask=within, other=0.0).to(tl.float32)
        rotated_first = (first * cosine - second * sine).to(dtype)
        rotated_second = (second * cosine + first * sine).to(dtype)
        store_latent(
            entry, scales, slot, value, rotated_first, rotated_second, latent_column < L, within, L, HALF
        )  # fmt: skip


@triton.jit
def load_half(source, inside, FROM, L, R, TILE, HALF):
    """Load columns [FROM, FROM + HALF) of TILE rows of L + R values: [TILE, HALF], zeros beyond
    L."""
    PIECE: tl.constexpr = HALF if HALF < 64 else 64
    column = (
        FROM
        + (tl.arange(0, HALF // PIECE) * PIECE)[:, None, None]
        + tl.arange(0, PIECE)[None, None, :]
    )
    at = (tl.arange(0, TILE) * (L + R))[None, :, None] + column
    pieces = tl.load(source + at, mask=inside[None, :, None] & (column < L), other=0.0)
    return tl.reshape(tl.permute(pieces, (1, 0, 2)), (TILE, HALF))


@triton.jit
def store_half(to, values, inside, FROM, L, TILE, HALF):
    """Store values [TILE, HALF] to the columns from FROM on of rows of L values each."""
    PIECE: tl.constexpr = HALF if HALF < 64 else 64
    pieces = tl.permute(tl.reshape(values, (TILE, HALF // PIECE, PIECE)), (1, 0, 2))
    column = (
        FROM
        + (tl.arange(0, HALF // PIECE) * PIECE)[:, None, None]
        + tl.arange(0, PIECE)[None, None, :]
    )
    at = (tl.arange(0, TILE) * L)[None, :, None] + column
    tl.store(to + at, pieces.to(to.dtype.element_ty), mask=inside[None, :, None] & (column < L))


@triton.jit
def load_entry_scales(scales, page, start, PAGE, BLOCK):
    """Load the scales of a block's entries, written or not: of latent parts, and of rotated ones.

    See `load_block_scales`.
    """
    at = scales + (page * PAGE + start % PAGE + tl.arange(0, BLOCK)) * 2
    return tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32)


@triton.jit
def attend_latents(
    maximum, total, sums_a, sums_b, query_a, query_b, query_rope, pool, scales, page_row, position, begin,
    end, scale, L, R, PAGE, BLOCK, HALF, BLOCK_R, FIRST,
):  # fmt: skip
    """Add positions [begin, end) to a tile's online softmax, masked by each row's position.

    scales: of codes, loaded one block ahead as in `attend_blocks`; None where the pool has none.

    query_a, query_b [rows, HALF] and query_rope [rows, BLOCK_R]: the halves of the queries' latent
    part, and the rotated part. begin is a multiple of BLOCK, which divides PAGE; scale includes
    log2(e), for weights are computed by exp2.
    """
    column_a = tl.arange(0, HALF)
    column_b = HALF + tl.arange(0, HALF)
    rope_column = tl.arange(0, BLOCK_R)
    ROUNDED: tl.constexpr = scales is not None
    TYPE: tl.constexpr = query_a.dtype
    WEIGHT_TYPE: tl.constexpr = weight_type(TYPE, ROUNDED)
    page = tl.load(page_row + begin // PAGE, mask=begin < end, other=0)
    if ROUNDED:
        next_scales = load_entry_scales(scales, page, begin, PAGE, BLOCK)
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        # From `end` on the pool may hold anything, NaN too, and zero times NaN is NaN.
        in_range = (key < end)[:, None]
        first = (page * PAGE + start % PAGE) * (L + R)
        rows = pool + first + tl.arange(0, BLOCK)[:, None] * (L + R)
        # One block ahead: latents whose address depends on a load could not be prefetched.
        next_start = start + BLOCK
        page = tl.load(page_row + next_start // PAGE, mask=next_start < end, other=0)
        a = tl.load(rows + column_a[None, :], mask=in_range & (column_a < L)[None, :], other=0.0)
        b = tl.load(rows + column_b[None, :], mask=in_range & (column_b < L)[None, :], other=0.0)
        r = tl.load(
            rows + L + rope_column[None, :], mask=in_range & (rope_column < R)[None, :], other=0.0
        )
        scores = tl.dot(query_a, tl.trans(a.to(TYPE)), input_precision="ieee")
        scores = tl.dot(query_b, tl.trans(b.to(TYPE)), scores, input_precision="ieee")
        if ROUNDED:
            latent_scale, rotated_scale = next_scales
            next_scales = load_entry_scales(scales, page, next_start, PAGE, BLOCK)
            scores = scores * latent_scale[None, :]
            rotated = tl.dot(query_rope, tl.trans(r.to(TYPE)), input_precision="ieee")
            scores = tl.fma(rotated, rotated_scale[None, :], scores)
            scores = scores * scale
        else:
            scores = tl.dot(query_rope, tl.trans(r), scores, input_precision="ieee") * scale
        scores = mask_scores(scores, key, position, position, None, FIRST)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, 1)
        if ROUNDED:
            weights = weights * latent_scale[None, :]
        weights = weights.to(WEIGHT_TYPE)
        a = a.to(WEIGHT_TYPE)
        b = b.to(WEIGHT_TYPE)
        sums_a = tl.dot(weights, a, sums_a * rescale[:, None], input_precision="ieee")
        sums_b = tl.dot(weights, b, sums_b * rescale[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, sums_a, sums_b


@triton.jit(
    do_not_specialize=["slots", "queries", "pages", "max_chunks"],
    do_not_specialize_on_alignment=["page_table", "positions"],
)
def attend_latent_chunk_kernel(
    query, pool, scales, page_table, positions, last, runs, items, counts, partial, stats, scale, slots,
    queries, pages, max_chunks,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, SMALL: tl.constexpr,
    TWICE_FROM: tl.constexpr, LARGE_FROM: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend TILE rows (a slot's queries by heads) to runs of chunks, turn by turn.

    See `attend_chunk_kernel`.
    """
    wait_and_release(PDL)
    HALF: tl.constexpr = BLOCK_L // 2
    rows = queries * H
    tiles = tl.cdiv(rows, TILE)
    rope_column = tl.arange(0, BLOCK_R)
    max_items = slots * max_chunks
    num_tiles = tl.load(counts) * tiles
    run = tl.load(counts + 1)
    tile = tl.program_id(0)
    item = load_item(items, tile, tiles, max_items)
    next_tile = next_turn(counts + 2, num_tiles)
    while tile < num_tiles:
        slot = (item >> 16).to(tl.int64)
        first_chunk = item & 0xFFFF
        first_row = (tile % tiles) * TILE
        row = first_row + tl.arange(0, TILE)
        inside = row < rows
        token = slot * queries + row // H
        row_position = tl.load(positions + token, mask=inside, other=-1).to(tl.int32)
        source = query + (slot * rows + first_row) * (L + R)
        query_a = load_half(source, inside, 0, L, R, TILE, HALF)
        query_b = load_half(source, inside, HALF, L, R, TILE, HALF)
        at = source + L + ((tl.arange(0, TILE) * (L + R))[:, None] + rope_column[None, :])
        query_rope = tl.load(at, mask=inside[:, None] & (rope_column < R)[None, :], other=0.0)
        last_position = tl.load(last + slot)
        tile = next_tile
        item = load_item(items, tile, tiles, max_items)
        next_tile = next_turn(counts + 2, num_tiles)
        for chunk in range(first_chunk, tl.minimum(first_chunk + run, max_chunks)):
            begin = chunk_begin(chunk, SMALL, TWICE_FROM, LARGE_FROM)
            end = tl.minimum(
                chunk_begin(chunk + 1, SMALL, TWICE_FROM, LARGE_FROM), last_position + 1
            )
            maximum, total, sums_a, sums_b = attend_latents(
                tl.full((TILE,), EMPTY_MAXIMUM, tl.float32), tl.zeros((TILE,), tl.float32),
                tl.zeros((TILE, HALF), tl.float32), tl.zeros((TILE, HALF), tl.float32), query_a,
                query_b, query_rope, pool, scales, page_table + slot * pages, row_position, begin,
                end, scale, L, R, PAGE, BLOCK, HALF, BLOCK_R, FIRST,
            )  # fmt: skip
            to = (slot * max_chunks + chunk) * rows + first_row
            store_half(partial + to * L, sums_a, inside, 0, L, TILE, HALF)
            store_half(partial + to * L, sums_b, inside, HALF, L, TILE, HALF)
            row_stats = stats + to * 2 + tl.arange(0, TILE) * 2
            tl.store(row_stats, maximum, mask=inside)
            tl.store(row_stats + 1, total, mask=inside)


@triton.jit(do_not_specialize=["rows", "start"], do_not_specialize_on_alignment=["page_row"])
def prefill_latent_kernel(
    query, pool, scales, page_row, out, scale, rows, start, H: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Attend TILE rows (positions by heads) of a prompt chunk to all before them.

    The last go first.
    """
    HALF: tl.constexpr = BLOCK_L // 2
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE
    row = first_row + tl.arange(0, TILE)
    inside = row < rows
    rope_column = tl.arange(0, BLOCK_R)
    source = query + first_row.to(tl.int64) * (L + R)
    query_a = load_half(source, inside, 0, L, R, TILE, HALF)
    query_b = load_half(source, inside, HALF, L, R, TILE, HALF)
    at = source + L + ((tl.arange(0, TILE) * (L + R))[:, None] + rope_column[None, :])
    query_rope = tl.load(at, mask=inside[:, None] & (rope_column < R)[None, :], other=0.0)
    end = start + tl.minimum(rows - 1, first_row + TILE - 1) // H + 1
    _, total, sums_a, sums_b = attend_latents(
        tl.full((TILE,), EMPTY_MAXIMUM, tl.float32), tl.zeros((TILE,), tl.float32),
        tl.zeros((TILE, HALF), tl.float32), tl.zeros((TILE, HALF), tl.float32), query_a, query_b, query_rope,
        pool, scales, page_row, start + row // H, 0, end, scale, L, R, PAGE, BLOCK, HALF, BLOCK_R, 0,
    )  # fmt: skip
    to = out + first_row.to(tl.int64) * L
    store_half(to, sums_a / total[:, None], inside, 0, L, TILE, HALF)
    store_half(to, sums_b / total[:, None], inside, HALF, L, TILE, HALF)


def tile_shape(
    dtype: torch.dtype, latent: int, device: Device, *, rounded: bool = False
) -> tuple[int, int, int]:
    """Return rows and positions a tile, and pipeline stages, by model and device.

    The argument latent is L + R. rounded: True if pages hold codes.
    """
    size = dtype.itemsize
    if size == 4:
        return ROW_TILE // 4, KEY_BLOCK // 2, 1
    room = device.shared - RESERVED_BYTES
    if rounded:  # widened in registers, which leaves none for more rows
        rows = ROW_TILE // 2
        for keys in (KEY_BLOCK, KEY_BLOCK // 2):
            stages = (room - (rows + keys) * latent * size) // (keys * latent)
            if stages >= 2:
                return rows, keys, min(3, stages)
        return rows // 2, KEY_BLOCK // 2, 1
    if device.capability[0] in TENSOR_MEMORY_ARCHITECTURES:
        return (
            ROW_TILE // 2,
            KEY_BLOCK,
            min(3, (room // size // latent - ROW_TILE // 2) // KEY_BLOCK),
        )
    for rows, keys in ((ROW_TILE, KEY_BLOCK), (ROW_TILE // 2, KEY_BLOCK // 2)):
        stages = (room - (latent + keys) * rows * size) // (keys * latent * size)
        if stages >= 1:
            return rows, keys, min(3, stages)
    return ROW_TILE // 4, KEY_BLOCK // 2, 1


def window_tile(
    dtype: torch.dtype, heads: int, latent: int, device: Device, *, rounded: bool
) -> tuple[int, int, int]:
    """Return `tile_shape` for windows, whose tiles are short where there are few heads."""
    if heads <= FEW_HEADS and dtype.itemsize == 2 and not rounded:
        room = (device.shared - RESERVED_BYTES) // (latent * dtype.itemsize) - FEW_HEADS
        for keys in (2 * KEY_BLOCK, KEY_BLOCK):
            if room >= 2 * keys:
                return FEW_HEADS, keys, min(3, room // keys)
    return tile_shape(dtype, latent, device, rounded=rounded)


def latent_store(
    query: Tensor,
    latent: Tensor,
    rows: RotatedRows,
    norm: Tensor,
    epsilon: float,
    pages: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Launch `Kernels.latent_store`.

    The last strides of query and latent are 1, positions are not None.
    """
    assert rows.positions is not None and query.stride(-1) == latent.stride(-1) == 1
    count, heads, size = query.shape
    rank = norm.shape[0]
    pairs = count_pairs(size)
    rotated_query = torch.empty(count, heads, size, dtype=query.dtype, device=query.device)
    heads_a_program = min(HEADS_A_PROGRAM, power_of_two(heads))
    sizes = {"H": heads, "HEADS": heads_a_program, "HALF": pairs, "BLOCK": power_of_two(pairs)}
    sizes |= {"L": rank, "BLOCK_L": power_of_two(rank), "num_warps": 4}
    latent_store_kernel[(count, ceil_div(heads, heads_a_program))](
        query,
        latent,
        rows.cos,
        rows.sin,
        rows.positions,
        rows.kv_slots,
        norm,
        pages,
        scales,
        rotated_query,
        epsilon,
        query.stride(0),
        query.stride(1),
        latent.stride(0),
        **sizes,
        **pdl_options(query.device),
    )
    return rotated_query


def _shape_constants(
    query: Tensor, pages: Tensor, rank: int, tile: tuple[int, int, int]
) -> dict[str, int]:
    """Return constants and launch options of both attention kernels, for a tile's shape."""
    heads, size = query.shape[-2:]
    rows, keys, stages = tile
    keys = min(keys, pages.shape[1])
    assert pages.shape[1] % keys == 0
    shape = {"H": heads, "L": rank, "R": size - rank, "TILE": rows, "BLOCK": keys}
    shape |= {"BLOCK_L": max(32, power_of_two(rank)), "BLOCK_R": max(16, power_of_two(size - rank))}
    return shape | {"num_warps": WARPS, "num_stages": stages}


def mla_attention(
    query: Tensor,
    pages: Tensor,
    plan: AttentionPlan,
    rank: int,
    scale: float,
    scales: Tensor | None = None,
) -> Tensor:
    """Launch `Kernels.mla_attention`, with a plan of `paged_attention_triton`."""
    if isinstance(plan, ChunkPlan):
        return _attend_prompt(query[0], (pages, scales), plan, rank, scale)[None]
    assert isinstance(plan, SplitPlan)
    slots, width, heads, size = query.shape
    device = device_properties(query.device)
    tile = window_tile(query.dtype, heads, size, device, rounded=scales is not None)
    shape = _shape_constants(query, pages, rank, tile)
    rows, keys, stages = tile
    program_bytes = (rows * query.itemsize + keys * stages * pages.itemsize) * size
    attend_chunks(
        kernel=attend_latent_chunk_kernel,
        query=query,
        pools=(pages, scales),
        plan=plan,
        params=AttentionParams(scale),
        programs=programs_that_fit(device, program_bytes),
        **shape,
    )
    out = torch.empty((slots, width, heads, rank), dtype=query.dtype, device=query.device)
    sizes = {"K": 1, "GROUPS": heads, "D": rank, "BLOCK_D": shape["BLOCK_L"], "SLIDING": None}
    return combine_chunks(out, plan, None, num_warps=4, **sizes)


def _attend_prompt(
    query: Tensor,
    pools: tuple[Tensor, Tensor | None],
    plan: ChunkPlan,
    rank: int,
    scale: float,
) -> Tensor:
    """Attend query [Q, H, L + R] at the positions from the plan's start on: [Q, H, L].

    pools: the pages, and the scales of those that are codes.
    """
    rows, heads, latent = query.shape
    pages, scales = pools
    device = device_properties(query.device)
    tile = tile_shape(query.dtype, latent, device, rounded=scales is not None)
    shape = _shape_constants(query, pages, rank, tile)
    out = torch.empty((rows, heads, rank), dtype=query.dtype, device=query.device)
    prefill_latent_kernel[(ceil_div(rows * heads, shape["TILE"]),)](
        query.contiguous(),
        pages,
        scales,
        plan.page_table[0],
        out,
        scale * LOG2_E,
        rows * heads,
        plan.start,
        PAGE=pages.shape[1],
        **shape,
    )
    return out
