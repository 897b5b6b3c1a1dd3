# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton twins of `delta_rule`, `delta_chunks` and `gated_norm`.

A program holds a block of columns of one head's state in registers from the first token to apply to the last
row: the state is read once and written once. One loop body serves tokens from the ring and rows of the pass,
and no product is fused with a sum but by name, so that both give the same bits. Of a prompt's chunk the
systems are solved side by side, then a state walks over them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, pdl_options, power_of_two
from spd.kernels.overlap_triton import wait_and_release
from spd.kernels.recurrent.delta_rule import CHUNK, NORM_EPSILON, DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.recurrent.short_conv_triton import clear_around, run_of

STATE_COLUMNS = 32
"""Of one program, which is one warp where it walks from row to row: its sums meet no barrier."""
PART = 16
"""Columns of keys and rows of a state that a product takes at once."""
PRECISION = tl.constexpr("tf32x3")
"""Of products: float32's in effect, on the matrix units."""


@triton.jit
def gates_said(said, within, H: tl.constexpr, CORRECTS: tl.constexpr):
    """Load raw gates: a step, which the decay follows from, and a correction (or the step once more)."""
    step = tl.load(said + CORRECTS * H, mask=within, other=0.0).to(tl.float32)
    amount = step
    if CORRECTS:
        amount = tl.load(said, mask=within, other=0.0).to(tl.float32)
    return step, amount


