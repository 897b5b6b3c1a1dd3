"""The root-mean-square norm of a row, and the gates of SwiGLU and GeGLU MLPs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

GELU_SCALE = 0.7978845608028654
"""The square root of 2 / pi."""


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


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate in the first half; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up as `silu_mul`, gelu in its form with tanh, in float32 and rounded once.

    Source: Hendrycks & Gimpel 2016. Written out, for torch's own rounds otherwise in vector bodies than in
    scalar tails.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = (gate + gate * gate * gate * 0.044715) * GELU_SCALE
    return (gate * 0.5 * (inner.tanh() + 1) * up).to(gate_up.dtype)
