# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `delta_rule`, and of the rows before and after the chunks of a prompt.

A program holds a block of columns of one head's state in registers: it is read once, and written
where `keep` says so. It goes through the positions block by block, and in a block row by row: the
products of a row's key and query with the block's keys, each of which has its place in a tile, and
with the state. Then the block is folded into the state. Each step has one place in the program, so
a row's bits depend on its position alone. Rings hold keys as they come, with the factors that norm
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, pdl_options, power_of_two
from spd.kernels.overlap_triton import wait_and_release
from spd.kernels.recurrent.delta_rule import NORM_EPSILON, DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.recurrent.short_conv_triton import clear_around, load_run
from spd.kernels.recurrent.state_blocks import BLOCK

STATE_COLUMNS = 32
"""Columns of a state in one program.

One that loops over rows is one warp, so its sums need no barrier.
"""
LEAST = 16
"""Rows and columns of a tile that is multiplied, at least."""
PART = 16
"""Columns of keys and rows of a state that a chunk multiplies at once."""
KEY_PART = 32
"""Columns of keys that a row multiplies at once."""
PRECISION = tl.constexpr("tf32x3")
"""The input precision of products: as good as float32, on the matrix units."""
ALL_ROWS, BEFORE_BORDER, BEHIND_BORDER, BEHIND_LAST = range(4)
"""Parts of a run's rows: see `take_part`."""


@triton.jit
def load_raw_gates(raw_gates, within, H: tl.constexpr, CORRECTS: tl.constexpr):
    """Load raw gates: the step, which determines the decay, and the correction (or the step
    again)."""
    step = tl.load(raw_gates + CORRECTS * H, mask=within, other=0.0).to(tl.float32)
    amount = step
    if CORRECTS:
        amount = tl.load(raw_gates, mask=within, other=0.0).to(tl.float32)
    return step, amount


