"""Rounds matrices to codes of four to eight bits, with a scale for a group of columns that errs least."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from spd.kernels.capabilities import CODE_BITS, ROUNDING_GROUP, CodeKind
from spd.kernels.linear.few_bits import (
    DEFAULT_ZERO_POINTS,
    IQ4_VALUES,
    STRIP_VALUES,
    GroupedWeight,
    pack_nibbles,
)

THREADS = 4
"""The most threads that round a matrix on a CPU."""
CACHED_VALUES = 2**17
"""Values that a CPU's thread rounds at a time: what is computed of them stays in its cache."""
STEP_FACTORS = (1.0, 0.97, 0.94, 1.03, 1.06)
"""First scales of integer codes, as factors of the one that maps a group's value of largest
magnitude to the code of largest magnitude. Smaller ones clip that value and err less elsewhere.
"""
LEVEL_FACTORS = (1.02, 0.86, 0.94, 1.1, 1.18, -1.02, -0.86, -0.94, -1.1, -1.18)
"""The same of `IQ4_VALUES`, which reach further below 0 than above it."""


def quantize_groups(weight: Tensor, kind: CodeKind) -> GroupedWeight:
    """Round weight [..., N, K] to codes of a kind, with a float16 scale for `ROUNDING_GROUP` columns.

    A scale is NaN in a group with a value that is not finite. Equal groups give equal bits, however
    many there are: sums are pairwise within a group.
    """
    rows = weight.flatten(0, -2)
    count = 1
    if weight.device.type == "cpu":
        count = min(THREADS, len(os.sched_getaffinity(0)))
    parts = rows.chunk(count)
    if len(parts) == 1:
        rounded = [_quantize_rows(rows, kind)]
    else:
        # Each thread computes by itself. Torch's own ones wait for each other after every
        # operation, which took 17 times as long while other programs kept the processor busy.
        with ThreadPoolExecutor(
            len(parts), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            rounded = list(pool.map(_quantize_rows, parts, [kind] * len(parts)))
    codes = torch.cat([part for part, _ in rounded])
    scales = torch.cat([part for _, part in rounded])
    leading = weight.shape[:-1]
    return GroupedWeight(
        kind, codes.view(*leading, -1), scales.view(*leading, -1), None, ROUNDING_GROUP
    )


def _quantize_rows(rows: Tensor, kind: CodeKind) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of rows [N, K], a strip at a time."""
    count, columns = rows.shape
    is_paired = CODE_BITS[kind] == 4
    width = columns // 2 if is_paired else columns
    codes = torch.empty(count, width, dtype=torch.uint8, device=rows.device)
    groups = columns // ROUNDING_GROUP
    scales = torch.empty(count, groups, dtype=torch.float16, device=rows.device)
    table = _make_table(kind, rows.device)
    step = max(1, (CACHED_VALUES if rows.device.type == "cpu" else STRIP_VALUES) // columns)
    for first in range(0, count, step):
        part = slice(first, first + step)
        values = rows[part].float().view(-1, ROUNDING_GROUP).t().contiguous()
        best = _choose_scales(values, kind, table)
        scales[part] = best.view(-1, groups)
        strip = _to_codes(values / best, kind, table).t().reshape(-1, columns)
        codes[part] = pack_nibbles(strip) if is_paired else strip
    return codes, scales


def _choose_scales(values: Tensor, kind: CodeKind, table: Tensor | None) -> Tensor:
    """Return the scales float32 [G], numbers of float16, of groups [32, G].

    Codes of a first scale have a best scale of their own: Σ code value / Σ code². The squared error
    that is left with it is Σ value² less (Σ code value)² / Σ code², so the largest of these is the
    best.
    """
    largest = values.amax(0)
    least = values.amin(0)
    full = torch.where(largest > -least, largest, least) / -_largest_level(kind)
    full = torch.where(full == 0, torch.ones_like(full), full)
    best = torch.ones_like(full)
    gain = torch.zeros_like(full)
    for factor in STEP_FACTORS if table is None else LEVEL_FACTORS:
        codes = _round_to_codes(values / (full * factor), kind, table)
        products = _sum_groups(codes * values)
        squares = _sum_groups(codes.square_())
        scale = products / squares
        new_gain = products * scale
        better = new_gain > gain
        best = torch.where(better, scale, best)
        gain = torch.where(better, new_gain, gain)
    best = best.half().float()
    best = torch.where(best == 0, torch.ones_like(best), best)
    return best + (full - full)  # NaN where a value is not finite


def _largest_level(kind: CodeKind) -> int:
    """Return the largest magnitude of a code's value."""
    return -IQ4_VALUES[0] if kind == "iq4" else DEFAULT_ZERO_POINTS[kind]


def _make_table(kind: CodeKind, device: torch.device) -> Tensor | None:
    """Return the code of `IQ4_VALUES` nearest to each whole number from -128 on, or None."""
    if kind != "iq4":
        return None
    levels = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=device)
    numbers = torch.arange(-128, 128, device=device)
    return (numbers[:, None] - levels).abs().argmin(dim=1).to(torch.uint8)


def _round_to_codes(numbers: Tensor, kind: CodeKind, table: Tensor | None) -> Tensor:
    """Return the values of the codes nearest to numbers float32 of any shape."""
    if table is not None:
        levels = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=numbers.device)
        return _look_up(levels.index_select(0, table.int()), numbers)
    middle = DEFAULT_ZERO_POINTS[kind]
    return numbers.round().clamp_(-middle, middle - 1)


def _to_codes(numbers: Tensor, kind: CodeKind, table: Tensor | None) -> Tensor:
    """Return the codes uint8 nearest to numbers float32."""
    if table is not None:
        return _look_up(table, numbers)
    middle = DEFAULT_ZERO_POINTS[kind]
    return numbers.round().clamp_(-middle, middle - 1).add_(middle).to(torch.uint8)


def _look_up(table: Tensor, numbers: Tensor) -> Tensor:
    """Return the entries of a table for whole numbers from -128 on that are nearest to numbers."""
    whole = numbers.nan_to_num(0.0).round_().clamp_(-128, 127)
    places = whole.add_(128).int().flatten()
    return table.index_select(0, places).view(numbers.shape)


def _sum_groups(numbers: Tensor) -> Tensor:
    """Return the sums [G] of groups [32, G], pairwise: in one order whatever G is."""
    while numbers.shape[0] > 1:
        half = numbers.shape[0] // 2
        numbers = numbers[:half] + numbers[half:]
    return numbers[0]
