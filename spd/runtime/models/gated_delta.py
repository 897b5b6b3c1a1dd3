"""A gated DeltaNet layer: norm, project, convolve, correct and read the state, gate, project back."""

from __future__ import annotations

from spd.formats.block_config import DeltaConfig
from spd.kernels.recurrent.delta_rule import DeltaMemory
from spd.kernels.recurrent.short_conv import Segments
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual
from spd.runtime.layers.linear import AnyLinear
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.recurrent_layouts import DeltaLayout


class GatedDelta:
    """One layer's recurrence over a state a slot, float32 whatever the weights are."""

    def __init__(self, layout: DeltaLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.layout, self.kernels, self.epsilon = layout, build.kernels, build.epsilon
        if layout.delta.interleaved:
            order, gates = _by_kind(layout.delta)
            build.reorder(tensors, "inputs", order)
            build.reorder(tensors, "gates", gates)
        self.inputs, self.gates = build.after_norm(tensors, "inputs"), build.after_norm(tensors, "gates")
        self.output = build.summed(tensors, "output")
        self.taps = tensors["conv"].squeeze(1).t().contiguous()
        self.rate, self.step_bias, self.norm = tensors["rate"], tensors["step_bias"], tensors["head_norm"]

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The stream [T, hidden] with this block added; writes the slots' rings and states."""
        assert batch.segments is not None
        ring, *memory = cache.pools
        channels = self.layout.channels
        mixed, gates = self.inputs(stream, batch).x, self.gates(stream, batch).x
        convolved = self.kernels.short_conv(mixed[:, :channels], self.taps, None, ring, batch.segments)
        rule = self.kernels.delta_rule if batch.chunk_start is None else self.kernels.delta_chunks
        read = rule(convolved, gates, self.rate, self.step_bias, DeltaMemory(*memory), batch.segments)
        opened = self.kernels.gated_norm(read, mixed[:, channels:], self.norm, self.epsilon)
        return self.output(Residual(opened), batch, stream)

    def settle(self, cache: LayerCache, segments: Segments) -> None:
        """Apply what the rings hold before a segment of one row, of which nothing is known or stays."""
        ring, *memory = cache.pools
        mixed = memory[0].new_zeros(1, self.layout.channels)
        gates = ring.new_zeros(1, 2 * self.layout.delta.value_heads)
        self.kernels.delta_rule(mixed, gates, self.rate, self.step_bias, DeltaMemory(*memory), segments)

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run."""
        return self.inputs, self.gates, self.output


def _by_kind(delta: DeltaConfig) -> tuple[list[int], list[int]]:
    """The old index of each row of both projections: all queries, keys, values, gates of the output.

    And all corrections, then steps. They were stored key head by key head.
    """
    group = delta.value_heads // delta.key_heads
    values = group * delta.value_dim

    def gathered(*widths: int) -> list[int]:
        starts = [sum(widths[:i]) for i in range(len(widths))]
        return [
            head * sum(widths) + start + row
            for start, width in zip(starts, widths, strict=True)
            for head in range(delta.key_heads)
            for row in range(width)
        ]

    return gathered(delta.key_dim, delta.key_dim, values, values), gathered(group, group)
