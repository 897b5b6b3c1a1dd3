# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton forms of `delta_rule` and `delta_chunks`.

A program holds a block of columns of one head's state in registers from the first token to apply to
the last row: the state is read once and written once. One loop body handles tokens from the ring
and rows of the pass, and products are fused with sums only by an explicit fma, so that both give
the same bits. For a prompt chunk the systems of all its parts are solved in parallel, then the
state is updated part by part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, pdl_options, power_of_two
from spd.kernels.overlap_triton import wait_and_release
from spd.kernels.recurrent.delta_rule import CHUNK, NORM_EPSILON, DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.recurrent.short_conv_triton import clear_around, load_run

STATE_COLUMNS = 32
"""Columns of a state in one program.

One that loops over rows is one warp, so its sums need no barrier.
"""
PART = 16
"""Columns of keys and rows of a state that are multiplied at once."""
PRECISION = tl.constexpr("tf32x3")
"""The input precision of products: as good as float32, on the matrix units."""


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
def load_token(
    mixed, raw_gates, keys, values, gates, position, end, start, first, place, head, i, j, gate_stride,
    H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Load a position's token: from the rings before start, from the pass's rows before end, else
    zeros."""
    is_new = (position >= start) & (position < end)
    in_ring = position < start
    row = first + position - start
    key_head = head // (H // HK)
    source = mixed + row * (2 * HK * WIDTH + H * SIZE)
    key_at = tl.where(
        is_new, source + (HK + key_head) * WIDTH, keys + (place * HK + key_head) * WIDTH
    )
    value_at = tl.where(
        is_new, source + 2 * HK * WIDTH + head * SIZE, values + (place * H + head) * SIZE
    )
    query = tl.load(source + key_head * WIDTH + i, mask=i < tl.where(is_new, WIDTH, 0), other=0.0)
    key = tl.load(key_at + i, mask=i < tl.where(is_new | in_ring, WIDTH, 0), other=0.0)
    value = tl.load(value_at + j, mask=j < tl.where(is_new | in_ring, SIZE, 0), other=0.0)
    step, amount = load_raw_gates(raw_gates + row * gate_stride + head, is_new, H, CORRECTS)
    gates_at = gates + (place * H + head) * 2
    decay = tl.load(gates_at, mask=in_ring, other=0.0)
    correct = tl.load(gates_at + 1, mask=in_ring, other=0.0)
    return query, key, value, step, amount, decay, correct


@triton.jit
def activate_token(query, key, step, amount, decay, correct, is_new, rate, bias, EPSILON, CORRECTS):
    """Return a token's normed query and key, decay and correction.

    Those of the rings are stored so.
    """
    log_decay, new_correct = activate_gates(step, amount, rate, bias, CORRECTS)
    decay = tl.where(is_new, tl.exp(log_decay), decay)
    correct = tl.where(is_new, new_correct, correct)
    key *= tl.where(is_new, inverse_length(tl.sum(key * key, 0), EPSILON, CORRECTS), 1.0)
    query *= inverse_length(tl.sum(query * query, 0), EPSILON, CORRECTS)
    return query, key, decay, correct


@triton.jit
def apply_token(state, key, value, decay, correct, CORRECTS):
    """Return a state [ROWS, COLUMNS] after one token."""
    state = state * decay
    if CORRECTS:
        value -= tl.sum(state * key[:, None], 0)
    return tl.fma(key[:, None], (value * correct)[None, :], state)


@triton.jit
def store_token(
    keys, values, gates, key, value, decay, correct, place, head, i, j, is_new, writes_keys, writes_gates,
    H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write a new token to the rings: its value, and in the programs of a first block key and
    gates."""
    key_at = keys + (place * HK + head // (H // HK)) * WIDTH
    gates_at = gates + (place * H + head) * 2
    tl.store(key_at + i, key, mask=i < tl.where(is_new & writes_keys, WIDTH, 0))
    tl.store(values + (place * H + head) * SIZE + j, value, mask=j < tl.where(is_new, SIZE, 0))
    tl.store(gates_at, decay, mask=is_new & writes_gates)
    tl.store(gates_at + 1, correct, mask=is_new & writes_gates)


@triton.jit(
    do_not_specialize=["G", "T", "DEPTH", "gate_stride"],
    do_not_specialize_on_alignment=["raw_gates"],
)
def delta_rule_kernel(
    mixed, raw_gates, rate, bias, state, keys, values, gates, out, table, applied, G, T, DEPTH, gate_stride,
    scale, H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EPSILON: tl.constexpr, CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply a run's tokens, each loaded early, to COLUMNS columns of one head's state."""
    wait_and_release(PDL)
    block = tl.program_id(0)
    head = tl.program_id(1)
    run = tl.program_id(2)
    slot, first, count, start, keep, begin = load_run(table, applied, run, G)
    i = tl.arange(0, ROWS)
    j = block * COLUMNS + tl.arange(0, COLUMNS)
    out += head * SIZE + j
    clear_around(out, j < SIZE, table, run, first, count, G, T, H * SIZE)
    if count == 0:
        return
    in_state = (i < WIDTH)[:, None] & (j < SIZE)[None, :]
    state += (slot * H + head) * (WIDTH * SIZE) + i[:, None] * SIZE + j[None, :]
    is_stored = in_state & (i < tl.where(begin > 0, WIDTH, 0))[:, None]
    current = tl.load(state, mask=is_stored, other=0.0, eviction_policy="evict_first")
    head_rate = tl.load(rate + head)
    head_bias = tl.load(bias + head)
    writes_keys = (head % (H // HK) == 0) & (block == 0)
    end = start + count
    place = slot * DEPTH + begin % DEPTH
    query, key, value, step, amount, decay, correct = load_token(
        mixed, raw_gates, keys, values, gates, begin, end, start, first, place, head, i, j, gate_stride,
        H, HK, WIDTH, SIZE, CORRECTS,
    )  # fmt: skip
    for position in range(begin, end):
        next_place = slot * DEPTH + (position + 1) % DEPTH
        next_query, next_key, next_value, next_step, next_amount, next_decay, next_correct = load_token(
            mixed, raw_gates, keys, values, gates, position + 1, end, start, first, next_place, head, i, j,
            gate_stride, H, HK, WIDTH, SIZE, CORRECTS,
        )  # fmt: skip
        is_new = position >= start
        query, key, decay, correct = activate_token(
            query, key, step, amount, decay, correct, is_new, head_rate, head_bias, EPSILON, CORRECTS
        )  # fmt: skip
        if position == keep:
            tl.store(state, current, mask=in_state, cache_modifier=".cs")
        store_token(
            keys, values, gates, key, value, decay, correct, place, head, i, j, is_new, writes_keys,
            block == 0, H, HK, WIDTH, SIZE,
        )  # fmt: skip
        current = apply_token(current, key, value, decay, correct, CORRECTS)
        if is_new:
            read = tl.sum(current * (query * scale)[:, None], 0)
            tl.store(out + (first + position - start) * (H * SIZE), read, mask=j < SIZE)
        query = next_query
        key = next_key
        value = next_value
        place = next_place
        step = next_step
        amount = next_amount
        decay = next_decay
        correct = next_correct
    if keep == end:
        tl.store(state, current, mask=in_state, cache_modifier=".cs")


def delta_rule(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """Launch `Kernels.delta_rule`; rows of raw_gates have stride 1."""
    assert raw_gates.stride(1) == 1
    heads, width, size = memory.state.shape[1:]
    depth = memory.keys.shape[1]
    out = torch.empty((mixed.shape[0], heads, size), dtype=torch.float32, device=mixed.device)
    columns = min(STATE_COLUMNS, power_of_two(size))
    runs = rows.table.shape[1]
    delta_rule_kernel[(ceil_div(size, columns), heads, runs)](
        mixed,
        raw_gates,
        rule.rate,
        rule.bias,
        memory.state,
        memory.keys,
        memory.values,
        memory.gates,
        out,
        rows.table,
        rows.applied,
        runs,
        len(mixed),
        depth,
        raw_gates.stride(0),
        width**-0.5 if rule.corrects else 1.0,
        COLUMNS=columns,
        num_warps=1,
        enable_fp_fusion=False,
        **_constants(rule, memory),
    )
    return out


def _constants(rule: DeltaRule, memory: DeltaMemory) -> dict[str, float]:
    """Return the constants and launch options that the kernels of the delta rule share.

    ROWS is WIDTH as a power of two. Neighbouring programs read neighbouring columns.
    """
    heads, width, size = memory.state.shape[1:]
    key_heads = memory.keys.shape[2]
    sizes = {"H": heads, "HK": key_heads, "WIDTH": width, "SIZE": size, "ROWS": power_of_two(width)}
    return {
        **sizes,
        "EPSILON": NORM_EPSILON,
        "CORRECTS": rule.corrects,
        **pdl_options(rule.rate.device),
    }


@triton.jit
def load_rows(source, within, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns [first, first + ROWS) of rows of WIDTH float32 values at source [L]; zeros
    beyond."""
    i = first + tl.arange(0, ROWS)
    return tl.load(
        source[:, None] + i[None, :], mask=within[:, None] & (i < WIDTH)[None, :], other=0.0
    )


@triton.jit
def load_chunk_gates(
    raw_gates, row, gate_stride, head, within, rate, bias, H: tl.constexpr, CORRECTS: tl.constexpr
):
    """Return the log decay of rows [L] since before the chunk, and their correction factors."""
    row_gates = raw_gates + row * gate_stride + head
    head_rate = tl.load(rate + head)
    head_bias = tl.load(bias + head)
    step, amount = load_raw_gates(row_gates, within, H, CORRECTS)
    decay, amount = activate_gates(step, amount, head_rate, head_bias, CORRECTS)
    return tl.cumsum(tl.where(within, decay, 0.0), 0), tl.where(within, amount, 0.0)


@triton.jit(do_not_specialize=["G", "gate_stride"], do_not_specialize_on_alignment=["raw_gates"])
def delta_solve_kernel(
    mixed, raw_gates, rate, bias, solved, table, applied, G, gate_stride, scale,
    H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    L: tl.constexpr, PART: tl.constexpr, EPSILON: tl.constexpr, CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one chunk's scores between its rows, and the inverse of its triangular system, for one
    head."""
    wait_and_release(PDL)
    run = tl.program_id(0)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    _, first, count, _, _, _ = load_run(table, applied, run, G)
    if chunk * L >= count:
        return
    t = tl.arange(0, L)
    row = first + chunk * L + t
    within = chunk * L + t < count
    log_decay, correct = load_chunk_gates(
        raw_gates, row, gate_stride, head, within, rate, bias, H, CORRECTS
    )
    row_decay = tl.exp(
        tl.where(t[:, None] >= t[None, :], log_decay[:, None] - log_decay[None, :], float("-inf"))
    )
    source = mixed + row * (2 * HK * WIDTH + H * SIZE) + head // (H // HK) * WIDTH
    scores = tl.zeros((L, L), tl.float32)
    system = tl.zeros((L, L), tl.float32)
    query_square = tl.zeros((L,), tl.float32)
    key_square = tl.zeros((L,), tl.float32)
    for part in range(0, ROWS, PART):
        query = load_rows(source, within, part, PART, WIDTH)
        key = load_rows(source + HK * WIDTH, within, part, PART, WIDTH)
        query_square += tl.sum(query * query, 1)
        key_square += tl.sum(key * key, 1)
        scores = tl.dot(query, tl.trans(key), scores, input_precision=PRECISION)
        system = tl.dot(key, tl.trans(key), system, input_precision=PRECISION)
    key_unit = inverse_length(key_square, EPSILON, CORRECTS)
    row_decay *= key_unit[None, :]
    at = (
        solved
        + ((run * tl.num_programs(1) + chunk) * H + head) * (2 * L * L)
        + t[:, None] * L
        + t[None, :]
    )
    tl.store(
        at, scores * row_decay * (inverse_length(query_square, EPSILON, CORRECTS) * scale)[:, None]
    )
    if CORRECTS:
        system = tl.where(
            t[:, None] > t[None, :], system * row_decay * (key_unit * correct)[:, None], 0.0
        )
        inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
        for step in range(0, L - 1):
            factors = tl.sum(tl.where(t[None, :] == step, system, 0.0), 1)
            pivot_row = tl.sum(tl.where(t[:, None] == step, inverse, 0.0), 0)
            inverse -= factors[:, None] * pivot_row[None, :]
        tl.store(at + L * L, inverse)


@triton.jit
def update_state(
    part_at, key_at, written, log_decay, within, written_rows, j, ROWS, PART, WIDTH, SIZE
):
    """Decay a state by a chunk's decay and add the products of keys and written values, PART rows a
    time."""
    for part in range(0, ROWS, PART):
        key = load_rows(key_at, within, part, PART, WIDTH)
        i = part + tl.arange(0, PART)
        state_part = tl.load(
            part_at + part * SIZE,
            mask=(i < written_rows)[:, None] & (j < SIZE)[None, :],
            other=0.0,
        )
        state_part = tl.dot(
            tl.trans(key), written, state_part * tl.exp(log_decay), input_precision=PRECISION
        )
        tl.store(part_at + part * SIZE, state_part, mask=(i < WIDTH)[:, None] & (j < SIZE)[None, :])


@triton.jit
def query_state(
    part_at, query_at, key_at, within, written_rows, j, L, COLUMNS, ROWS, PART, WIDTH, SIZE
):
    """Multiply a state by a chunk's keys and queries: [L, COLUMNS] each, and their sums of squares
    [L]."""
    predicted = tl.zeros((L, COLUMNS), tl.float32)
    read = tl.zeros((L, COLUMNS), tl.float32)
    query_square = tl.zeros((L,), tl.float32)
    key_square = tl.zeros((L,), tl.float32)
    for part in range(0, ROWS, PART):
        query = load_rows(query_at, within, part, PART, WIDTH)
        key = load_rows(key_at, within, part, PART, WIDTH)
        in_state = (part + tl.arange(0, PART) < written_rows)[:, None] & (j < SIZE)[None, :]
        state_part = tl.load(part_at + part * SIZE, mask=in_state, other=0.0)
        query_square += tl.sum(query * query, 1)
        key_square += tl.sum(key * key, 1)
        predicted = tl.dot(key, state_part, predicted, input_precision=PRECISION)
        read = tl.dot(query, state_part, read, input_precision=PRECISION)
    return predicted, read, query_square, key_square


@triton.jit(
    do_not_specialize=["G", "T", "gate_stride", "chunks"],
    do_not_specialize_on_alignment=["raw_gates"],
)
def delta_chunks_kernel(
    mixed, raw_gates, rate, bias, state, solved, out, table, applied, G, gate_stride, scale, T, chunks,
    H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, L: tl.constexpr, PART: tl.constexpr, EPSILON: tl.constexpr,
    CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply a run's chunks, one after another, to COLUMNS columns of one head's state."""
    wait_and_release(PDL)
    run = tl.program_id(0)
    head = tl.program_id(1)
    slot, first, count, start, _, _ = load_run(table, applied, run, G)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, L)
    clear_around(out + head * SIZE + j, j < SIZE, table, run, first, count, G, T, H * SIZE)
    if count == 0:
        return
    part_at = (
        state + (slot * H + head) * (WIDTH * SIZE) + tl.arange(0, PART)[:, None] * SIZE + j[None, :]
    )
    at = solved + (run * chunks * H + head) * (2 * L * L) + t[:, None] * L + t[None, :]
    for chunk in range(0, tl.cdiv(count, L)):
        row = first + chunk * L + t
        within = chunk * L + t < count
        log_decay, correct = load_chunk_gates(
            raw_gates, row, gate_stride, head, within, rate, bias, H, CORRECTS
        )
        source = mixed + row * (2 * HK * WIDTH + H * SIZE)
        query_at = source + head // (H // HK) * WIDTH
        # At position 0 the memory holds another request's state.
        written_rows = tl.where((start > 0) | (chunk > 0), WIDTH, 0)
        predicted, read, query_square, key_square = query_state(
            part_at, query_at, query_at + HK * WIDTH, within, written_rows, j, L, COLUMNS, ROWS, PART,
            WIDTH, SIZE,
        )  # fmt: skip
        start_decay = tl.exp(log_decay)
        key_unit = inverse_length(key_square, EPSILON, CORRECTS)
        in_rows = within[:, None] & (j < SIZE)[None, :]
        value_at = (source + 2 * HK * WIDTH + head * SIZE)[:, None] + j[None, :]
        written = tl.load(value_at, mask=in_rows, other=0.0)
        if CORRECTS:
            error = written - predicted * (key_unit * start_decay)[:, None]
            written = tl.dot(
                tl.load(at + L * L), error * correct[:, None], input_precision=PRECISION
            )
        else:
            written *= correct[:, None]
        read *= (inverse_length(query_square, EPSILON, CORRECTS) * scale * start_decay)[:, None]
        read = tl.dot(tl.load(at), written, read, input_precision=PRECISION)
        tl.store(out + ((row * H + head) * SIZE)[:, None] + j[None, :], read, mask=in_rows)
        last = tl.sum(tl.where(t == L - 1, log_decay, 0.0), 0)
        written *= (key_unit * tl.exp(last - log_decay))[:, None]
        tl.debug_barrier()  # other threads have read these parts of the state in the loop above
        update_state(
            part_at, query_at + HK * WIDTH, written, last, within, written_rows, j, ROWS, PART, WIDTH,
            SIZE,
        )  # fmt: skip
        tl.debug_barrier()
        at += H * (2 * L * L)


def delta_chunks(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
    """Launch `Kernels.delta_chunks`; rows of raw_gates have stride 1."""
    assert raw_gates.stride(1) == 1
    heads, width, size = memory.state.shape[1:]
    out = torch.empty((mixed.shape[0], heads, size), dtype=torch.float32, device=mixed.device)
    columns = min(STATE_COLUMNS, max(16, power_of_two(size)))
    runs = rows.table.shape[1]
    chunks = ceil_div(mixed.shape[0], CHUNK)
    solved = torch.empty(
        (runs, chunks, heads, 2, CHUNK, CHUNK), dtype=torch.float32, device=mixed.device
    )
    shape = {
        **_constants(rule, memory),
        "L": CHUNK,
        "PART": max(16, min(PART, power_of_two(width))),
    }
    gate_stride = raw_gates.stride(0)
    scale = width**-0.5 if rule.corrects else 1.0
    delta_solve_kernel[(runs, chunks, heads)](
        mixed,
        raw_gates,
        rule.rate,
        rule.bias,
        solved,
        rows.table,
        rows.applied,
        runs,
        gate_stride,
        scale,
        num_warps=1,
        **shape,
    )
    delta_chunks_kernel[(runs, heads, ceil_div(size, columns))](
        mixed,
        raw_gates,
        rule.rate,
        rule.bias,
        memory.state,
        solved,
        out,
        rows.table,
        rows.applied,
        runs,
        gate_stride,
        scale,
        len(mixed),
        chunks,
        COLUMNS=columns,
        num_warps=2,
        **shape,
    )
    return out