@triton.jit
def gates_meant(step, amount, rate, bias, CORRECTS: tl.constexpr):
    """The logarithm of the decay, and the factor of what is corrected or written, of loaded raw gates."""
    x = step + bias
    small = tl.exp(x)
    rounded = tl.where(x < -6.0, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    step = tl.where(x > 20.0, x, rounded)
    meant = step
    if CORRECTS:
        meant = tl.sigmoid(amount)
    return -tl.exp(rate) * step, meant


@triton.jit
def over_length(squares, EPSILON: tl.constexpr, CORRECTS: tl.constexpr):
    """What makes queries and keys of these squares as long as the rule wants them: 1, or what they are."""
    if CORRECTS:
        return tl.rsqrt(squares + EPSILON)
    return squares * 0.0 + 1.0


@triton.jit
def token_at(
    mixed, raw_gates, keys, values, gates, position, end, start, first, place, head, i, j, gate_stride,
    H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Load a position's token: from the rings before start, from this pass's rows before end, else zeros."""
    own = (position >= start) & (position < end)
    kept = position < start
    row = first + position - start
    key_head = head // (H // HK)
    source = mixed + row * (2 * HK * WIDTH + H * SIZE)
    key_at = tl.where(own, source + (HK + key_head) * WIDTH, keys + (place * HK + key_head) * WIDTH)
    value_at = tl.where(
        own, source + 2 * HK * WIDTH + head * SIZE, values + (place * H + head) * SIZE
    )
    query = tl.load(source + key_head * WIDTH + i, mask=i < tl.where(own, WIDTH, 0), other=0.0)
    key = tl.load(key_at + i, mask=i < tl.where(own | kept, WIDTH, 0), other=0.0)
    value = tl.load(value_at + j, mask=j < tl.where(own | kept, SIZE, 0), other=0.0)
    step, amount = gates_said(raw_gates + row * gate_stride + head, own, H, CORRECTS)
    gates_at = gates + (place * H + head) * 2
    decay = tl.load(gates_at, mask=kept, other=0.0)
    correct = tl.load(gates_at + 1, mask=kept, other=0.0)
    return query, key, value, step, amount, decay, correct


@triton.jit(
    do_not_specialize=["G", "T", "DEPTH", "gate_stride"],
    do_not_specialize_on_alignment=["raw_gates"],
)
def delta_rule_kernel(
    mixed, raw_gates, rate, bias, state, keys, values, gates, out, table, applied, G, T, DEPTH, gate_stride,
    scale, H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EPSILON: tl.constexpr, CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One run, one head, COLUMNS of its state's columns; ROWS is WIDTH as a power of two.

    Neighbouring programs read neighbouring columns, and a token is loaded while the one before is applied.
    """
    wait_and_release(PDL)
    block = tl.program_id(0)
    head = tl.program_id(1)
    run = tl.program_id(2)
    slot, first, count, start, keep, begin = run_of(table, applied, run, G)
    i = tl.arange(0, ROWS)
    j = block * COLUMNS + tl.arange(0, COLUMNS)
    out += head * SIZE + j
    clear_around(out, j < SIZE, table, run, first, count, G, T, H * SIZE)
    if count == 0:
        return
    whole = (i < WIDTH)[:, None] & (j < SIZE)[None, :]
    state += (slot * H + head) * (WIDTH * SIZE) + i[:, None] * SIZE + j[None, :]
    written = whole & (i < tl.where(begin > 0, WIDTH, 0))[:, None]
    current = tl.load(state, mask=written, other=0.0, eviction_policy="evict_first")
    head_rate = tl.load(rate + head)
    head_bias = tl.load(bias + head)
    writes_keys = (head % (H // HK) == 0) & (block == 0)
    end = start + count
    place = slot * DEPTH + begin % DEPTH
    query, key, value, step, amount, decay, correct = token_at(
        mixed, raw_gates, keys, values, gates, begin, end, start, first, place, head, i, j, gate_stride,
        H, HK, WIDTH, SIZE, CORRECTS,
    )  # fmt: skip
    for position in range(begin, end):
        behind = slot * DEPTH + (position + 1) % DEPTH
        next_query, next_key, next_value, next_step, next_amount, next_decay, next_correct = token_at(
            mixed, raw_gates, keys, values, gates, position + 1, end, start, first, behind, head, i, j,
            gate_stride, H, HK, WIDTH, SIZE, CORRECTS,
        )  # fmt: skip
        own = position >= start
        fresh_decay, fresh_correct = gates_meant(step, amount, head_rate, head_bias, CORRECTS)
        decay = tl.where(own, tl.exp(fresh_decay), decay)
        correct = tl.where(own, fresh_correct, correct)
        key *= tl.where(own, over_length(tl.sum(key * key, 0), EPSILON, CORRECTS), 1.0)
        query *= over_length(tl.sum(query * query, 0), EPSILON, CORRECTS)
        if position == keep:
            tl.store(state, current, mask=whole, cache_modifier=".cs")
        key_at = keys + (place * HK + head // (H // HK)) * WIDTH
        gates_at = gates + (place * H + head) * 2
        tl.store(key_at + i, key, mask=i < tl.where(own & writes_keys, WIDTH, 0))
        tl.store(values + (place * H + head) * SIZE + j, value, mask=j < tl.where(own, SIZE, 0))
        tl.store(gates_at, decay, mask=own & (block == 0))
        tl.store(gates_at + 1, correct, mask=own & (block == 0))
        current = current * decay
        if CORRECTS:
            value -= tl.sum(current * key[:, None], 0)
        current = tl.fma(key[:, None], (value * correct)[None, :], current)
        if own:
            read = tl.sum(current * (query * scale)[:, None], 0)
            tl.store(out + (first + position - start) * (H * SIZE), read, mask=j < SIZE)
        query = next_query
        key = next_key
        value = next_value
        place = behind
        step = next_step
        amount = next_amount
        decay = next_decay
        correct = next_correct
    if keep == end:
        tl.store(state, current, mask=whole, cache_modifier=".cs")


def delta_rule(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
    assert raw_gates.stride(1) == 1
    heads, width, size = memory.state.shape[1:]
    depth = memory.keys.shape[1]
    out = torch.empty((mixed.shape[0], heads, size), dtype=torch.float32, device=mixed.device)
    columns = min(STATE_COLUMNS, power_of_two(size))
    runs = rows.table.shape[1]
    delta_rule_kernel[(ceil_div(size, columns), heads, runs)](
        *(
            mixed,
            raw_gates,
            rule.rate,
            rule.bias,
            *memory,
            out,
            rows.table,
            rows.applied,
            runs,
            len(mixed),
        ),
        *(depth, raw_gates.stride(0), width**-0.5 if rule.corrects else 1.0),
        **{
            **_constants(rule, memory),
            "COLUMNS": columns,
            "num_warps": 1,
            "enable_fp_fusion": False,
        },
    )
    return out


def _constants(rule: DeltaRule, memory: DeltaMemory) -> dict[str, Any]:
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
def rows_of(source, within, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns first to first + ROWS, of WIDTH, of rows of float32 values at source [L]; else zeros."""
    i = first + tl.arange(0, ROWS)
    return tl.load(
        source[:, None] + i[None, :], mask=within[:, None] & (i < WIDTH)[None, :], other=0.0
    )


@triton.jit
def gates_of(
    raw_gates, row, gate_stride, head, within, rate, bias, H: tl.constexpr, CORRECTS: tl.constexpr
):
    """Of rows [L]: the logarithm of the decay since before the chunk, and how much is corrected."""
    said = raw_gates + row * gate_stride + head
    own = (tl.load(rate + head), tl.load(bias + head))
    step, amount = gates_said(said, within, H, CORRECTS)
    decay, amount = gates_meant(step, amount, own[0], own[1], CORRECTS)
    return tl.cumsum(tl.where(within, decay, 0.0), 0), tl.where(within, amount, 0.0)


@triton.jit(do_not_specialize=["G", "gate_stride"], do_not_specialize_on_alignment=["raw_gates"])
def delta_solve_kernel(
    mixed, raw_gates, rate, bias, solved, table, applied, G, gate_stride, scale,
    H: tl.constexpr, HK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    L: tl.constexpr, PART: tl.constexpr, EPSILON: tl.constexpr, CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of one run, one head: how rows read each other, and the inverse of how they write."""
    wait_and_release(PDL)
    run = tl.program_id(0)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    _, first, count, _, _, _ = run_of(table, applied, run, G)
    if chunk * L >= count:
        return
    t = tl.arange(0, L)
    row = first + chunk * L + t
    within = chunk * L + t < count
    total, correct = gates_of(raw_gates, row, gate_stride, head, within, rate, bias, H, CORRECTS)
    fade = tl.exp(
        tl.where(t[:, None] >= t[None, :], total[:, None] - total[None, :], float("-inf"))
    )
    source = mixed + row * (2 * HK * WIDTH + H * SIZE) + head // (H // HK) * WIDTH
    asked = tl.zeros((L, L), tl.float32)
    system = tl.zeros((L, L), tl.float32)
    query_square = tl.zeros((L,), tl.float32)
    key_square = tl.zeros((L,), tl.float32)
    for part in range(0, ROWS, PART):
        query = rows_of(source, within, part, PART, WIDTH)
        key = rows_of(source + HK * WIDTH, within, part, PART, WIDTH)
        query_square += tl.sum(query * query, 1)
        key_square += tl.sum(key * key, 1)
        asked = tl.dot(query, tl.trans(key), asked, input_precision=PRECISION)
        system = tl.dot(key, tl.trans(key), system, input_precision=PRECISION)
    key_unit = over_length(key_square, EPSILON, CORRECTS)
    fade *= key_unit[None, :]
    at = (
        solved
        + ((run * tl.num_programs(1) + chunk) * H + head) * (2 * L * L)
        + t[:, None] * L
        + t[None, :]
    )
    tl.store(at, asked * fade * (over_length(query_square, EPSILON, CORRECTS) * scale)[:, None])
    if CORRECTS:
        system = tl.where(
            t[:, None] > t[None, :], system * fade * (key_unit * correct)[:, None], 0.0
        )
        inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
        for step in range(0, L - 1):
            of_row = tl.sum(tl.where(t[None, :] == step, system, 0.0), 1)
            line = tl.sum(tl.where(t[:, None] == step, inverse, 0.0), 0)
            inverse -= of_row[:, None] * line[None, :]
        tl.store(at + L * L, inverse)


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
    """One run, one head, COLUMNS of its state's columns, which one chunk after another reads and writes."""
    wait_and_release(PDL)
    run = tl.program_id(0)
    head = tl.program_id(1)
    slot, first, count, start, _, _ = run_of(table, applied, run, G)
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
        total, correct = gates_of(
            raw_gates, row, gate_stride, head, within, rate, bias, H, CORRECTS
        )
        source = mixed + row * (2 * HK * WIDTH + H * SIZE)
        query_at = source + head // (H // HK) * WIDTH
        written_rows = tl.where(
            (start > 0) | (chunk > 0), WIDTH, 0
        )  # what lies there before is another's
        known = tl.zeros((L, COLUMNS), tl.float32)
        read = tl.zeros((L, COLUMNS), tl.float32)
        query_square = tl.zeros((L,), tl.float32)
        key_square = tl.zeros((L,), tl.float32)
        for part in range(0, ROWS, PART):
            query = rows_of(query_at, within, part, PART, WIDTH)
            key = rows_of(query_at + HK * WIDTH, within, part, PART, WIDTH)
            held = (part + tl.arange(0, PART) < written_rows)[:, None] & (j < SIZE)[None, :]
            now = tl.load(part_at + part * SIZE, mask=held, other=0.0)
            query_square += tl.sum(query * query, 1)
            key_square += tl.sum(key * key, 1)
            known = tl.dot(key, now, known, input_precision=PRECISION)
            read = tl.dot(query, now, read, input_precision=PRECISION)
        faded = tl.exp(total)
        key_unit = over_length(key_square, EPSILON, CORRECTS)
        given = within[:, None] & (j < SIZE)[None, :]
        value_at = (source + 2 * HK * WIDTH + head * SIZE)[:, None] + j[None, :]
        written = tl.load(value_at, mask=given, other=0.0)
        if CORRECTS:
            wrong = written - known * (key_unit * faded)[:, None]
            written = tl.dot(
                tl.load(at + L * L), wrong * correct[:, None], input_precision=PRECISION
            )
        else:
            written *= correct[:, None]
        read *= (over_length(query_square, EPSILON, CORRECTS) * scale * faded)[:, None]
        read = tl.dot(tl.load(at), written, read, input_precision=PRECISION)
        tl.store(out + ((row * H + head) * SIZE)[:, None] + j[None, :], read, mask=given)
        last = tl.sum(tl.where(t == L - 1, total, 0.0), 0)
        written *= (key_unit * tl.exp(last - total))[:, None]
        tl.debug_barrier()  # other threads hold these parts of the state in the loop above
        for part in range(0, ROWS, PART):
            key = rows_of(query_at + HK * WIDTH, within, part, PART, WIDTH)
            i = part + tl.arange(0, PART)
            now = tl.load(
                part_at + part * SIZE,
                mask=(i < written_rows)[:, None] & (j < SIZE)[None, :],
                other=0.0,
            )
            now = tl.dot(tl.trans(key), written, now * tl.exp(last), input_precision=PRECISION)
            tl.store(part_at + part * SIZE, now, mask=(i < WIDTH)[:, None] & (j < SIZE)[None, :])
        tl.debug_barrier()
        at += H * (2 * L * L)


def delta_chunks(
    mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
) -> Tensor:
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
    given = (mixed, raw_gates, rule.rate, rule.bias)
    where = (
        rows.table,
        rows.applied,
        runs,
        raw_gates.stride(0),
        width**-0.5 if rule.corrects else 1.0,
    )
    delta_solve_kernel[(runs, chunks, heads)](*given, solved, *where, num_warps=1, **shape)
    shape |= {"COLUMNS": columns, "num_warps": 2}
    grid = (runs, heads, ceil_div(size, columns))
    delta_chunks_kernel[grid](
        *given, memory.state, solved, out, *where, len(mixed), chunks, **shape
    )
    return out


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["gate"])
def gated_norm_kernel(
    x, gate, weight, out, stride, epsilon, H: tl.constexpr, SIZE: tl.constexpr, OWN: tl.constexpr,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of one head."""
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    j = tl.arange(0, BLOCK)
    within = j < SIZE
    value = tl.load(x + (row * H + head) * SIZE + j, mask=within, other=0.0)
    opened = tl.load(gate + row * stride + head * SIZE + j, mask=within, other=0.0).to(tl.float32)
    opened *= tl.sigmoid(opened)
    value *= opened if FIRST else 1.0
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + epsilon)
    normed = normed * tl.load(weight + head * OWN + j, mask=within, other=0.0)
    normed *= 1.0 if FIRST else opened
    tl.store(out + (row * H + head) * SIZE + j, normed.to(out.dtype.element_ty), mask=within)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool = False
) -> Tensor:
    assert gate.stride(1) == 1
    rows, heads, size = x.shape
    out = torch.empty((rows, heads * size), dtype=gate.dtype, device=x.device)
    own = weight.numel() // heads * (weight.dim() - 1)
    sizes = {"H": heads, "SIZE": size, "OWN": own, "BLOCK": power_of_two(size)}
    gated_norm_kernel[(rows, heads)](
        *(x, gate, weight, out, gate.stride(0), epsilon),
        FIRST=gate_first,
        num_warps=1 if size <= 512 else 4,
        **sizes,
        **pdl_options(x.device),
    )
    return out
