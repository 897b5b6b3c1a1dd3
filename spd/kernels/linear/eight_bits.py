"""Weights in int8, made from wider ones, a scale a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.few_bits import GroupedWeight, grouped_linear
from spd.kernels.linear.skinny_linear import AnyWeight, ScaledWeight, plain_weight

INT8_LARGEST = 127
STRIP = 2**24
"""Values that are rounded at a time, in float32."""


def magnitudes(weight: Tensor) -> Tensor:
    """The largest magnitude of each row of weight [..., N, K]: float32 [..., N]."""
    rows = weight.flatten(0, -2)
    strips = torch.split(rows, max(1, STRIP // rows.shape[1]))
    return torch.cat([strip.float().abs().amax(dim=1) for strip in strips]).view(weight.shape[:-1])


def int8_rows(weight: Tensor, largest: Tensor | None = None) -> ScaledWeight:
    """weight [..., N, K] as int8 with one scale a row: its largest magnitude over 127; ties go to even.

    largest: float32 [..., N], the `magnitudes` of whole rows, where these are parts of rows. A scale is a
    bfloat16 number, so that products of any type have it exactly; each value is off by at most half its row's
    scale. A row of zeros keeps the scale 1. Equal weights give equal bits everywhere: nothing is summed.
    """
    whole = magnitudes(weight) if largest is None else largest
    scales = (whole.flatten() / INT8_LARGEST).to(torch.bfloat16).float()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    rows = weight.flatten(0, -2)
    values = torch.empty(rows.shape, dtype=torch.int8, device=weight.device)
    step = max(1, STRIP // rows.shape[1])
    for strip, to, scale in zip(*(torch.split(each, step) for each in (rows, values, scales)), strict=True):
        to.copy_(torch.round(strip.float() / scale[:, None]).clamp_(-INT8_LARGEST, INT8_LARGEST))
    return ScaledWeight(values.view(weight.shape), scales.view(weight.shape[:-1]))


def multiplies_int8(device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    """Whether torch multiplies x of a dtype there by int8 rows of so many columns without widening them.

    On CPU by bfloat16, rows in whole vectors: its float32 products were measured many times slower than
    those of wide weights, and it reads beyond rows that end within a vector.
    """
    return device.type == "cpu" and dtype == torch.bfloat16 and columns % 32 == 0


def int8_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times int8 rows [N, K], each with its scale [N], plus bias [N]: [T, N] in x's type.

    Torch form: summed in float32, then times the row's scale where `multiplies_int8`, else `plain` weights.
    """
    if weight.columns is None and multiplies_int8(x.device, x.dtype, x.shape[1]):
        y = torch._weight_int8pack_mm(x.contiguous(), weight.values, weight.scales.to(x.dtype))
        return y if bias is None else y + bias
    return F.linear(x, weight.plain(x.dtype), bias)


def expert_linear(x: Tensor, weights: AnyWeight | GroupedWeight, expert: int) -> Tensor:
    """x [T, K] times one of the weights [E, N, K], whatever form they are kept in: [T, N]."""
    if isinstance(weights, GroupedWeight):
        return grouped_linear(x, weights.expert(expert))
    if not isinstance(weights, ScaledWeight):
        return F.linear(x, plain_weight(weights, x.dtype)[expert])
    return int8_linear(x, ScaledWeight(weights.values[expert], weights.scales[expert]))
