"""Linear layers on prebound weights, prepacked for oneDNN where that is available.

A call never lets the number of rows choose the arithmetic freely: rows come in buckets that were
seen to give the same bits (see `spd.runtime.row_buckets`), and wider inputs are cut into tiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_ROWS = 16
"""Rows that oneDNN is told to expect when it lays out a weight."""


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN holds this weight in its own layout: on CPU, bfloat16 or float32."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class Linear:
    """y = x Wᵀ + b, with W [N, K] packed once and never changed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.bias = bias
        self.packed = can_prepack(weight)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.weight = weight

    def __call__(self, x: Tensor, tile: int) -> Tensor:
        """x [T, K] to [T, N], at most `tile` rows a call; a last partial tile is a bucket's size."""
        if x.shape[0] <= tile:
            return self._apply(x)
        return torch.cat([self._apply(x[i : i + tile]) for i in range(0, x.shape[0], tile)])

    def _apply(self, x: Tensor) -> Tensor:
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)
