# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `paged_attention`, for windows and for prompt chunks.

Chunks are ranges of absolute positions: SMALL positions each below FROM, LARGE ones from there on. A
SLIDING window, SOFTCAP or sinks of None have no steps in the compiled program. A row begins with its head's
sink, where there is one: with that maximum and a sum of 1.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from spd.kernels.overlap_triton import prefetch, wait_and_release

LOG2_E = math.log2(math.e)
"""Weights are powers of two, so that scales of scores take this along."""
_LOG2_E = tl.constexpr(LOG2_E)
UNSEEN = tl.constexpr(-1.0e30)
"""Maximum of no scores: finite, so that a row without keys subtracts without NaN."""


@triton.jit
def not_finite(x):
    """Where values are infinite or not numbers: a difference x - x may be fused with what made x."""
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0


@triton.jit
def chunk_of(position, SMALL: tl.constexpr, LARGE: tl.constexpr, FROM: tl.constexpr):
    """The chunk that holds a position."""
    return tl.where(position < FROM, position // SMALL, FROM // SMALL + (position - FROM) // LARGE)


@triton.jit
def begin_of(chunk, SMALL: tl.constexpr, LARGE: tl.constexpr, FROM: tl.constexpr):
    """The first position of a chunk."""
    FEW: tl.constexpr = FROM // SMALL
    return tl.where(chunk < FEW, chunk * SMALL, FROM + (chunk - FEW) * LARGE)


@triton.jit
def first_chunk(position, SLIDING, SMALL, LARGE, FROM):
    """The chunk that holds the first position that a row sees."""
    return chunk_of(tl.maximum(position - (SLIDING - 1), 0), SMALL, LARGE, FROM)


@triton.jit
def tanh(x):
    """To within 2e-7."""
    power = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -size, size)


