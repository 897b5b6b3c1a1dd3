"""What is done to rows of the residual stream between products: embedding, last norm, norm behind a block.

Each returns what travels with the stream, see `skinny_linear`: `squares` float32 [T, P].
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_of_squares(x: Tensor) -> Tensor:
    """float32 [T, 1]."""
    return x.float().square().sum(dim=-1, keepdim=True)


def embed(token_ids: Tensor, table: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Rows of table [V, H] for token_ids int64 [T], times scale: (x [T, H], squares [T, P]).

    Ids lie in [0, V); x is rounded once.
    """
    x = table[token_ids]
    if scale is not None:
        x = x * scale
    return x, sum_of_squares(x)


def rms_norm_rows(x: Tensor, squares: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [T, K] * rsqrt(sum(squares) / K + epsilon) * weight [K], in float32 and rounded once: [T, K]."""
    scale = torch.rsqrt(squares.sum(dim=-1, keepdim=True) / x.shape[1] + epsilon)
    return (x.float() * scale * weight.float()).to(x.dtype)


def norm_residual(
    y: Tensor, weight: Tensor, epsilon: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """residual [T, N] + the root-mean-square norm of y [T, N] with scales weight [N]: a new stream.

    In float32, rounded once; returned with its squares [T, P].
    Source: Zhang & Sennrich 2019.
    """
    value = y.float()
    scale = torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + epsilon)
    x = (residual.float() + value * scale * weight.float()).to(residual.dtype)
    return x, sum_of_squares(x)
