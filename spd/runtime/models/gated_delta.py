"""Recurrent blocks: gated DeltaNet and Mamba-2 with a state, and short convolutions of cached
inputs.
"""

from __future__ import annotations

import torch

from spd.formats.block_config import DeltaConfig
from spd.kernels.recurrent.delta_rule import DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.builder import LayerBuilder, reorder_heads
from spd.runtime.models.recurrent_layouts import ConvLayout, DeltaLayout, ScanLayout


class GatedDelta:
    """One layer's recurrence over a state for each slot, float32 whatever the dtype of weights."""

    def __init__(self, layout: DeltaLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        self.layout = layout
        self.kernels = build.kernels
        if layout.delta.interleaved:
            order, gates = _order_by_kind(layout.delta)
            build.reorder(tensors, "inputs", order)
            build.reorder(tensors, "gates", gates)
        elif isinstance(layout, ScanLayout):
            order, channels = _order_by_use(layout)
            build.reorder(tensors, "inputs", order)
            for name in ("conv", "conv_bias"):
                if name in tensors:
                    reorder_heads(tensors[name], channels)
        self.inputs = build.normed_projection(tensors, "inputs")
        self.gates = build.normed_projection(tensors, "gates") if "gates" in tensors else None
        self.output = build.output_projection(tensors, "output")
        self.taps = tensors["conv"].squeeze(1).t().contiguous()
        self.bias = tensors.get("conv_bias")
        self.rule = DeltaRule(tensors["rate"], tensors["step_bias"], layout.delta.uses_delta_rule)
        self.norm = tensors["head_norm"]
        self.skip = tensors.get("skip")
        if not layout.delta.uses_delta_rule:  # a norm a group
            self.norm = self.norm.view(layout.delta.key_heads, -1)

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """Return the stream [T, hidden] with this block added.

        Writes the slots' rings and states.
        """
        assert batch.segments is not None
        ring, *memory = cache.pools
        mixed = self.inputs(stream, batch)
        delta = self.layout.delta
        values = delta.value_heads * delta.value_dim
        end = self.layout.channels + values
        gates = mixed[:, end:] if self.gates is None else self.gates(stream, batch)
        output_gates = mixed[:, end - values : end]
        mixed = mixed[:, : end - values]
        convolved = self.kernels.short_conv(
            x=mixed, weight=self.taps, bias=self.bias, ring=ring, rows=batch.segments
        )
        apply = self.kernels.delta_rule if batch.chunk_start is None else self.kernels.delta_chunks
        read = apply(convolved, gates, self.rule, DeltaMemory(*memory), batch.segments)
        if self.skip is not None:
            read = read + convolved[:, -values:].view(read.shape) * self.skip[:, None]
            read = read.view(len(read), *self.norm.shape)
        gated = self.kernels.gated_norm(
            x=read,
            gate=output_gates,
            weight=self.norm,
            epsilon=self.layout.epsilon,
            gate_first=not delta.uses_delta_rule,
        )
        return self.output(gated, batch, stream)

    def apply_rings(self, cache: LayerCache, segments: Segments) -> None:
        """Fold the tokens of the rings into the states, before a segment of one placeholder row of
        zeros.
        """
        ring, *memory = cache.pools
        mixed = memory[0].new_zeros(1, self.layout.channels)
        gates = ring.new_zeros(1, (1 + self.rule.corrects) * self.layout.delta.value_heads)
        self.kernels.delta_rule(mixed, gates, self.rule, DeltaMemory(*memory), segments)


class ShortConv:
    """One layer's convolution over the inputs of a slot, whose latest are in a ring."""

    def __init__(self, layout: ConvLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        self.inputs = build.normed_projection(tensors, "inputs")
        self.output = build.output_projection(tensors, "output")
        self.taps = tensors["conv"].squeeze(1).t().contiguous()
        self.kernels = build.kernels

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """Return the stream [T, hidden] with this block added; writes the slots' rings."""
        assert batch.segments is not None
        gate_before, gate_after, x = self.inputs(stream, batch).chunk(3, 1)
        (ring,) = cache.pools
        mixed = self.kernels.short_conv(
            x=gate_before * x,
            weight=self.taps,
            bias=None,
            ring=ring,
            rows=batch.segments,
            silu=False,
        )
        return self.output((gate_after * mixed).to(x.dtype), batch, stream)


def _order_by_use(layout: ScanLayout) -> tuple[list[int], list[int]]:
    """Return the stored index of each row (queries, keys, values, output gates, steps) and of each
    channel.
    """
    gates, values, keys, queries, steps = layout.stored_rows
    channels = [
        *range(values + keys, values + keys + queries),
        *range(values, values + keys),
        *range(values),
    ]
    step_rows = range(gates + len(channels), gates + len(channels) + steps)
    return [*(gates + row for row in channels), *range(gates), *step_rows], channels


def _order_by_kind(delta: DeltaConfig) -> tuple[list[int], list[int]]:
    """Return the stored index of each row of both projections, which are stored key head by key
    head.

    In the new order the first has queries, keys, values and output gates, the second corrections
    and steps.
    """
    group = delta.value_heads // delta.key_heads
    values = group * delta.value_dim

    def order_rows(*widths: int) -> list[int]:
        by_head = torch.arange(delta.key_heads * sum(widths)).view(delta.key_heads, -1)
        return torch.cat(
            [kind.flatten() for kind in torch.split(by_head, list(widths), 1)]
        ).tolist()

    return order_rows(delta.key_dim, delta.key_dim, values, values), order_rows(group, group)
