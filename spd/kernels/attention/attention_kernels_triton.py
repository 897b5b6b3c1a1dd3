# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `paged_attention`, for windows and for prompt chunks.

Chunks are those of `attention_plan_triton`. A SLIDING window, SOFTCAP or sinks of None add nothing to
the compiled program. The online softmax of a row starts from its head's sink, where there is one:
with that maximum and a sum of 1.

Pools are codes where scales are not None. Scales are loaded one block ahead, for Triton moves no
load before the block whose scores it is multiplied with.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.arrivals_triton import next_turn
from spd.kernels.attention.attention_plan_triton import chunk_begin, chunk_of, chunk_size
from spd.kernels.attention.cache_rows_triton import load_block_scales, prefetch_scales, weight_type
from spd.kernels.attention.combine_triton import (
    EMPTY_MAXIMUM,
    LOG2_E,
    combine_last,
    load_last_keys,
    store_in_place,
)
from spd.kernels.attention.rotary_store_triton import rotate_run
from spd.kernels.overlap_triton import prefetch, wait_and_release

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, to within 2e-7."""
    power = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -size, size)


@triton.jit
def prefetch_page(pool, page, first, head, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Prefetch one head's keys or values of a page, from its row `first` on, into L2."""
    LINE: tl.constexpr = 128 // (pool.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (D + LINE - 1) // LINE
    row = page * PAGE + tl.minimum(first + tl.arange(0, PAGE), PAGE - 1)
    for line in tl.static_range(LINES):
        prefetch(pool + row * (K * D) + head * D + line * LINE)


@triton.jit
def load_page_ids(page_row, begin, pages, COUNT: tl.constexpr, PAGE: tl.constexpr):
    """Load the ids int32 [COUNT] of the pages from position begin's on, 0 beyond a row's `pages`.

    Rows are full: those behind a context are ids too, and nothing waits for its length.
    """
    page = begin // PAGE + tl.arange(0, COUNT)
    return tl.load(page_row + page, mask=page < pages, other=0).to(tl.int32)