@triton.jit(
    do_not_specialize=["slots", "queries", "max_chunks"],
    do_not_specialize_on_alignment=["positions", "valid"],
)
def plan_attention_kernel(
    positions, valid, last, items, count, slots, queries, max_chunks,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    FROM: tl.constexpr, SLIDING: tl.constexpr,
):  # fmt: skip
    """One slot's items. Large chunks of all slots come first, so that no program ends on one."""
    FEW: tl.constexpr = FROM // SMALL
    slot = tl.program_id(0)
    every = tl.arange(0, SLOTS)
    top = tl.full((SLOTS,), -1, tl.int64)
    low = tl.full((SLOTS,), 2**31 - 1, tl.int64)
    for q in range(queries):
        at = every * queries + q
        counted = tl.load(valid + at, mask=every < slots, other=0) != 0
        top = tl.maximum(top, tl.load(positions + at, mask=counted, other=-1))
        if SLIDING is not None:
            low = tl.minimum(low, tl.load(positions + at, mask=counted, other=2**31 - 1))
    top = top.to(tl.int32)
    reached = tl.minimum(chunk_of(top, SMALL, LARGE, FROM) + 1, max_chunks)
    chunks = tl.where(top >= 0, reached, 0)
    small = tl.minimum(chunks, FEW)
    large = chunks - small
    if SLIDING is not None:
        left = tl.minimum(first_chunk(low.to(tl.int32), SLIDING, SMALL, LARGE, FROM), chunks)
        left_small = tl.minimum(left, FEW)
        small -= left_small
        large -= left - left_small
    first_small = tl.sum(large) + tl.sum(tl.where(every < slot, small, 0))
    first_large = tl.sum(tl.where(every < slot, large, 0))
    mine = tl.sum(tl.where(every == slot, chunks, 0))
    begin = 0
    if SLIDING is not None:
        begin = tl.sum(tl.where(every == slot, left, 0))
        first_small -= tl.minimum(begin, FEW)
        first_large -= tl.maximum(begin - FEW, 0)
    for start in range(begin, mine, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        at = tl.where(chunk < FEW, first_small + chunk, first_large + chunk - FEW)
        tl.store(items + at, (slot << 16) | chunk, mask=chunk < mine)
    tl.store(last + slot, tl.sum(tl.where(every == slot, top, 0)))
    if slot == 0:
        tl.store(count, tl.sum(small + large))


@triton.jit
def prefetch_page(pool, page, first, head, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Bring one head's keys or values of a page, from its row `first` on, into L2."""
    LINE: tl.constexpr = 128 // (pool.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (D + LINE - 1) // LINE
    row = page * PAGE + tl.minimum(first + tl.arange(0, PAGE), PAGE - 1)
    for line in tl.static_range(LINES):
        prefetch(pool + row * (K * D) + head * D + line * LINE)


@triton.jit
def pages_of(page_row, begin, end, COUNT: tl.constexpr, PAGE: tl.constexpr):
    """The numbers [COUNT] of the pages from the one that holds position begin, 0 for those from end on."""
    page = begin // PAGE + tl.arange(0, COUNT)
    return tl.load(page_row + page, mask=page * PAGE < end, other=0)


@triton.jit
def item_of(items, work, each, most):
    """The item of a piece of work, of which there are `each` an item."""
    return tl.load(items + work // each, mask=work // each < most, other=0)


@triton.jit
def prefetch_item(
    key_pages, value_pages, page_table, pages, item, head, written, K, D, PAGE, SMALL, LARGE, FROM
):
    """Bring the first page of an item into L2, for one head; nothing is read because of one not written."""
    begin = begin_of(item & 0xFFFF, SMALL, LARGE, FROM)
    page = tl.load(
        page_table + (item >> 16).to(tl.int64) * pages + begin // PAGE, mask=written, other=0
    )
    if written:
        prefetch_page(key_pages, page, begin % PAGE, head, K, D, PAGE)
        prefetch_page(value_pages, page, begin % PAGE, head, K, D, PAGE)


@triton.jit
def attend_blocks(
    maximum, total, acc, q, key_pages, value_pages, page_row, page_ids, head, position, begin, end, scale,
    K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, MASKED, FIRST,
):  # fmt: skip
    """Take keys [begin, end) into a tile's online softmax; MASKED unless every row sees all of them.

    begin is a multiple of BLOCK; for scale see `score_scale`; FIRST is `causal_bias`'s first_key. Where pages
    hold whole blocks, a block whose address waited for a load of its own could not be fetched ahead. So
    page_ids are all that a short span touches, whose keys are read once. Without them the next page's is
    loaded one block early; one loop takes all keys, for nested ones over spans of pages were measured slower.
    """
    column = tl.arange(0, BLOCK_D)
    kept = (column < D)[None, :]
    WHOLE: tl.constexpr = PAGE % BLOCK == 0
    ONCE: tl.constexpr = page_ids is not None
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    if ONCE:
        first_page = begin // PAGE
        ahead = tl.arange(0, page_ids.shape[0])
    else:
        page = tl.load(page_row + begin // PAGE, mask=begin < end, other=0)
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        # Beyond `end` the pools may hold anything, NaN too, and zero times NaN is NaN.
        live = (key < end)[:, None] & kept if MASKED else kept
        offsets = head * D + column[None, :]
        if WHOLE:
            if ONCE:
                page = tl.sum(tl.where(ahead == start // PAGE - first_page, page_ids, 0), 0)
            first = (page * PAGE + start % PAGE) * (K * D)
            offsets += tl.arange(0, BLOCK)[:, None] * (K * D)
            if not ONCE:
                page = tl.load(
                    page_row + (start + BLOCK) // PAGE, mask=start + BLOCK < end, other=0
                )
        else:
            pages = tl.load(page_row + key // PAGE, mask=key < end, other=0)
            first = ((pages * PAGE + key % PAGE) * (K * D))[:, None]
        k = tl.load(key_pages + first + offsets, mask=live, other=0.0, eviction_policy=POLICY)
        v = tl.load(value_pages + first + offsets, mask=live, other=0.0, eviction_policy=POLICY)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = scale
        if SOFTCAP is not None:
            scores = tanh(scores * scale)
            factor = SOFTCAP * _LOG2_E
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if FIRST:
                seen = seen & (key[None, :] >= tl.minimum(position, FIRST)[:, None])
            if SLIDING is not None:
                seen = seen & (key[None, :] > position[:, None] - SLIDING)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(maximum, tl.max(scores, 1) * factor)
        # Written out: else this multiply-add is fused only where nothing is masked.
        weights = tl.exp2(tl.fma(scores, factor, -raised[:, None]))
        shrink = tl.exp2(maximum - raised)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        maximum = raised
    return maximum, total, acc


@triton.jit(
    do_not_specialize=["slots", "queries", "pages", "max_chunks"],
    do_not_specialize_on_alignment=["page_table", "positions"],
)
def attend_chunk_kernel(
    query, key_pages, value_pages, page_table, positions, last, items, count, partial, stats, scale,
    slots, queries, pages, max_chunks,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    FROM: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr, FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """TILE rows (a slot's queries by its group's heads) against one chunk of one KV head, item by item."""
    wait_and_release(PDL)
    FEW: tl.constexpr = FROM // SMALL
    # One more than a span fills, since it may begin inside a page; a power of two.
    PAGES: tl.constexpr = 2 * (LARGE // PAGE) if LARGE >= PAGE else 2
    rows = queries * GROUPS
    tiles = tl.cdiv(rows, TILE)
    column = tl.arange(0, BLOCK_D)
    # Loads that wait for one another are what a short context costs: the first items are fetched beside the
    # count, each further one two items early, so that its first page is in L2 when it begins.
    most = slots * max_chunks
    step = tl.num_programs(0)
    item = item_of(items, tl.program_id(0), K * tiles, most)
    coming = item_of(items, tl.program_id(0) + step, K * tiles, most)
    everything = tl.load(count) * (K * tiles)
    for work in range(tl.program_id(0), everything, step):
        slot = (item >> 16).to(tl.int64)
        chunk = item & 0xFFFF
        head = (work // tiles) % K
        row = (work % tiles) * TILE + tl.arange(0, TILE)
        token = slot * queries + row // GROUPS
        seen = tl.load(positions + token, mask=row < rows, other=-1).to(tl.int32)
        wanted = (row < rows)[:, None] & (column < D)[None, :]
        source = (
            query
            + (token * (K * GROUPS) + head * GROUPS + row % GROUPS)[:, None] * D
            + column[None, :]
        )
        q = tl.load(source, mask=wanted, other=0.0)
        begin = begin_of(chunk, SMALL, LARGE, FROM)
        page_row = page_table + slot * pages
        item = coming
        coming = item_of(items, work + 2 * step, K * tiles, most)
        end = tl.minimum(begin + tl.where(chunk < FEW, SMALL, LARGE), tl.load(last + slot) + 1)
        if SLIDING is not None:
            # Positions ascend in a slot: what its first row has left behind, every row has.
            lowest = tl.load(positions + slot * queries).to(tl.int32)
            begin = tl.maximum(begin, (lowest - (SLIDING - 1)) // BLOCK * BLOCK)
        page_ids = pages_of(page_row, begin, end, PAGES, PAGE)
        if PDL and SLIDING is None:  # a window may have left an item's first page behind
            prefetch_item(
                key_pages, value_pages, page_table, pages, item, (work + step) // tiles % K,
                work + step < everything, K, D, PAGE, SMALL, LARGE, FROM,
            )  # fmt: skip
        maximum, total, acc = attend_blocks(
            tl.full((TILE,), UNSEEN, tl.float32), tl.zeros((TILE,), tl.float32),
            tl.zeros((TILE, BLOCK_D), tl.float32), q, key_pages, value_pages, page_row, page_ids,
            head, seen, begin, end, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True,
            FIRST,
        )  # fmt: skip
        at = ((slot * max_chunks + chunk) * K + head) * rows + row
        tl.store(partial + at[:, None] * D + column[None, :], acc, mask=wanted)
        tl.store(stats + at * 2, maximum, mask=row < rows)
        tl.store(stats + at * 2 + 1, total, mask=row < rows)


@triton.jit(
    do_not_specialize=["queries", "max_chunks"],
    do_not_specialize_on_alignment=["positions", "valid"],
)
def combine_chunks_kernel(
    partial, stats, positions, valid, sinks, out, queries, max_chunks,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SMALL: tl.constexpr, LARGE: tl.constexpr, FROM: tl.constexpr, SLIDING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row of one head: the chunks of what it sees, BLOCK at a time; zeros for an invalid row."""
    wait_and_release(PDL)
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    slot = token // queries
    row = (token % queries) * GROUPS + head % GROUPS
    column = tl.arange(0, BLOCK_D)
    position = tl.load(positions + token).to(tl.int32)
    reached = tl.minimum(chunk_of(position, SMALL, LARGE, FROM) + 1, max_chunks)
    chunks = tl.where(tl.load(valid + token) != 0, reached, 0)
    maximum = tl.full((), UNSEEN, tl.float32)
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
        live = chunk < chunks
        at = ((slot * max_chunks + chunk) * K + head // GROUPS) * (queries * GROUPS) + row
        values = partial + at[:, None] * D + column[None, :]
        x = tl.load(values, mask=live[:, None] & (column < D)[None, :], other=0.0)
        peak = tl.load(stats + at * 2, mask=live, other=UNSEEN)
        raised = tl.maximum(maximum, tl.max(peak, 0))
        weights = tl.where(live, tl.exp2(peak - raised), 0.0)
        shrink = tl.exp2(maximum - raised)
        total = total * shrink + tl.sum(
            weights * tl.load(stats + at * 2 + 1, mask=live, other=0.0), 0
        )
        acc = acc * shrink + tl.sum(weights[:, None] * x, 0)
        maximum = raised
    acc = acc / tl.where(chunks > 0, total, 1.0)
    to = out + (token * (K * GROUPS) + head) * D + column
    tl.store(to, acc.to(out.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["rows", "start"], do_not_specialize_on_alignment=["page_row"])
def prefill_attention_kernel(
    query, key_pages, value_pages, page_row, sinks, out, scale, rows, start,
    K: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SLIDING: tl.constexpr, SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """TILE rows of one head. The last tiles see the most keys and go first."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_D)
    wanted = (row < rows)[:, None] & (column < D)[None, :]
    at = (row * (K * GROUPS) + head)[:, None] * D + column[None, :]
    q = tl.load(query + at, mask=wanted, other=0.0)
    position = start + row
    seen_by_all = (start + tile * TILE + 1) // BLOCK * BLOCK
    end = start + tl.minimum(rows, (tile + 1) * TILE)

    maximum = tl.full((TILE,), UNSEEN, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    if sinks is not None:
        maximum = tl.full((TILE,), tl.load(sinks + head) * _LOG2_E, tl.float32)
        total += 1.0
    acc = tl.zeros((TILE, BLOCK_D), tl.float32)
    begin = 0
    if SLIDING is not None:
        # Blocks that the last row's window cuts, then those that all rows see whole, then the last ones.
        begin = tl.maximum(start + tile * TILE - (SLIDING - 1), 0) // BLOCK * BLOCK
        cut = tl.maximum(end - SLIDING + BLOCK - 1, 0) // BLOCK * BLOCK
        cut = tl.minimum(tl.maximum(cut, begin), seen_by_all)
        maximum, total, acc = attend_blocks(
            maximum, total, acc, q, key_pages, value_pages, page_row, None, head // GROUPS, position,
            begin, cut, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True, FIRST,
        )  # fmt: skip
        begin = cut
    maximum, total, acc = attend_blocks(
        maximum, total, acc, q, key_pages, value_pages, page_row, None, head // GROUPS, position,
        begin, seen_by_all, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, FIRST > 0, FIRST,
    )  # fmt: skip
    maximum, total, acc = attend_blocks(
        maximum, total, acc, q, key_pages, value_pages, page_row, None, head // GROUPS, position,
        seen_by_all, end, scale, K, D, PAGE, BLOCK, BLOCK_D, SLIDING, SOFTCAP, True, FIRST,
    )  # fmt: skip
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)
