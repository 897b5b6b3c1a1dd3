"""Weights in int8 as they are kept: bounded errors."""

from __future__ import annotations

import torch

from spd.kernels.linear.eight_bits import int8_rows
from tests.kernels.forms import normal


def test_int8_is_within_half_a_step() -> None:
    wide = normal(33, 70, seed=4) * torch.exp2(torch.arange(33) - 16.0)[:, None]
    wide[5] = 0
    made = int8_rows(wide)
    assert ((made.plain(torch.float32) - wide).abs() <= 0.5001 * made.scales[:, None]).all()
    assert made.values.abs().amax(1).tolist() == [127] * 5 + [0] + [127] * 27
    assert made.scales[5] == 1 and not made.values[5].any()
    half = int8_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5]]))
    assert half.values.tolist() == [[127, 0, 2, -2]]
