"""Rotary position embedding, NeoX layout (first half against second half)."""

from __future__ import annotations

import torch
from torch import Tensor


def pairs_of(size: int) -> int:
    """How many pairs `size` values of a head are rotated in. Raises ValueError where they are odd."""
    if size % 2:
        raise ValueError(f"{size} values of a head cannot be rotated in pairs")
    return size // 2


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D], D even, by cos and sin [T, 1, D], whose halves repeat each other.

    `sin` carries the sign: its first half is negated, so that the partner is one half-swap away.
    Source: Su et al. 2021, in the half-split form of Hugging Face checkpoints.
    """
    first, second = torch.split(x, pairs_of(x.shape[-1]), dim=-1)
    # Separate roundings: a fused multiply-add rounds otherwise in vector bodies than in scalar tails.
    return x * cos + torch.cat((second, first), dim=-1) * sin
