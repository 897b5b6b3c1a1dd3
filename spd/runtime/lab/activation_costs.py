"""The time of products of activations rounded to eight bits, beside that of whole ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from spd.kernels.linear.few_bits import GroupedWeight, quantize_int8
from spd.kernels.linear.group_rounding import quantize_groups
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.packed import ROUNDED, PackedWeight
from spd.kernels.seeded import seeded_generator

WEIGHT_SHAPE = (6144, 1024)
"""The rows and columns of the weight."""
QUANTIZERS: Mapping[str, Callable[[torch.Tensor], GroupedWeight]] = {
    "int8": quantize_int8,
    "int4": partial(quantize_groups, kind="iq4"),
}
ROW_COUNTS = (1, 8)
"""The rows of a plain round and of a long verification."""
BYTES_IN_TURN = 1 << 26
"""Bytes of copies that are read in turn: more than a cache holds, so that they come from memory."""
REPETITIONS = 3
"""How often every copy is multiplied in each way."""


def measure_time_ratios(native: NativeKernels) -> dict[str, dict[int, float]]:
    """Return the time of rounded rows over that of whole ones, by form of weights and rows.

    Each time is the least processor time of one thread.
    """
    return {form: _time_ratios(native, form) for form in QUANTIZERS}


def _time_ratios(native: NativeKernels, form: str) -> dict[int, float]:
    """Return the ratios of one form of weights, by the number of rows."""
    generator = seeded_generator()
    packed = native.pack(QUANTIZERS[form](torch.randn(WEIGHT_SHAPE, generator=generator)))
    count = max(2, BYTES_IN_TURN // packed.tiles.nbytes)
    copies = [replace(packed, tiles=packed.tiles.clone()) for _ in range(count)]
    ratios: dict[int, float] = {}
    for rows in ROW_COUNTS:
        x = torch.randn(rows, WEIGHT_SHAPE[1], generator=generator).to(native.dtype)
        whole: list[int] = []
        rounded: list[int] = []
        for copy in copies * REPETITIONS:
            whole.append(_product_time(native, x, copy))
            rounded.append(_product_time(native, x, replace(copy, rounds_rows=True)))
        ratios[rows] = min(rounded) / min(whole)
    return ratios


def _product_time(native: NativeKernels, x: torch.Tensor, weight: PackedWeight) -> int:
    """Return the nanoseconds of processor time of one product."""
    began = time.thread_time_ns()
    native.packed_linear(x, weight, None, ROUNDED)
    return time.thread_time_ns() - began