@triton.jit
def activate_gates(step, amount, rate, bias, CORRECTS: tl.constexpr):
    """Return the logarithm of the decay, and the factor of the correction or value, of raw
    gates."""
    x = step + bias
    small = tl.exp(x)
    rounded = tl.where(x < -6.0, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    step = tl.where(x > 20.0, x, rounded)
    correction = step
    if CORRECTS:
        correction = tl.sigmoid(amount)
    return -tl.exp(rate) * step, correction


@triton.jit
def inverse_length(squares, EPSILON: tl.constexpr, CORRECTS: tl.constexpr):
    """Return the factor that norms queries or keys of these sums of squares.

    1 where nothing is normed.
    """
    if CORRECTS:
        return tl.rsqrt(squares + EPSILON)
    return squares * 0.0 + 1.0


@triton.jit
def take_part(start, count, keep, written, part, BLOCK: tl.constexpr):
    """Return the positions from and to which rows are computed, and those of the written state.

    These are the position that it has, and that it is to have. part: 0 for all rows, 1 for those
    before the run's first border, 2 for all behind it, 3 for those behind its last one.
    """
    end = start + count.to(tl.int32)
    border = tl.minimum((start + BLOCK - 1) // BLOCK * BLOCK, end)
    last = tl.maximum(border, end // BLOCK * BLOCK)
    begin = tl.where(part < 2, start, tl.where(part == 2, border, last))
    stop = tl.where(part == 1, border, end)
    written = tl.where(part < 2, written.to(tl.int32), begin)
    return begin, stop, written, tl.minimum(keep.to(tl.int32), stop)


@triton.jit
def element(x, is_row):
    """Return the element of x [L] where is_row is true."""
    return tl.sum(tl.where(is_row, x, 0.0), 0)


@triton.jit
def load_part(source, first, PART: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns [first, first + PART) of a row of WIDTH float32 values; zeros beyond."""
    i = first + tl.arange(0, PART)
    return tl.load(source + i, mask=i < WIDTH, other=0.0)


@triton.jit
def load_rows(source, within, first, PART: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns [first, first + PART) of rows of WIDTH float32 values at source [L]; zeros
    beyond."""
    i = first + tl.arange(0, PART)
    return tl.load(
        source[:, None] + i[None, :], mask=within[:, None] & (i < WIDTH)[None, :], other=0.0
    )


@triton.jit
def load_gates(
    raw_gates, gates, t, begin, end, start, gate_stride, rate, bias, H: tl.constexpr,
    CORRECTS: tl.constexpr,
):  # fmt: skip
    """Return the decay of tokens t of a block and the factor of their correction or value.

    Those before token `begin` come from the ring, which has no such factor. 1 from `end` on. The
    run's first row is token `start`.
    """
    is_own = (t >= begin) & (t < end)
    step, amount = load_raw_gates(raw_gates + (t - start) * gate_stride, is_own, H, CORRECTS)
    log_decay, amount = activate_gates(step, amount, tl.load(rate), tl.load(bias), CORRECTS)
    decay = tl.load(gates + t * (H * 2), mask=t < begin, other=1.0)
    return tl.where(is_own, tl.exp(log_decay), decay), amount


@triton.jit
def decay_since(next_decay, position, row_position):
    """Return the decay at a row's position since each token [L] up to it, of the next tokens'
    decays."""
    return tl.cumprod(tl.where(position < row_position, next_decay, 1.0), 0, reverse=True)


@triton.jit
def score_keys(
    key_at, query_at, keys, is_known, num_stored, width, BLOCK: tl.constexpr, PART: tl.constexpr,
    HK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the products of a block's known keys [BLOCK] with a row's key and its query.

    The third result is the query's sum of squares. The first `num_stored` columns of the key are
    stored in its ring's row `keys`.
    """
    by_key = tl.zeros((BLOCK, PART), tl.float32)
    by_query = tl.zeros((BLOCK, PART), tl.float32)
    squares = tl.zeros((PART,), tl.float32)
    for some in range(0, width, PART):
        query = load_part(query_at, some, PART, WIDTH)
        key = load_part(query_at + HK * WIDTH, some, PART, WIDTH)
        columns = some + tl.arange(0, PART)
        tl.store(keys + columns, key, mask=columns < num_stored)
        tile = load_rows(key_at, is_known, some, PART, WIDTH)
        by_key = tl.fma(tile, key[None, :], by_key)
        by_query = tl.fma(tile, query[None, :], by_query)
        squares = tl.fma(query, query, squares)
    return tl.sum(by_key, 1), tl.sum(by_query, 1), tl.sum(squares, 0)


@triton.jit
def load_block(
    mixed, raw_gates, rate, bias, keys, updates, gates, block, begin, end, start, keep, gate_stride, j,
    DEPTH, H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CORRECTS: tl.constexpr,
):  # fmt: skip
    """Return what is known of a block's tokens, and store the decays of those from `keep` on.

    These are the decays of the next tokens, the factors of corrections or values, the first decay,
    where keys are, their factors, and updates. Tokens before `begin` are in the rings.
    """
    t = tl.arange(0, BLOCK)
    ring = block % DEPTH
    decay, amount = load_gates(
        raw_gates, gates + ring * (H * 2), t, begin - block, end - block, start - block, gate_stride,
        rate, bias, H, CORRECTS,
    )  # fmt: skip
    next_decay, _ = load_gates(
        raw_gates, gates + ring * (H * 2), t + 1, tl.minimum(begin - block, BLOCK),
        tl.minimum(end - block, BLOCK), start - block, gate_stride, rate, bias, H, CORRECTS,
    )  # fmt: skip
    position = block + t
    in_ring = position < begin
    gates_at = gates + (ring + t) * (H * 2)
    tl.store(gates_at, decay, mask=(position >= tl.maximum(begin, keep)) & (position < end))
    key_units = tl.load(gates_at + 1, mask=in_ring, other=0.0)
    new_key_at = mixed + (position - start) * (2 * HK * WIDTH + H * SIZE) + HK * WIDTH
    key_at = tl.where(in_ring, keys + (ring + t) * (HK * WIDTH), new_key_at)
    update = tl.load(
        updates + ((ring + t) * (H * SIZE))[:, None] + j[None, :],
        mask=in_ring[:, None] & (j < SIZE)[None, :],
        other=0.0,
    )
    return next_decay, amount, element(decay, t == 0), key_at, key_units, update


@triton.jit
def run_row(
    current, update, key_units, next_decay, first_decay, amount, scale, key_at, query_at, value_at,
    ring_key, is_kept, position, row_position, in_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, EPSILON: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Return a block's updates and factors of keys with those of a row, and what the row reads.

    The row's own update and factor follow. See `load_block` and `score_keys`.
    """
    is_row = position == row_position
    width = tl.where(
        row_position >= 0, ROWS, 0
    )  # unknown to the compiler, which would unroll the loop
    num_stored = tl.where(is_kept, WIDTH, 0)
    by_key, by_query, squares = score_keys(
        key_at,
        query_at,
        ring_key,
        position <= row_position,
        num_stored,
        width,
        BLOCK,
        PART,
        HK,
        WIDTH,
    )
    query_unit = inverse_length(squares, EPSILON, CORRECTS) * scale
    key_unit = inverse_length(element(by_key, is_row), EPSILON, CORRECTS)
    key_units = tl.where(is_row, key_unit, key_units)
    since = decay_since(next_decay, position, row_position)
    block_decay = element(since, tl.arange(0, BLOCK) == 0) * first_decay
    since *= key_units
    value = tl.load(value_at, mask=in_columns, other=0.0)
    if CORRECTS:
        key_row = load_part(query_at + HK * WIDTH, 0, ROWS, WIDTH)
        value -= tl.sum(current * key_row[:, None], 0) * (block_decay * key_unit)
        value -= tl.sum((by_key * since)[:, None] * update, 0) * key_unit
    value *= element(amount, is_row)
    update = tl.where(is_row[:, None], value[None, :], update)
    query_row = load_part(query_at, 0, ROWS, WIDTH)
    result = tl.sum(current * query_row[:, None], 0) * block_decay
    result += tl.sum((by_query * since)[:, None] * update, 0)
    return update, key_units, result * query_unit, value, key_unit


@triton.jit
def fold(
    current, update, key_units, since, first_decay, new_key_at, ring_key_at, num_in_ring,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the state at the end of a block, from that at its begin.

    One token after another, since registers hold no tile of keys beside it. since: the decay at the
    end since each token. The first `num_in_ring` keys are in the ring.
    """
    t = tl.arange(0, BLOCK)
    current *= element(since, t == 0) * first_decay
    update *= (since * key_units)[:, None]
    for token in range(0, BLOCK):
        key_at = tl.where(
            token < num_in_ring, ring_key_at + token * (HK * WIDTH), new_key_at + token * WIDE
        )
        key_row = load_part(key_at, 0, ROWS, WIDTH)
        added = tl.sum(tl.where((t == token)[:, None], update, 0.0), 0)
        current = tl.fma(key_row[:, None], added[None, :], current)
    return current


@triton.jit
def columns_of(
    state, table, run, head, j, num_rows, H: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return pointers to columns j of one head's state, [ROWS, COLUMNS], and the mask of its first
    `num_rows` rows."""
    i = tl.arange(0, ROWS)
    state += (tl.load(table + run) * H + head) * (WIDTH * SIZE)
    return state + i[:, None] * SIZE + j[None, :], (i < num_rows)[:, None] & (j < SIZE)[None, :]


@triton.jit(
    do_not_specialize=["G", "T", "DEPTH", "gate_stride", "part"],
    do_not_specialize_on_alignment=["raw_gates"],
)
def delta_rule_kernel(
    mixed, raw_gates, rate, bias, state, keys, updates, gates, out, table, applied, G, T, DEPTH, gate_stride,
    scale, part, H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, EPSILON: tl.constexpr,
    CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run a part of a run's rows over COLUMNS columns of one head's state."""
    wait_and_release(PDL)
    head = tl.program_id(1)
    run = tl.program_id(2)
    slot, first, count, start, keep, written = load_run(table, applied, run, G)
    start = start.to(tl.int32)  # as all positions and offsets within a slot; bases are wider
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    out += head * SIZE + j
    if part < 2:
        clear_around(out, j < SIZE, table, run, first, count, G, T, H * SIZE)
    begin, end, written, keep = take_part(start, count, keep, written, part, BLOCK)
    if begin >= end:
        return
    num_rows = tl.where(written > 0, WIDTH, 0)
    at, within = columns_of(state, table, run, head, j, num_rows, H, WIDTH, SIZE, ROWS)
    current = tl.load(at, mask=within, other=0.0, eviction_policy="evict_first")
    # Programs of the first columns write the gates, and those of a key head's first head the keys.
    gates_from = tl.where(tl.program_id(0) == 0, keep, end)
    keys_from = tl.where(head % (H // HK) == 0, gates_from, end)
    WIDE: tl.constexpr = 2 * HK * WIDTH + H * SIZE
    mixed += first * WIDE + head // (H // HK) * WIDTH
    value_offset = 2 * HK * WIDTH + head * SIZE - head // (H // HK) * WIDTH
    raw_gates += first * gate_stride + head
    keys += slot * (DEPTH * HK * WIDTH) + head // (H // HK) * WIDTH
    updates += slot * (DEPTH * H * SIZE) + head * SIZE
    gates += slot * (DEPTH * H * 2) + head * 2
    out += first * (H * SIZE)
    for block in range(written, end, BLOCK):
        position = block + tl.arange(0, BLOCK)
        next_decay, amount, first_decay, key_at, key_units, update = load_block(
            mixed, raw_gates, rate + head, bias + head, keys, updates, gates, block, begin, end, start,
            gates_from, gate_stride, j, DEPTH, H, HK, WIDTH, SIZE, BLOCK, CORRECTS,
        )  # fmt: skip
        for row_position in range(tl.maximum(block, begin), tl.minimum(block + BLOCK, end)):
            query_at = mixed + (row_position - start) * WIDE
            place = row_position % DEPTH
            update, key_units, result, own_update, key_unit = run_row(
                current, update, key_units, next_decay, first_decay, amount, scale, key_at, query_at,
                query_at + value_offset + j, keys + place * (HK * WIDTH), row_position >= keys_from, position,
                row_position, j < SIZE, ROWS, BLOCK, PART, HK, WIDTH, EPSILON, CORRECTS,
            )  # fmt: skip
            tl.store(out + (row_position - start) * (H * SIZE), result, mask=j < SIZE)
            tl.store(gates + place * (H * 2) + 1, key_unit, mask=row_position >= gates_from)
            is_kept = j < tl.where(row_position >= keep, SIZE, 0)
            tl.store(updates + place * (H * SIZE) + j, own_update, mask=is_kept)
        if (block + BLOCK < end) | (block + BLOCK == keep):
            current = fold(
                current, update, key_units, decay_since(next_decay, position, block + BLOCK - 1), first_decay,
                mixed + (block - start) * WIDE + HK * WIDTH, keys + block % DEPTH * (HK * WIDTH),
                begin - block, WIDE, ROWS, BLOCK, HK, WIDTH,
            )  # fmt: skip
            if block + BLOCK == keep:
                at, within = columns_of(state, table, run, head, j, WIDTH, H, WIDTH, SIZE, ROWS)
                tl.store(at, current, mask=within, cache_modifier=".cs")


def launch_rows(
    mixed: Tensor,
    raw_gates: Tensor,
    rule: DeltaRule,
    memory: DeltaMemory,
    rows: Segments,
    out: Tensor,
    part: int,
) -> None:
    """Launch the rows of one part of every run; see `take_part`."""
    shape = constants(rule, memory)
    size = memory.state.shape[3]
    columns = min(STATE_COLUMNS, max(LEAST, power_of_two(size)))
    runs = rows.table.shape[1]
    delta_rule_kernel[(ceil_div(size, columns), memory.state.shape[1], runs)](
        mixed,
        raw_gates,
        rule.rate,
        rule.bias,
        memory.state,
        memory.keys,
        memory.updates,
        memory.gates,
        out,
        rows.table,
        rows.applied,
        runs,
        len(mixed),
        memory.keys.shape[1],
        raw_gates.stride(0),
        scale_of(rule, memory),
        part,
        COLUMNS=columns,
        BLOCK=BLOCK,
        num_warps=1,
        **{**shape, "PART": min(KEY_PART, shape["ROWS"])},
    )


def delta_rule(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """Launch `Kernels.delta_rule`; rows of raw_gates have stride 1."""
    assert raw_gates.stride(1) == 1
    heads, _, size = memory.state.shape[1:]
    out = torch.empty((mixed.shape[0], heads, size), dtype=torch.float32, device=mixed.device)
    # Windows of equal widths fit into the rings beside the rows before them. The rows of a longer
    # run, a prompt's, are stored once no program reads the rings.
    is_window = len(mixed) // rows.table.shape[1] <= memory.keys.shape[1] - BLOCK
    for part in (ALL_ROWS,) if is_window else (BEFORE_BORDER, BEHIND_BORDER):
        launch_rows(mixed, raw_gates, rule, memory, rows, out, part)
    return out


def scale_of(rule: DeltaRule, memory: DeltaMemory) -> float:
    """Return the factor of queries."""
    return memory.state.shape[2] ** -0.5 if rule.corrects else 1.0


def constants(rule: DeltaRule, memory: DeltaMemory) -> dict[str, float]:
    """Return the constants and launch options that the kernels of the delta rule share.

    ROWS is WIDTH as a power of two. Neighbouring programs read neighbouring columns.
    """
    heads, width, size = memory.state.shape[1:]
    rows = max(LEAST, power_of_two(width))
    sizes = {"H": heads, "HK": memory.keys.shape[2], "WIDTH": width, "SIZE": size, "ROWS": rows}
    return {
        **sizes,
        "PART": min(PART, rows),
        "EPSILON": NORM_EPSILON,
        "CORRECTS": rule.corrects,
        **pdl_options(rule.rate.device),
    }
