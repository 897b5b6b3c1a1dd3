# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `paged_attention`, for windows and for prompt chunks.

Chunks are ranges of absolute positions: SMALL positions each below FROM, LARGE ones from there on.
A SLIDING window, SOFTCAP or sinks of None add nothing to the compiled program. The online softmax
of a row starts from its head's sink, where there is one: with that maximum and a sum of 1.

Pools are codes where scales are not None. Scales are loaded one block ahead, for Triton moves no
load before the block whose scores it is multiplied with.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from spd.kernels.attention.cache_rows_triton import load_block_scales, prefetch_scales, weight_type
from spd.kernels.overlap_triton import prefetch, wait_and_release

LOG2_E = math.log2(math.e)
"""Softmax weights are computed by exp2, so that the scale of scores includes this factor."""
_LOG2_E = tl.constexpr(LOG2_E)
EMPTY_MAXIMUM = tl.constexpr(-1.0e30)
"""The maximum of no scores: finite, so that a row without keys subtracts without NaN."""


@triton.jit
def is_not_finite(x):
    """True where x is infinite or NaN.

    A test of x - x may fail, for it may be fused with the operation before.
    """
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0


@triton.jit
def chunk_of(position, SMALL: tl.constexpr, LARGE: tl.constexpr, FROM: tl.constexpr):
    """Return the chunk that holds a position."""
    return tl.where(position < FROM, position // SMALL, FROM // SMALL + (position - FROM) // LARGE)


@triton.jit
def chunk_begin(chunk, SMALL: tl.constexpr, LARGE: tl.constexpr, FROM: tl.constexpr):
    """Return the first position of a chunk."""
    FEW: tl.constexpr = FROM // SMALL
    return tl.where(chunk < FEW, chunk * SMALL, FROM + (chunk - FEW) * LARGE)


@triton.jit
def first_chunk(position, SLIDING, SMALL, LARGE, FROM):
    """Return the chunk that holds the first position that a row attends to."""
    return chunk_of(tl.maximum(position - (SLIDING - 1), 0), SMALL, LARGE, FROM)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, to within 2e-7."""
    power = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -size, size)


@triton.jit(
    do_not_specialize=["slots", "queries", "max_chunks"],
    do_not_specialize_on_alignment=["positions", "valid", "row_last"],
)
def plan_attention_kernel(
    positions, valid, row_last, last, items, count, slots, queries, max_chunks,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    FROM: tl.constexpr, SLIDING: tl.constexpr,
):  # fmt: skip
    """List one slot's items. Large chunks of all slots come first, so that no program ends on
    one."""
    FEW: tl.constexpr = FROM // SMALL
    slot = tl.program_id(0)
    slot_ids = tl.arange(0, SLOTS)
    last_positions = tl.full((SLOTS,), -1, tl.int64)
    first_positions = tl.full((SLOTS,), 2**31 - 1, tl.int64)
    for q in range(queries):
        at = slot_ids * queries + q
        is_valid = tl.load(valid + at, mask=slot_ids < slots, other=0) != 0
        ends = positions if row_last is None else row_last
        last_positions = tl.maximum(last_positions, tl.load(ends + at, mask=is_valid, other=-1))
        if SLIDING is not None:
            first_positions = tl.minimum(
                first_positions, tl.load(positions + at, mask=is_valid, other=2**31 - 1)
            )
    last_positions = last_positions.to(tl.int32)
    reached = tl.minimum(chunk_of(last_positions, SMALL, LARGE, FROM) + 1, max_chunks)
    chunks = tl.where(last_positions >= 0, reached, 0)
    small = tl.minimum(chunks, FEW)
    large = chunks - small
    if SLIDING is not None:
        skipped = tl.minimum(
            first_chunk(first_positions.to(tl.int32), SLIDING, SMALL, LARGE, FROM), chunks
        )
        skipped_small = tl.minimum(skipped, FEW)
        small -= skipped_small
        large -= skipped - skipped_small
    first_small = tl.sum(large) + tl.sum(tl.where(slot_ids < slot, small, 0))
    first_large = tl.sum(tl.where(slot_ids < slot, large, 0))
    slot_chunks = tl.sum(tl.where(slot_ids == slot, chunks, 0))
    begin = 0
    if SLIDING is not None:
        begin = tl.sum(tl.where(slot_ids == slot, skipped, 0))
        first_small -= tl.minimum(begin, FEW)
        first_large -= tl.maximum(begin - FEW, 0)
    for start in range(begin, slot_chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        at = tl.where(chunk < FEW, first_small + chunk, first_large + chunk - FEW)
        tl.store(items + at, (slot << 16) | chunk, mask=chunk < slot_chunks)
    tl.store(last + slot, tl.sum(tl.where(slot_ids == slot, last_positions, 0)))
    if slot == 0:
        tl.store(count, tl.sum(small + large))


@triton.jit
def prefetch_page(pool, page, first, head, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Prefetch one head's keys or values of a page, from its row `first` on, into L2."""
    LINE: tl.constexpr = 128 // (pool.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (D + LINE - 1) // LINE
    row = page * PAGE + tl.minimum(first + tl.arange(0, PAGE), PAGE - 1)
    for line in tl.static_range(LINES):
        prefetch(pool + row * (K * D) + head * D + line * LINE)


@triton.jit
def load_page_ids(page_row, begin, end, COUNT: tl.constexpr, PAGE: tl.constexpr):
    """Load the ids [COUNT] of the pages from position begin's on, 0 for pages at or after end."""
    page = begin // PAGE + tl.arange(0, COUNT)
    return tl.load(page_row + page, mask=page * PAGE < end, other=0)


@triton.jit
def page_of(page_row, page_ids, first_page, position, end, PAGE):
    """Return the id of the page that holds a position, 0 at or after end.

    page_ids: of the pages from first_page on; None: the id is loaded.
    """
    if page_ids is not None:
        is_asked = tl.arange(0, page_ids.shape[0]) == position // PAGE - first_page
        page = tl.sum(tl.where(is_asked, page_ids, 0), 0)
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
def load_last_keys(row_last, token, mask, position):
    """Load the last keys of rows at their tokens; their positions where row_last is None."""
    end = position
    if row_last is not None:
        end = tl.load(row_last + token, mask=mask, other=-1).to(tl.int32)
    return end


@triton.jit
def load_item(items, tile, tiles_per_item, max_items):
    """Load the item of a tile, where each item has tiles_per_item tiles."""
    return tl.load(items + tile // tiles_per_item, mask=tile // tiles_per_item < max_items, other=0)


@triton.jit
def prefetch_item(
    pools, page_table, pages, item, head, is_listed, K, D, PAGE, SMALL, LARGE, FROM
):  # fmt: skip
    """Prefetch the first page of an item into L2, for one head; nothing unless is_listed."""
    begin = chunk_begin(item & 0xFFFF, SMALL, LARGE, FROM)
    page = tl.load(
        page_table + (item >> 16).to(tl.int64) * pages + begin // PAGE, mask=is_listed, other=0
    )
    if is_listed:
        prefetch_page(pools.key_pages, page, begin % PAGE, head, K, D, PAGE)
        prefetch_page(pools.value_pages, page, begin % PAGE, head, K, D, PAGE)
        if pools.key_scales is not None:
            prefetch_scales(pools.key_scales, page, begin % PAGE, head, K, PAGE)
            prefetch_scales(pools.value_scales, page, begin % PAGE, head, K, PAGE)


@triton.jit
def attend_blocks(
    maximum, total, acc, q, pools, page_row, page_ids, head, position, row_end, begin, end, scale,
    K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, MASKED, FIRST,
):  # fmt: skip
    """Add keys [begin, end) to a tile's online softmax; MASKED unless all rows attend to all keys.

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
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if ROUNDED:
            scores = scores * k_scale[None, :]
        scores, factor = cap_scores(scores, scale, SOFTCAP)
        if MASKED:
            scores = mask_scores(scores, key, position, row_end, SLIDING, FIRST)
        maximum, rescale, weights = weigh(scores, factor, maximum)
        total = total * rescale + tl.sum(weights, 1)
        if ROUNDED:
            weights = weights * v_scale[None, :]
        v = v.to(weight_type(q.dtype, ROUNDED))
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return maximum, total, acc


@triton.jit
def load_queries(query, token, head, row, column, row_mask, K, GROUPS, D):
    """Load the queries of a KV head's rows: row i is of the group's head i % GROUPS at its
    token."""
    source = (
        query + (token * (K * GROUPS) + head * GROUPS + row % GROUPS)[:, None] * D + column[None, :]
    )
    return tl.load(source, mask=row_mask, other=0.0)


@triton.jit(
    do_not_specialize=["slots", "queries", "pages", "max_chunks"],
    do_not_specialize_on_alignment=["page_table", "positions", "row_last"],
)
def attend_chunk_kernel(
    query, pools, page_table, positions, last, items, count, partial, stats, scale, slots, queries,
    pages, max_chunks, row_last,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    FROM: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr, FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attend TILE rows (a slot's queries by its group's heads) to one chunk of one KV head, item by
    item."""
    wait_and_release(PDL)
    FEW: tl.constexpr = FROM // SMALL
    # One page more than a span fills, since it may begin inside a page; rounded to a power of two.
    PAGES: tl.constexpr = 2 * (LARGE // PAGE) if LARGE >= PAGE else 2
    rows = queries * GROUPS
    tiles_per_head = tl.cdiv(rows, TILE)
    column = tl.arange(0, BLOCK_D)
    # Dependent loads dominate the time of a short context: the first items are loaded together with
    # the count, each later one two items early, so that its first page is in L2 when it begins.
    max_items = slots * max_chunks
    step = tl.num_programs(0)
    item = load_item(items, tl.program_id(0), K * tiles_per_head, max_items)
    next_item = load_item(items, tl.program_id(0) + step, K * tiles_per_head, max_items)
    num_tiles = tl.load(count) * (K * tiles_per_head)
    for tile in range(tl.program_id(0), num_tiles, step):
        slot = (item >> 16).to(tl.int64)
        chunk = item & 0xFFFF
        head = (tile // tiles_per_head) % K
        row = (tile % tiles_per_head) * TILE + tl.arange(0, TILE)
        token = slot * queries + row // GROUPS
        row_position = tl.load(positions + token, mask=row < rows, other=-1).to(tl.int32)
        row_end = load_last_keys(row_last, token, row < rows, row_position)
        row_mask = (row < rows)[:, None] & (column < D)[None, :]
        q = load_queries(query, token, head, row, column, row_mask, K, GROUPS, D)
        begin = chunk_begin(chunk, SMALL, LARGE, FROM)
        page_row = page_table + slot * pages
        item = next_item
        next_item = load_item(items, tile + 2 * step, K * tiles_per_head, max_items)
        end = tl.minimum(begin + tl.where(chunk < FEW, SMALL, LARGE), tl.load(last + slot) + 1)
        if SLIDING is not None:
            # Positions ascend in a slot: what is before its first row's window is before every
            # row's.
            lowest = tl.load(positions + slot * queries).to(tl.int32)
            begin = tl.maximum(begin, (lowest - (SLIDING - 1)) // BLOCK * BLOCK)
        page_ids = load_page_ids(page_row, begin, end, PAGES, PAGE)
        if PDL and SLIDING is None:  # an item's first page may lie before a sliding window
            prefetch_item(
                pools, page_table, pages, item, (tile + step) // tiles_per_head % K,
                tile + step < num_tiles, K, D, PAGE, SMALL, LARGE, FROM,
            )  # fmt: skip
        maximum, total, acc = attend_blocks(
            tl.full((TILE,), EMPTY_MAXIMUM, tl.float32), tl.zeros((TILE,), tl.float32),
            tl.zeros((TILE, BLOCK_D), tl.float32), q, pools, page_row, page_ids, head,
            row_position, row_end, begin, end, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP,
            True, FIRST,
        )  # fmt: skip
        at = ((slot * max_chunks + chunk) * K + head) * rows + row
        tl.store(partial + at[:, None] * D + column[None, :], acc, mask=row_mask)
        tl.store(stats + at * 2, maximum, mask=row < rows)
        tl.store(stats + at * 2 + 1, total, mask=row < rows)


@triton.jit(
    do_not_specialize=["queries", "max_chunks"],
    do_not_specialize_on_alignment=["positions", "valid", "row_last"],
)
def combine_chunks_kernel(
    partial, stats, positions, valid, row_last, sinks, out, queries, max_chunks,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SMALL: tl.constexpr, LARGE: tl.constexpr, FROM: tl.constexpr, SLIDING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of one row and head, BLOCK at a time; an invalid row gives zeros."""
    wait_and_release(PDL)
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    slot = token // queries
    row = (token % queries) * GROUPS + head % GROUPS
    column = tl.arange(0, BLOCK_D)
    position = tl.load(positions + token).to(tl.int32)
    end = load_last_keys(row_last, token, token >= 0, position)
    reached = tl.minimum(chunk_of(end, SMALL, LARGE, FROM) + 1, max_chunks)
    chunks = tl.where(tl.load(valid + token) != 0, reached, 0)
    maximum = tl.full((), EMPTY_MAXIMUM, tl.float32)
    total = tl.zeros((), tl.float32)
    if sinks is not None:
        maximum = tl.load(sinks + head) * _LOG2_E
        total += 1.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    begin = 0
    if SLIDING is not None:
        begin = first_chunk(position, SLIDING, SMALL, LARGE, FROM)
    for start in range(begin, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        in_range = chunk < chunks
        at = ((slot * max_chunks + chunk) * K + head // GROUPS) * (queries * GROUPS) + row
        values = partial + at[:, None] * D + column[None, :]
        x = tl.load(values, mask=in_range[:, None] & (column < D)[None, :], other=0.0)
        peak = tl.load(stats + at * 2, mask=in_range, other=EMPTY_MAXIMUM)
        new_maximum = tl.maximum(maximum, tl.max(peak, 0))
        weights = tl.where(in_range, tl.exp2(peak - new_maximum), 0.0)
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(
            weights * tl.load(stats + at * 2 + 1, mask=in_range, other=0.0), 0
        )
        acc = acc * rescale + tl.sum(weights[:, None] * x, 0)
        maximum = new_maximum
    acc = acc / tl.where(chunks > 0, total, 1.0)
    to = out + (token * (K * GROUPS) + head) * D + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=column < D)


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
        )  # fmt: skip
        begin = cut
    maximum, total, acc = attend_blocks(
        maximum, total, acc, q, pools, page_row, None, head // GROUPS, position, position, begin,
        visible_to_all, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, FIRST > 0, FIRST,
    )  # fmt: skip
    maximum, total, acc = attend_blocks(
        maximum, total, acc, q, pools, page_row, None, head // GROUPS, position, position,
        visible_to_all, end, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True, FIRST,
    )  # fmt: skip
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=row_mask)
