"""Operations on rows of the residual stream between products: embedding, last norm, norm after a
block.

Each returns the stream's `squares` float32 [T, P], see `skinny_linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.linear.norm_gate import rms_norm
from spd.kernels.linear.tiled_weight import TiledWeight


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of each row's squares, float32 [T, 1]."""
    return x.float().square().sum(dim=-1, keepdim=True)


def embed(token_ids: Tensor, table: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `Kernels.embed` by torch."""
    x = table[token_ids]
    if scale is not None:
        x = x * scale
    return x, sum_of_squares(x)


def code_rows(token_ids: Tensor, table: TiledWeight, dtype: torch.dtype) -> Tensor:
    """Compute `Kernels.code_rows` by torch."""
    return table.plain(dtype)[token_ids]


def rms_norm_rows(x: Tensor, squares: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Compute `Kernels.rms_norm_rows` by torch."""
    if squares is None:
        return rms_norm(x, weight, epsilon)
    scale = torch.rsqrt(squares.sum(dim=-1, keepdim=True) / x.shape[1] + epsilon)
    return (x.float() * scale * weight.float()).to(x.dtype)


def norm_residual(
    y: Tensor, weight: Tensor, epsilon: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `Kernels.norm_residual` by torch."""
    value = y.float()
    scale = torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + epsilon)
    x = (residual.float() + value * scale * weight.float()).to(residual.dtype)
    return x, sum_of_squares(x)
