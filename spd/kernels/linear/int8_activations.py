"""Products of weights in codes with rows that are rounded to eight bits: W4A8 and W8A8.

Each 32 columns of a row are rounded together, with a scale of their own; sums of products are whole
numbers, exact in any order, and are scaled and added in ascending order. So a row's bits depend on
nothing but the row. This is the torch form; the C kernels give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.few_bits import (
    DEFAULT_ZERO_POINTS,
    FOUR_BIT_KINDS,
    GroupedWeight,
    decode_codes,
    decode_scales,
    grouped_linear,
    unpack_nibbles,
)

BLOCK = 32
"""Columns of a row that are rounded together."""
MOST = 127
"""The largest magnitude of a rounded value."""
SMALLEST = 2.0**-100
"""A block whose largest magnitude is less counts as zeros: its scale is 0."""


class RoundedRows(NamedTuple):
    """Rows [T, K] as whole numbers float32 [T, B, 32], and a scale of each block [T, B]."""

    numbers: Tensor
    scales: Tensor


def round_rows(x: Tensor) -> RoundedRows:
    """Round rows x [T, K] to whole numbers from -127 to 127, ties to even; K is padded with zeros.

    A block's scale is its largest magnitude / 127; NaN where an element is not finite.
    """
    blocks = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).view(x.shape[0], -1, BLOCK)
    largest = blocks.abs().amax(-1)
    wild = ~blocks.isfinite().all(-1)
    empty = wild | (largest < SMALLEST)
    # A number divided by a tensor would be multiplied by a rounded reciprocal.
    factors = (torch.full_like(largest, MOST) / largest).masked_fill(empty, 0.0)
    numbers = (blocks.masked_fill(empty.unsqueeze(-1), 0.0) * factors.unsqueeze(-1)).round()
    scales = (largest / MOST).masked_fill(empty, 0.0).masked_fill(wild, torch.nan)
    return RoundedRows(numbers, scales)


def whole_numbers(weight: GroupedWeight) -> tuple[Tensor, float]:
    """Return a weight's values [N, K] before scales as whole numbers float32, and their unit."""
    codes = unpack_nibbles(weight.codes) if weight.kind in FOUR_BIT_KINDS else weight.codes
    if weight.kind == "e2m1":
        return 2 * decode_codes("e2m1", codes), 0.5
    numbers = decode_codes(weight.kind, codes)
    if weight.zeros is not None:
        zeros = weight.zeros.float().repeat_interleave(weight.group, -1)
        return numbers - zeros[:, : numbers.shape[1]], 1.0
    if weight.minima is None:
        numbers = numbers - DEFAULT_ZERO_POINTS.get(weight.kind, 0)
    return numbers, 1.0


def int8_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Return rounded rows x [T, K] times a weight [N, K] plus bias [N]: [T, N] in x's dtype.

    Each sum of at most 32 products is a whole number below 2**24, so float32 holds it. It is
    multiplied by the product of both scales and added to the total, block by block.
    """
    rows = round_rows(x)
    numbers, unit = whole_numbers(weight)
    span = min(weight.group, BLOCK)
    columns = F.pad(numbers, (0, -numbers.shape[1] % BLOCK)).view(len(numbers), -1, span)
    row_parts = rows.numbers.view(x.shape[0], -1, span)
    sums = torch.bmm(row_parts.transpose(0, 1), columns.permute(1, 2, 0))
    scales = decode_scales(weight.scales, weight.factors) * unit
    minima = None
    if weight.minima is not None:
        minima = decode_scales(weight.minima, weight.minimum_factors)
        block_sums = rows.numbers.sum(-1) * rows.scales
    total = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    groups = scales.shape[1]
    for part in range(min(sums.shape[0], -(-weight.shape[1] // span))):
        group = min(part * span // weight.group, groups - 1)
        block = part * span // BLOCK
        both = rows.scales[:, block, None] * scales[:, group]
        total = total + sums[part] * both
        if minima is not None:
            total = total - block_sums[:, block, None] * minima[:, group]
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype)


def codes_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] times a weight [N, K] plus bias [N], with rows rounded if the weight says so."""
    multiply = int8_linear if weight.rounds_rows else grouped_linear
    return multiply(x, weight, bias)
