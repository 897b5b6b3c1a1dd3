"""The gated MLP of one layer."""

from __future__ import annotations

from torch import Tensor

from spd.runtime.layers.linear import AnyLinear
from spd.runtime.models.base import ForwardBatch, Residual


class GatedMlp:
    """stream + down(silu(gate(norm(stream))) * up(norm(stream))), gate and up fused into one matrix."""

    def __init__(self, norm: Tensor, gate_up: AnyLinear, down: AnyLinear, epsilon: float) -> None:
        self.norm, self.gate_up, self.down, self.epsilon = norm, gate_up, down, epsilon

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, hidden] with this block added."""
        return self.down.onto(self.gate_up.gated(stream, self.norm, self.epsilon, batch), stream, batch)

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run."""
        return self.gate_up, self.down
