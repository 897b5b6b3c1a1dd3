"""The descriptions of recurrent blocks, whose state of a slot has a fixed size. No torch here.

See `layouts` for the other blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from spd.formats.block_config import DeltaConfig
from spd.runtime.models.parameters import (
    UNSHARDED,
    ParameterSpec,
    Rows,
    Shape,
    Shard,
    fused_parameters,
)


@dataclass(frozen=True)
class DeltaLayout:
    """A gated DeltaNet: queries, keys, values and output gates; corrections and steps of each head.

    A slot has a state, and rings of its last rows, whatever the length of its text. `ScanLayout`, of
    Mamba-2, is made of it.
    """

    hidden_size: int
    delta: DeltaConfig
    epsilon: float
    """The epsilon of the output's norm; the stream's scale does not reach it."""
    pre_norm: str = "input_layernorm"
    shard: Shard = UNSHARDED
    cache: ClassVar[tuple[Shape, ...]] = ()
    """The entries of a position in pages: none."""

    def sharded(self, shard: Shard) -> DeltaLayout:
        """Return the layout of a rank's key heads, and of the value heads that read them.

        Value heads are a multiple of key heads, as the configuration's reader checks. Raises
        IncompatibleError where the key heads cannot be divided.
        """
        keys = shard.count_per_rank(self.delta.key_heads, "key heads of recurrent layers")
        part = replace(self.delta, key_heads=keys, value_heads=self.delta.value_heads // shard.size)
        return replace(self, delta=part, shard=shard)

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the elements of all keys (queries have as many), and of all values."""
        return (
            self.delta.key_heads * self.delta.key_dim,
            self.delta.value_heads * self.delta.value_dim,
        )

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: queries, keys and values."""
        keys, values = self.sizes
        return 2 * keys + values

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by the names that `GatedDelta` reads."""
        delta = self.delta
        hidden = self.hidden_size
        values = self.sizes[1]
        block, convolved, inputs, gates = self._projection_rows
        heads = self.shard.rows(delta.value_heads)
        float32: dict[str, tuple[str, Rows, Shape]] = {
            "conv": ("conv1d.weight", convolved, (1, delta.kernel)),
            "rate": ("A_log", heads, ()),
            "step_bias": ("dt_bias", heads, ()),
            "head_norm": ("norm.weight", UNSHARDED.rows(delta.value_dim), ()),
        }
        if not delta.uses_delta_rule:
            float32 |= {
                "skip": ("D", heads, ()),
                "head_norm": ("norm.weight", self.shard.rows(values), ()),
            }
        if delta.conv_bias:
            float32["conv_bias"] = ("conv1d.bias", convolved, ())
        return {
            "norm": ParameterSpec.from_shapes(
                {f"{self.pre_norm}.weight": (hidden,)}, is_float32=True
            ),
            **fused_parameters("inputs", block, inputs, hidden),
            **(fused_parameters("gates", block, gates, hidden) if gates else {}),
            **{
                key: ParameterSpec.from_shapes(
                    {f"{block}.{name}": (rows.num_rows, *columns)}, is_float32=True, cut=rows.cut
                )
                for key, (name, rows, columns) in float32.items()
            },
            **fused_parameters(
                "output", block, {"out_proj": hidden}, values, cut=self.shard.columns(values)
            ),
        }

    @property
    def _projection_rows(self) -> tuple[str, Rows, dict[str, Rows], dict[str, Rows]]:
        """Return the prefix of names, the rows of the convolution, and of input and gate
        projections.
        """
        keys, values = self.sizes
        heads = self.delta.value_heads
        rows = self.shard.rows
        convolved = rows(keys, keys, values)
        inputs = {"in_proj_qkvz": rows(self.channels + values)}
        if self.delta.interleaved:  # stored key head by key head
            return "linear_attn", convolved, inputs, {"in_proj_ba": rows(2 * heads)}
        inputs = {"in_proj_qkv": convolved, "in_proj_z": rows(values)}
        return (
            "linear_attn",
            convolved,
            inputs,
            dict.fromkeys(("in_proj_b", "in_proj_a"), rows(heads)),
        )

    @property
    def kernel(self) -> int:
        """Return the number of inputs that the convolution reads."""
        return self.delta.kernel

    @property
    def state_shape(self) -> Shape:
        """Return the shape of a slot's state, which is float32."""
        return self.delta.value_heads, self.delta.key_dim, self.delta.value_dim

    def slot_shapes(self, depth: int) -> tuple[tuple[Shape, bool], ...]:
        """Return the shapes of a slot's memory (`DeltaMemory`), and whether each is float32."""
        delta = self.delta
        return (
            ((depth, self.channels), False),  # inputs of the convolution
            (self.state_shape, True),
            ((depth, delta.key_heads, delta.key_dim), True),  # rings: keys,
            ((depth, delta.value_heads, delta.value_dim), True),  # updates,
            ((depth, delta.value_heads, 2), True),  # decay and factor of the key
        )

    @property
    def widest(self) -> int:
        """Return the elements of a row of the intermediate results, some of them in float32."""
        return 3 * self.channels + 4 * self.sizes[1]


@dataclass(frozen=True)
class ScanLayout(DeltaLayout):
    """Mamba-2: value heads share keys and queries by groups, whose outputs have a joint norm."""

    @property
    def stored_rows(self) -> tuple[int, ...]:
        """Return the rows of output gates, values, keys, queries and steps, in the checkpoint's
        order.
        """
        keys, values = self.sizes
        return values, values, keys, keys, self.delta.value_heads

    @property
    def _projection_rows(self) -> tuple[str, Rows, dict[str, Rows], dict[str, Rows]]:
        convolved = self.shard.rows(*self.stored_rows[1:4])
        return "mamba", convolved, {"in_proj": self.shard.rows(*self.stored_rows)}, {}


@dataclass(frozen=True)
class ConvLayout:
    """A short convolution between two gates; a slot has a ring of its latest inputs."""

    hidden_size: int
    kernel: int
    """The number of inputs that the convolution reads."""
    channels: int
    shard: Shard = UNSHARDED
    """The rank that has these channels."""
    cache: ClassVar[tuple[Shape, ...]] = ()
    """The entries of a position in pages: none."""
    state_shape: ClassVar[Shape] = (0,)
    """The shape of a slot's state: there is none."""

    def sharded(self, shard: Shard) -> ConvLayout:
        """Return the layout of a rank's channels; ranks sum the results of their output columns."""
        return replace(
            self,
            channels=shard.count_per_rank(self.channels, "channels of convolutions"),
            shard=shard,
        )

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by the names that `ShortConv` reads."""
        hidden = self.hidden_size
        channels = self.channels
        block = "conv"
        shard = self.shard
        taps = {f"{block}.conv.weight": (channels, 1, self.kernel)}
        return {
            "norm": ParameterSpec.from_shapes({"input_layernorm.weight": (hidden,)}),
            **fused_parameters(
                "inputs", block, {"in_proj": shard.rows(channels, channels, channels)}, hidden
            ),
            "conv": ParameterSpec.from_shapes(taps, is_float32=True, cut=shard.rows(channels).cut),
            **fused_parameters(
                "output", block, {"out_proj": hidden}, channels, cut=shard.columns(channels)
            ),
        }

    def slot_shapes(self, depth: int) -> tuple[tuple[Shape, bool], ...]:
        """Return the shapes of a slot's memory, and whether each is float32: see `short_conv`."""
        return (((depth, self.channels), False),)

    @property
    def widest(self) -> int:
        """Return the elements of a row of the intermediate results, one of them in float32."""
        return 6 * self.channels
