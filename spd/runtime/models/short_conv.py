"""A short convolution layer: norm, project, gate, convolve, gate, project back."""

from __future__ import annotations

from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.builder import LayerBuilder, Tensors
from spd.runtime.models.recurrent_layouts import ConvLayout


class ShortConv:
    """One layer's convolution over its inputs of a slot: what came before a pass stands in a ring."""

    def __init__(self, layout: ConvLayout, tensors: Tensors, build: LayerBuilder) -> None:
        self.inputs, self.output = build.after_norm(tensors, "inputs"), build.summed(tensors, "output")
        self.taps, self.kernels = tensors["conv"].squeeze(1).t().contiguous(), build.kernels

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """The stream [T, hidden] with this block added; writes the slots' rings."""
        assert batch.segments is not None
        before, behind, x = self.inputs(stream, batch).x.chunk(3, 1)
        mixed = self.kernels.short_conv(before * x, self.taps, None, *cache.pools, batch.segments, silu=False)
        return self.output(Residual((behind * mixed).to(x.dtype)), batch, stream)
