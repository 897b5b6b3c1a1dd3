"""The gated MLP of one layer."""

from __future__ import annotations

from torch import Tensor

from spd.kernels.silu_mul import silu_mul
from spd.runtime.layers.linear import Linear


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up fused into one matrix."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor, tile: int) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        return self.down(silu_mul(self.gate_up(x, tile)), tile)
