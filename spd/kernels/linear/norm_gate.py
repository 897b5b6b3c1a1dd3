"""The root-mean-square norm of a row, and the activations of MLPs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.activation import Activation

GELU_SCALE = 0.7978845608028654
"""The square root of 2 / pi."""
GELU_CUBE_FACTOR = 0.044715
"""The factor of the cube in gelu's tanh approximation."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x**2) + epsilon) * weight, row by row.

    x [..., D]; weight [D] or, with a scale for each head, [heads, D] against x [..., heads, D].
    Computed in float32, returned in x's dtype; float32 weights are multiplied before x is rounded.
    Source: Zhang & Sennrich 2019.
    """
    if weight.dtype != x.dtype:
        return (F.rms_norm(x.float(), (x.shape[-1],), None, epsilon) * weight).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, (x.shape[-1],), weight, epsilon)
    return F.rms_norm(x, (x.shape[-1],), None, epsilon) * weight


def activate(x: Tensor, act: Activation) -> Tensor:
    """Apply an activation to rows [T, 2 * I], gates first, or [T, I] without: [T, I] in x's dtype.

    gelu is computed in float32 and rounded once (source: Hendrycks & Gimpel 2016). It is spelled
    out here because torch's gelu rounds vector bodies and scalar tails differently.
    """
    if not act.gated:
        return x.relu().square()
    gate, up = x.chunk(2, dim=-1)
    if act.kind == "gelu":
        gate = gate.float()
        up = up.float()
        tanh_input = (gate + gate * gate * gate * GELU_CUBE_FACTOR) * GELU_SCALE
        return (gate * 0.5 * (tanh_input.tanh() + 1) * up).to(x.dtype)
    if (limit := act.limit) is None:
        return F.silu(gate) * up
    up = up.clamp(-limit, limit)
    if act.kind == "silu":
        return F.silu(gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    return (up + 1) * (gate * (gate * act.alpha).sigmoid())
