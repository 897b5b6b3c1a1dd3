"""Weights in eight bits: made from wider ones, a scale a row, or as checkpoints store them, in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.skinny_linear import SCALE_COLUMNS, SCALE_ROWS, ScaledWeight

INT8_LARGEST = 127
BLOCK = 128
"""Rows and columns of a block of DeepSeek's FP8 format."""


def int8_rows(weight: Tensor) -> ScaledWeight:
    """weight [N, K] as int8 with one scale a row: its largest magnitude over 127; ties go to even.

    Each value is off by at most half its row's scale. A row of zeros keeps the scale 1. The same weight
    gives the same bits everywhere: nothing is summed.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / INT8_LARGEST
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = torch.clamp(torch.round(wide / scales[:, None]), -INT8_LARGEST, INT8_LARGEST)
    return ScaledWeight(values.to(torch.int8), scales)


def block_scales(scale_inv: Tensor, rows: int) -> Tensor:
    """The scales of a weight of `rows` rows as `ScaledWeight` groups them: [ceil(rows / 16), ceil(K / 128)].

    scale_inv float32 [ceil(rows / 128), ceil(K / 128)]: what each value of a block is multiplied by, the last
    blocks partial. Weights that follow each other along N concatenate theirs where rows is a multiple of 16.
    Source: `weight_scale_inv` of DeepSeek-V3's checkpoints.
    """
    assert scale_inv.shape[0] == -(-rows // BLOCK) and BLOCK == SCALE_COLUMNS
    return scale_inv.float().repeat_interleave(BLOCK // SCALE_ROWS, 0)[: -(-rows // SCALE_ROWS)].contiguous()
