"""Weights stored as FP8 with a scale a block: read into the run's dtype, a tensor at a time, or kept.

W[i, j] = X.weight[i, j] * X.weight_scale_inv[i // rows, j // columns]; blocks at the edges may be partial.
Source: the published DeepSeek-V3 checkpoint and its conversion script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.runtime.models.builder import Fill
from spd.runtime.models.destinations import NOTHING, Cut, Cuts
from spd.runtime.models.weights import FP8_DTYPE, scale_name, scale_shape

STRIP = 8
"""Rows of blocks that are scaled at a time: their scales are spread out over the elements in between."""


def scaling_fill(
    checkpoint: Checkpoint, fill: Fill, fill_scales: Fill, block: tuple[int, int], cuts: Cuts = NOTHING
) -> Fill:
    """`fill`, then what is stored as FP8 is multiplied by its scales, in place.

    `fill` casts FP8 to the views' dtype, which float16, bfloat16 and float32 all hold exactly; the product
    is rounded once. Scales are written by `fill_scales`, whole also where `cuts` says that a view is a part.
    Views that are FP8 themselves stay as stored, and their scales are among the views.
    """

    def scaled(views: Mapping[str, Tensor]) -> None:
        fill(views)
        shapes = {
            name: checkpoint.tensors[name].shape
            for name, view in views.items()
            if checkpoint.tensors[name].dtype == FP8_DTYPE and view.dtype != torch.float8_e4m3fn
        }
        scales = {
            name: torch.empty(scale_shape(shape, block), device=views[name].device)
            for name, shape in shapes.items()
        }
        fill_scales({scale_name(name): view for name, view in scales.items()})
        for name, shape in shapes.items():
            scale_blocks(views[name], scales[name], block, cuts.get(name), shape)

    return scaled


def scale_blocks(
    weight: Tensor, scales: Tensor, block: tuple[int, int], cut: Cut | None, shape: Sequence[int]
) -> None:
    """Multiply weight [N, K] in place by scales float32 [ceil(N / rows), ceil(K / columns)], block = both.

    cut: of a matrix of `shape`, to which the scales belong, weight is this part; it may begin and end inside
    a block.
    """
    rows, columns = (
        torch.arange(size, device=weight.device) // per
        if cut is None
        else torch.tensor(cut.indices(dim, size), device=weight.device) // per
        for dim, (size, per) in enumerate(zip(shape, block, strict=True))
    )
    spread, step = scales[:, columns], STRIP * block[0]
    for first in range(0, weight.shape[0], step):
        weight[first : first + step].mul_(spread[rows[first : first + step]])
