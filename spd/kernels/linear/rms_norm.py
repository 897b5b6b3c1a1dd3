"""Root-mean-square norm over the last dimension."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x**2) + epsilon) * weight, each row by itself.

    x [..., D]; weight [D] or, with a scale for each head, [heads, D] against x [..., heads, D].
    Computed in float32, returned in x's dtype; float32 weights are multiplied before x is rounded.
    Source: Zhang & Sennrich 2019.
    """
    if weight.dtype != x.dtype:
        return (F.rms_norm(x.float(), (x.shape[-1],), None, epsilon) * weight).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, (x.shape[-1],), weight, epsilon)
    return F.rms_norm(x, (x.shape[-1],), None, epsilon) * weight
