"""The norm behind a block and the sum with the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_residual(y: Tensor, weight: Tensor, epsilon: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """residual [T, N] + the root-mean-square norm of y [T, N] with scales weight [N]: a new stream.

    In float32, rounded once; returned with its squares float32 [T, P] as in `spd.kernels.skinny_linear`.
    Source: Zhang & Sennrich 2019.
    """
    value = y.float()
    scale = torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + epsilon)
    x = (residual.float() + value * scale * weight.float()).to(residual.dtype)
    return x, x.float().square().sum(dim=-1, keepdim=True)
