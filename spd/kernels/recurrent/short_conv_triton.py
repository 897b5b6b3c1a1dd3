# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `short_conv`: a program loops over consecutive rows of one run for a block of
channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, pdl_options
from spd.kernels.overlap_triton import wait_and_release
from spd.kernels.recurrent.short_conv import Segments

CHANNELS = 128
"""Channels of one program."""
NEAR_TAPS = 4
"""Taps whose weights and inputs stay in registers."""
ROWS_A_PROGRAM = 4
"""Rows of one program, where runs are equally long."""


@triton.jit
def load_run(table, applied, run, G):
    """Load slot, first row, row count, first position, position to keep and applied position of a
    run."""
    slot = tl.load(table + run)
    first = tl.load(table + G + run)
    count = tl.load(table + 2 * G + run)
    start = tl.load(table + 3 * G + run)
    keep = tl.load(table + 4 * G + run)
    return slot, first, count, start, keep, tl.load(applied + slot)


@triton.jit
def clear_around(out, within, table, run, first, count, G, T, WIDTH: tl.constexpr):
    """Write zeros into the rows of out [T, WIDTH] between a run's end and the next run.

    out points to columns of row 0. Programs of the first run clear the rows before it, too.
    """
    next_first = tl.where(run + 1 < G, tl.load(table + G + run + 1, mask=run + 1 < G, other=0), T)
    for row in range(tl.where((run == 0) & (first > 0), 0, first + count), next_first):
        if (row < first) | (row >= first + count):
            tl.store(out + row * WIDTH, 0.0, mask=within)


@triton.jit
def load_input(x, ring, position, start, stride, channel, C: tl.constexpr, DEPTH: tl.constexpr):
    """Load the inputs of a position, float32: of the pass from start on, else of the ring.

    0 before position 0. x points to the run's first row.
    """
    in_rows = channel < tl.where(position >= start, C, 0)
    in_ring = channel < tl.where((position < start) & (position >= 0), C, 0)
    new_input = tl.load(x + (position - start) * stride + channel, mask=in_rows, other=0.0)
    earlier = tl.load(ring + (position + DEPTH) % DEPTH * C, mask=in_ring, other=0.0)
    return tl.where(position >= start, new_input, earlier).to(tl.float32)


@triton.jit
def load_weight(weight, tap, within, C: tl.constexpr):
    """Load the weights of a tap; weight points to the channels of the first one."""
    return tl.load(weight + tap * C, mask=within, other=0.0)


@triton.jit
def load_tap(
    weight, x, ring, back: tl.constexpr, position, start, stride, channel, C: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load the weights and inputs of the tap `back` positions before a position; zeros where it is
    none of the NEAR ones."""
    if back < NEAR:
        tap_weight = load_weight(weight, FAR + NEAR - 1 - back, channel < C, C)
        return tap_weight, load_input(x, ring, position - back, start, stride, channel, C, DEPTH)
    else:
        nothing = channel.to(tl.float32) * 0.0
        return nothing, nothing


@triton.jit(do_not_specialize=["G", "T", "stride"], do_not_specialize_on_alignment=["x"])
def short_conv_kernel(
    x, weight, bias, ring, out, table, applied, G, T, stride,
    C: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, DEPTH: tl.constexpr,
    CHANNELS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve a run's rows; inputs of earlier passes come from the ring, those of this pass from
    x.

    All rows that read the ring belong to the first program, which then writes the ring. The weights
    and inputs of the latest NEAR taps are loaded once, those of the FAR ones before them for each
    row.
    """
    wait_and_release(PDL)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    within = channel < C
    slot, first, count, start, _, _ = load_run(table, applied, tl.program_id(0), G)
    if tl.program_id(2) == 0:
        clear_around(out + channel, within, table, tl.program_id(0), first, count, G, T, C)
    ring += slot * (DEPTH * C) + channel
    rows_a_program = tl.maximum(tl.cdiv(count, tl.num_programs(2)), FAR + NEAR - 1)
    begin = tl.program_id(2) * rows_a_program
    x += first * stride
    weight += channel
    weight_0 = load_weight(weight, FAR + NEAR - 1, within, C)
    weight_1, before_1 = load_tap(
        weight, x, ring, 1, start + begin, start, stride, channel, C, NEAR, FAR, DEPTH
    )
    weight_2, before_2 = load_tap(
        weight, x, ring, 2, start + begin, start, stride, channel, C, NEAR, FAR, DEPTH
    )
    weight_3, before_3 = load_tap(
        weight, x, ring, 3, start + begin, start, stride, channel, C, NEAR, FAR, DEPTH
    )
    for row in range(begin, tl.minimum(begin + rows_a_program, count)):
        total = tl.zeros((CHANNELS,), tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=within, other=0.0)
        for tap in tl.static_range(FAR):
            position = start + row - (FAR + NEAR - 1 - tap)
            value = load_input(x, ring, position, start, stride, channel, C, DEPTH)
            total = tl.fma(value, load_weight(weight, tap, within, C), total)
        value = tl.load(x + row * stride + channel, mask=within, other=0.0).to(tl.float32)
        total = tl.fma(before_3, weight_3, total)
        total = tl.fma(before_2, weight_2, total)
        total = tl.fma(before_1, weight_1, total)
        total = tl.fma(value, weight_0, total)
        before_3 = before_2
        before_2 = before_1
        before_1 = value
        total *= tl.sigmoid(total) if SILU else 1.0
        tl.store(out + (first + row) * C + channel, total, mask=within)
    for row in range(tl.maximum(0, count - DEPTH), tl.where(begin == 0, count, 0)):
        new_input = tl.load(x + row * stride + channel, mask=within, other=0.0)
        tl.store(ring + (start + row) % DEPTH * C, new_input, mask=within)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: Segments, silu: bool = True
) -> Tensor:
    """Launch `Kernels.short_conv`; rows of x have stride 1."""
    assert x.stride(1) == 1
    count, channels = x.shape
    runs = rows.table.shape[1]
    out = torch.empty((count, channels), dtype=torch.float32, device=x.device)
    near = min(NEAR_TAPS, weight.shape[0])
    sizes = {"C": channels, "NEAR": near, "FAR": weight.shape[0] - near, "DEPTH": ring.shape[1]}
    short_conv_kernel[(runs, ceil_div(channels, CHANNELS), ceil_div(count, runs * ROWS_A_PROGRAM))](
        x,
        weight,
        bias,
        ring,
        out,
        rows.table,
        rows.applied,
        runs,
        count,
        x.stride(0),
        CHANNELS=CHANNELS,
        SILU=silu,
        num_warps=1,
        enable_fp_fusion=False,
        **sizes,
        **pdl_options(x.device),
    )
    return out
