"""The gated MLP."""

from __future__ import annotations

from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.layouts import MlpLayout


class GatedMlp:
    """stream + down(act(gate_up(norm(stream)))), gate and up fused, or up alone."""

    def __init__(self, layout: MlpLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        self.gate_up = build.normed_projection(tensors, "gate_up", layout.act)
        self.down = build.output_projection(
            tensors, "down", layout.norms.after_epsilon, removes_mean=layout.removes_mean
        )

    def __call__(
        self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None
    ) -> Residual:
        """Return the stream [T, hidden], or `onto`, with this block of the stream added."""
        return self.down(self.gate_up(stream, batch), batch, stream if onto is None else onto)
