# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `delta_chunks`: rows up to the first border, chunks to the last one, and rows.

For the chunks the systems of all of them are solved in parallel, then the state is updated chunk by
chunk, PART of its rows at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, power_of_two
from spd.kernels.overlap_triton import wait_and_release
from spd.kernels.recurrent.delta_rule import CHUNK, DeltaMemory, DeltaRule
from spd.kernels.recurrent.delta_rule_triton import (
    BEFORE_BORDER,
    BEHIND_LAST,
    LEAST,
    PRECISION,
    STATE_COLUMNS,
    activate_gates,
    constants,
    inverse_length,
    launch_rows,
    load_raw_gates,
    load_rows,
    scale_of,
)
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.recurrent.short_conv_triton import load_run
from spd.kernels.recurrent.state_blocks import BLOCK


@triton.jit
def load_chunks(table, applied, run, G, BLOCK: tl.constexpr):
    """Return the slot, first row, row count and first position of a run between its borders."""
    slot, first, count, start, keep, _ = load_run(table, applied, run, G)
    border = tl.minimum((start + BLOCK - 1) // BLOCK * BLOCK, start + count)
    return slot, first + border - start, tl.maximum(keep - border, 0), border


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
    BLOCK: tl.constexpr, L: tl.constexpr, PART: tl.constexpr, EPSILON: tl.constexpr,
    CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one chunk's scores between its rows, and the inverse of its triangular system, for one
    head."""
    wait_and_release(PDL)
    run = tl.program_id(0)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    _, first, count, _ = load_chunks(table, applied, run, G, BLOCK)
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
    do_not_specialize=["G", "gate_stride", "chunks"],
    do_not_specialize_on_alignment=["raw_gates"],
)
def delta_chunks_kernel(
    mixed, raw_gates, rate, bias, state, solved, out, table, applied, G, gate_stride, scale, chunks,
    H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr, PART: tl.constexpr,
    EPSILON: tl.constexpr, CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply a run's chunks, one after another, to COLUMNS columns of one head's state.

    The state is written as of the end of each.
    """
    wait_and_release(PDL)
    run = tl.program_id(0)
    head = tl.program_id(1)
    slot, first, count, start = load_chunks(table, applied, run, G, BLOCK)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, L)
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
    heads, _, size = memory.state.shape[1:]
    out = torch.empty((mixed.shape[0], heads, size), dtype=torch.float32, device=mixed.device)
    columns = min(STATE_COLUMNS, max(LEAST, power_of_two(size)))
    runs = rows.table.shape[1]
    chunks = ceil_div(mixed.shape[0], CHUNK)
    solved = torch.empty(
        (runs, chunks, heads, 2, CHUNK, CHUNK), dtype=torch.float32, device=mixed.device
    )
    shape = {**constants(rule, memory), "BLOCK": BLOCK, "L": CHUNK}
    gate_stride = raw_gates.stride(0)
    scale = scale_of(rule, memory)
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
    launch_rows(mixed, raw_gates, rule, memory, rows, out, BEFORE_BORDER)
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
        chunks,
        COLUMNS=columns,
        num_warps=2,
        **shape,
    )
    launch_rows(mixed, raw_gates, rule, memory, rows, out, BEHIND_LAST)
    return out
