"""Weights of eight bits as they are kept: bounded errors, and scales that survive joining."""

from __future__ import annotations

import torch

from spd.kernels.linear.eight_bits import block_scales, int8_rows
from spd.kernels.linear.skinny_linear import ScaledWeight
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


def test_blocks_keep_their_scales_when_weights_are_joined() -> None:
    first, second = torch.rand(2, 3), torch.rand(1, 3)
    joined = torch.cat((block_scales(first, 144), block_scales(second, 80)))
    values = torch.ones(224, 300).to(torch.float8_e4m3fn)
    wide = ScaledWeight(values, joined).plain(torch.float32)
    assert wide[143, 127] == first[1, 0] and wide[144, 128] == second[0, 1] and wide[127, 299] == first[0, 2]
