"""The gated MLP of one layer."""

from __future__ import annotations

from torch import Tensor

from spd.runtime.layers.linear import AnyLinear
from spd.runtime.models.base import ForwardBatch, Residual


class GatedMlp:
    """stream + down(act(gate(norm(stream))) * up(norm(stream))), gate and up fused into one matrix.

    act is silu, or gelu. With a post_norm that of the block is added.
    """

    def __init__(
        self,
        norm: Tensor,
        gate_up: AnyLinear,
        down: AnyLinear,
        epsilon: float,
        *,
        gelu: bool = False,
        post_norm: Tensor | None = None,
    ) -> None:
        self.norm, self.gate_up, self.down, self.epsilon = norm, gate_up, down, epsilon
        self.gelu, self.post_norm = gelu, post_norm

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, hidden] with this block added."""
        inner = self.gate_up.gated(stream, self.norm, self.epsilon, batch, gelu=self.gelu)
        if self.post_norm is not None:
            return self.down.normed_onto(inner, stream, self.post_norm, self.epsilon, batch)
        return self.down.onto(inner, stream, batch)

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run."""
        return self.gate_up, self.down