@triton.jit
def page_of(page_row, page_ids, first_page, position, end, PAGE):
    """Return the id of the page that holds a position, of any page at or after end.

    page_ids: of the pages from first_page on; None: the id is loaded.
    """
    if page_ids is not None:
        is_asked = tl.arange(0, page_ids.shape[0]) == position // PAGE - first_page
        page = tl.sum(tl.where(is_asked, page_ids, 0), 0).to(tl.int64)
    else:
        page = tl.load(page_row + position // PAGE, mask=position < end, other=0)
    return page


@triton.jit
def mask_scores(scores, key, position, row_end, SLIDING, FIRST):
    """Return scores [rows, keys], -inf for keys that a row does not attend to."""
    visible = key[None, :] <= row_end[:, None]
    if FIRST > 0:
        visible = visible & (key[None, :] >= tl.minimum(position, FIRST)[:, None])
    if SLIDING is not None:
        visible = visible & (key[None, :] > position[:, None] - SLIDING)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def cap_scores(scores, scale, SOFTCAP):
    """Return scores, capped where they are, and the factor that makes exponents of two of them."""
    factor = scale
    if SOFTCAP is not None:
        scores = tanh(scores * scale)
        factor = SOFTCAP * _LOG2_E
    return scores, factor


@triton.jit
def weigh(scores, factor, maximum):
    """Return rows' new maximum of scores times factor, what rescales their sums, and weights."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
    # An explicit fma: the compiler would fuse this multiply-add only where nothing is masked.
    weights = tl.exp2(tl.fma(scores, factor, -new_maximum[:, None]))
    return new_maximum, tl.exp2(maximum - new_maximum), weights


@triton.jit
def load_item(items, tile, tiles_per_item, max_items):
    """Load the item of a tile, where each item has tiles_per_item tiles."""
    return tl.load(items + tile // tiles_per_item, mask=tile // tiles_per_item < max_items, other=0)


@triton.jit
def prefetch_item(
    pools, page_table, pages, item, head, is_listed, K, D, PAGE, SMALL, TWICE_FROM,
    LARGE_FROM,
):  # fmt: skip
    """Prefetch the first page of an item into L2, for one head; nothing unless is_listed."""
    begin = chunk_begin(item & 0xFFFF, SMALL, TWICE_FROM, LARGE_FROM)
    page = tl.load(
        page_table + (item >> 16).to(tl.int64) * pages + begin // PAGE, mask=is_listed, other=0
    )
    if is_listed:
        prefetch_page(pools.key_pages, page, begin % PAGE, head, K, D, PAGE)
        prefetch_page(pools.value_pages, page, begin % PAGE, head, K, D, PAGE)
        if pools.key_scales is not None:
            prefetch_scales(pools.key_scales, page, begin % PAGE, head, K, PAGE)
            prefetch_scales(pools.value_scales, page, begin % PAGE, head, K, PAGE)


class PartialSums(NamedTuple):
    """Where a tile's sums of each chunk go: float32 pointers, and the chunks' borders.

    partial and stats are those of the tile's rows [TILE] in the slot's first chunk, `chunk_rows`
    apart in the next.
    """

    partial: Tensor
    stats: Tensor
    row_mask: Tensor
    chunk_rows: Tensor
    small: int
    twice_from: int
    large_from: int


@triton.jit
def store_chunk(sums, position, maximum, total, acc, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a tile's sums of the chunk that holds a position."""
    chunk = chunk_of(position, sums.small, sums.twice_from, sums.large_from)
    column = tl.arange(0, BLOCK_D)[None, :]
    at = chunk.to(tl.int64) * sums.chunk_rows
    row_mask = sums.row_mask
    values = (sums.partial + at * D)[:, None] + column
    store_in_place(values, acc, row_mask[:, None] & (column < D))
    tl.store(sums.stats + at * 2, maximum, mask=row_mask)
    tl.store(sums.stats + at * 2 + 1, total, mask=row_mask)


@triton.jit
def attend_block(
    maximum, total, acc, keep, q, k, v, k_scale, v_scale, key, position, row_end, scale,
    SLIDING, SOFTCAP, MASKED, FIRST,
):  # fmt: skip
    """Add a block of keys and values to a tile's online softmax, times the scales of codes.

    keep: what the sums before are multiplied by, besides.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if k_scale is not None:
        scores = scores * k_scale[None, :]
    scores, factor = cap_scores(scores, scale, SOFTCAP)
    if MASKED:
        scores = mask_scores(scores, key, position, row_end, SLIDING, FIRST)
    maximum, rescale, weights = weigh(scores, factor, maximum)
    rescale *= keep
    total = total * rescale + tl.sum(weights, 1)
    if v_scale is not None:
        weights = weights * v_scale[None, :]
    v = v.to(weight_type(q.dtype, v_scale is not None))
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return maximum, total, acc


@triton.jit
def end_block(sums, start, next_start, end, maximum, total, acc, D, BLOCK_D):
    """Store the sums of the chunk that the block ends.

    Return the maximum for the next block, and 0 if it takes nothing over, else 1.
    """
    size = chunk_size(start, sums.small, sums.twice_from, sums.large_from)
    is_end = (next_start % size == 0) | (next_start >= end)
    if is_end:
        store_chunk(sums, start, maximum, total, acc, D, BLOCK_D)
    # A maximum that no score is below.
    return tl.where(is_end, EMPTY_MAXIMUM, maximum), tl.where(is_end, 0.0, 1.0)


@triton.jit
def attend_blocks(
    maximum, total, acc, q, pools, page_row, page_ids, head, position, row_end, begin, end, scale,
    K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, MASKED, FIRST, sums,
):  # fmt: skip
    """Add keys [begin, end) to a tile's online softmax; MASKED unless all rows attend to all keys.

    Where there are `sums`, the softmax of each chunk is stored there at its end and begins anew, so
    that keys of the next chunk are loaded meanwhile.

    begin is a multiple of BLOCK; for scale see `score_scale`; FIRST is `causal_bias`'s first_key. A
    row's keys end at row_end, its sliding window at position. Where pages hold whole blocks, page
    ids are loaded ahead, for a block whose address depended on a load could not be prefetched:
    page_ids holds those of a short span, read once; if None, the next is loaded one block early.
    """
    column = tl.arange(0, BLOCK_D)[None, :]
    in_head = column < D
    WHOLE_BLOCKS: tl.constexpr = PAGE % BLOCK == 0
    POLICY: tl.constexpr = "" if page_ids is None else "evict_first"
    ROUNDED: tl.constexpr = pools.key_scales is not None
    first_page = begin // PAGE
    page = page_of(page_row, page_ids, first_page, begin, end, PAGE)
    if ROUNDED and WHOLE_BLOCKS:
        row = tl.multiple_of(begin % PAGE, BLOCK) + tl.arange(0, BLOCK)
        next_scales = load_block_scales(pools, page, row, head, K, PAGE)
    keep = 1.0
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        # From `end` on the pools may hold anything, NaN too, and zero times NaN is NaN. No code is.
        in_range = (key < end)[:, None] & in_head if MASKED and not ROUNDED else in_head
        offsets = head * D + column
        if WHOLE_BLOCKS:
            if page_ids is not None and not ROUNDED:
                page = page_of(page_row, page_ids, first_page, start, end, PAGE)
            first = (page * PAGE + start % PAGE) * (K * D)
            offsets += tl.arange(0, BLOCK)[:, None] * (K * D)
            page = page_of(page_row, page_ids, first_page, start + BLOCK, end, PAGE)
            if ROUNDED:
                k_scale, v_scale = next_scales
                row = tl.multiple_of((start + BLOCK) % PAGE, BLOCK) + tl.arange(0, BLOCK)
                next_scales = load_block_scales(pools, page, row, head, K, PAGE)
        else:
            pages = tl.load(page_row + key // PAGE, mask=key < end, other=0)
            first = ((pages * PAGE + key % PAGE) * (K * D))[:, None]
            if ROUNDED:
                k_scale, v_scale = load_block_scales(pools, pages, key % PAGE, head, K, PAGE)
        k = tl.load(
            pools.key_pages + first + offsets, mask=in_range, other=0.0, eviction_policy=POLICY
        )
        v = tl.load(
            pools.value_pages + first + offsets, mask=in_range, other=0.0, eviction_policy=POLICY
        )
        maximum, total, acc = attend_block(
            maximum, total, acc, keep, q, k, v, k_scale if ROUNDED else None,
            v_scale if ROUNDED else None, key, position, row_end, scale, SLIDING, SOFTCAP, MASKED, FIRST,
        )  # fmt: skip
        if sums is not None:
            maximum, keep = end_block(
                sums, start, start + BLOCK, end, maximum, total, acc, D, BLOCK_D
            )
    return maximum, total, acc


@triton.jit
def run_of_keys(
    positions, chunk, run, last_position, BLOCK, SLIDING, SMALL, TWICE_FROM, LARGE_FROM
):
    """Return the positions [begin, end) of a run that the rows of a slot's positions attend to."""
    begin = chunk_begin(chunk, SMALL, TWICE_FROM, LARGE_FROM)
    end = tl.minimum(chunk_begin(chunk + run, SMALL, TWICE_FROM, LARGE_FROM), last_position + 1)
    if SLIDING is not None:
        # Positions ascend in a slot: what is before its first row's window is before every row's.
        lowest = tl.load(positions).to(tl.int32)
        begin = tl.maximum(begin, (lowest - (SLIDING - 1)) // BLOCK * BLOCK)
    return begin, end


@triton.jit
def load_run(
    query, projection, pools, positions, angles, kv_slots, row_last, slot, head, first_row, row,
    chunk, run, last_position, queries,
    K, GROUPS, D, BLOCK, BLOCK_D, BLOCK_HALF, ROTATED, PAGE, SLIDING, SMALL, TWICE_FROM, LARGE_FROM,
):  # fmt: skip
    """Load the queries of a KV head's rows, their positions and last keys, and the run's positions
    [begin, end).

    Row i is of the group's head i % GROUPS at its token. Rows of a projection, which has angles, are
    rotated first.
    """
    if angles is not None:
        rotate_run(
            projection, query, pools, positions, angles, kv_slots, slot, head, first_row,
            row.shape[0], chunk, run, queries, K, GROUPS, D // 2, BLOCK_HALF, ROTATED, PAGE, SMALL,
            TWICE_FROM, LARGE_FROM,
        )  # fmt: skip
    rows = queries * GROUPS
    column = tl.arange(0, BLOCK_D)[None, :]
    token = slot * queries + row // GROUPS
    position = tl.load(positions + token, mask=row < rows, other=-1).to(tl.int32)
    row_end = load_last_keys(row_last, token, row < rows, position)
    at = (token * (K * GROUPS) + head * GROUPS + row % GROUPS)[:, None] * D + column
    q = tl.load(query + at, mask=(row < rows)[:, None] & (column < D), other=0.0)
    begin, end = run_of_keys(
        positions + slot * queries, chunk, run, last_position, BLOCK, SLIDING, SMALL, TWICE_FROM,
        LARGE_FROM,
    )  # fmt: skip
    return q, position, row_end, begin, end


@triton.jit
def take_item(items, counts, num_tiles, tiles_per_item, max_items):
    """Take the next tile that no program has taken; return it and its item."""
    tile = next_turn(counts + 2, num_tiles)
    return tile, load_item(items, tile, tiles_per_item, max_items)


@triton.jit(
    do_not_specialize=["slots", "queries", "pages", "max_chunks"],
    do_not_specialize_on_alignment=[
        "page_table",
        "positions",
        "valid",
        "row_last",
        "angles",
        "kv_slots",
    ],
)
def attend_chunk_kernel(
    query, pools, page_table, positions, last, runs, items, counts, partial, stats, scale, slots,
    queries, pages, max_chunks, valid, row_last, sinks, arrived, out, projection, angles, kv_slots,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SMALL: tl.constexpr, TWICE_FROM: tl.constexpr,
    LARGE_FROM: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr, FIRST: tl.constexpr,
    PAGES: tl.constexpr, COMBINED: tl.constexpr, COMBINED_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend TILE rows (a slot's queries by its group's heads) to runs of chunks, turn by turn."""
    wait_and_release(PDL)
    rows = queries * GROUPS
    tiles_per_head = tl.cdiv(rows, TILE)
    # Dependent loads dominate the time of a short context: the first items are loaded together with
    # the count, each later one two items early, so that its first page is in L2 when it begins.
    tiles_per_item = K * tiles_per_head
    max_items = slots * max_chunks
    num_tiles = tl.load(counts) * tiles_per_item
    run = tl.load(counts + 1)
    tile = tl.program_id(0)
    item = load_item(items, tile, tiles_per_item, max_items)
    next_tile, next_item = take_item(items, counts, num_tiles, tiles_per_item, max_items)
    while tile < num_tiles:
        slot = (item >> 16).to(tl.int64)
        head = (tile // tiles_per_head) % K
        first_row = (tile % tiles_per_head) * TILE
        row = first_row + tl.arange(0, TILE)
        q, position, row_end, begin, end = load_run(
            query, projection, pools, positions, angles, kv_slots, row_last, slot, head, first_row,
            row, item & 0xFFFF, run, tl.load(last + slot), queries, K, GROUPS, D, BLOCK, BLOCK_D,
            BLOCK_HALF, ROTATED, PAGE, SLIDING, SMALL, TWICE_FROM, LARGE_FROM,
        )  # fmt: skip
        page_row = page_table + slot * pages
        page_ids = load_page_ids(page_row, begin, pages, PAGES, PAGE)
        own_tile = slot * tiles_per_item + tile % tiles_per_item
        tile = next_tile
        item = next_item
        next_tile, next_item = take_item(items, counts, num_tiles, tiles_per_item, max_items)
        if PDL and SLIDING is None:  # an item's first page may lie before a sliding window
            prefetch_item(
                pools, page_table, pages, item, tile // tiles_per_head % K, tile < num_tiles, K, D,
                PAGE, SMALL, TWICE_FROM, LARGE_FROM,
            )  # fmt: skip
        at = (slot * max_chunks * K + head) * rows + row
        sums = PartialSums(
            partial + at * D, stats + at * 2, row < rows, K * rows, SMALL, TWICE_FROM, LARGE_FROM
        )
        attend_blocks(
            tl.full((TILE,), EMPTY_MAXIMUM, tl.float32), tl.zeros((TILE,), tl.float32),
            tl.zeros((TILE, BLOCK_D), tl.float32), q, pools, page_row, page_ids, head, position,
            row_end, begin, end, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True, FIRST,
            sums,
        )  # fmt: skip
        if out is not None:
            combine_last(
                arrived + own_tile, runs + slot, partial, stats, positions, valid, row_last, sinks,
                out, slot, head, first_row, queries, max_chunks, K, GROUPS, D, TILE, COMBINED_ROWS,
                COMBINED, BLOCK_D, SMALL, TWICE_FROM, LARGE_FROM, SLIDING,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "start"], do_not_specialize_on_alignment=["page_row"])
def prefill_attention_kernel(
    query, pools, page_row, sinks, out, scale, rows, start,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Attend TILE rows of one head. The last tiles have the most keys and go first."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_D)
    row_mask = (row < rows)[:, None] & (column < D)[None, :]
    at = (row * (K * GROUPS) + head)[:, None] * D + column[None, :]
    q = tl.load(query + at, mask=row_mask, other=0.0)
    position = start + row
    visible_to_all = (start + tile * TILE + 1) // BLOCK * BLOCK
    end = start + tl.minimum(rows, (tile + 1) * TILE)

    maximum = tl.full((TILE,), EMPTY_MAXIMUM, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    if sinks is not None:
        maximum = tl.full((TILE,), tl.load(sinks + head) * _LOG2_E, tl.float32)
        total += 1.0
    acc = tl.zeros((TILE, BLOCK_D), tl.float32)
    begin = 0
    if SLIDING is not None:
        # First the blocks that some row's window cuts, then those visible to all rows, then the
        # last.
        begin = tl.maximum(start + tile * TILE - (SLIDING - 1), 0) // BLOCK * BLOCK
        cut = tl.maximum(end - SLIDING + BLOCK - 1, 0) // BLOCK * BLOCK
        cut = tl.minimum(tl.maximum(cut, begin), visible_to_all)
        maximum, total, acc = attend_blocks(
            maximum, total, acc, q, pools, page_row, None, head // GROUPS, position, position, begin,
            cut, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True, FIRST,
            None,
        )  # fmt: skip
        begin = cut
    maximum, total, acc = attend_blocks(
        maximum, total, acc, q, pools, page_row, None, head // GROUPS, position, position, begin,
        visible_to_all, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, FIRST > 0, FIRST,
        None,
    )  # fmt: skip
    maximum, total, acc = attend_blocks(
        maximum, total, acc, q, pools, page_row, None, head // GROUPS, position, position,
        visible_to_all, end, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True, FIRST, None,
    )  # fmt: skip
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=row_mask)
