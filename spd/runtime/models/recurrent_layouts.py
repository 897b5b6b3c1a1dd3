"""The blocks of a layer that keep, of each slot, what does not grow with its text. No torch here.

See `layouts` for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from spd.formats.block_config import DeltaConfig
from spd.runtime.models.destinations import WHOLE, Destination, Rows, Shape, Shard, fused


@dataclass(frozen=True)
class DeltaLayout:
    """A gated DeltaNet: queries, keys, values and what gates the output; corrections and steps of each head.

    What is kept of a slot does not grow with its text: a state, and rings of `depth` of its last rows.
    """

    hidden_size: int
    delta: DeltaConfig
    epsilon: float  # of the norm of the output, which sees no scale of the stream
    pre_norm: str = "input_layernorm"
    shard: Shard = WHOLE
    cache: ClassVar[tuple[Shape, ...]] = ()  # what one position holds in pages: nothing

    def sharded(self, shard: Shard) -> DeltaLayout:
        """A rank's key heads, and the value heads that read them. The output makes a part of the sum."""
        keys = shard.share(self.delta.key_heads, "key heads of recurrent layers")
        part = replace(self.delta, key_heads=keys, value_heads=self.delta.value_heads // shard.size)
        return replace(self, delta=part, shard=shard)

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of all keys, which queries have too, and of all values."""
        return (
            self.delta.key_heads * self.delta.key_dim,
            self.delta.value_heads * self.delta.value_dim,
        )

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        keys, values = self.sizes
        return 2 * keys + values

    def destinations(self) -> dict[str, Destination]:
        delta = self.delta
        hidden = self.hidden_size
        values = self.sizes[1]
        block, convolved, inputs, gates = self._products
        heads = self.shard.rows(delta.value_heads)
        exact: dict[str, tuple[str, Rows, Shape]] = {
            "conv": ("conv1d.weight", convolved, (1, delta.kernel)),
            "rate": ("A_log", heads, ()),
            "step_bias": ("dt_bias", heads, ()),
            "head_norm": ("norm.weight", WHOLE.rows(delta.value_dim), ()),
        }
        if not delta.uses_delta_rule:
            exact |= {
                "skip": ("D", heads, ()),
                "head_norm": ("norm.weight", self.shard.rows(values), ()),
            }
        if delta.conv_bias:
            exact["conv_bias"] = ("conv1d.bias", convolved, ())
        return {
            "norm": Destination.of({f"{self.pre_norm}.weight": (hidden,)}, exact=True),
            **fused("inputs", block, inputs, hidden),
            **(fused("gates", block, gates, hidden) if gates else {}),
            **{
                key: Destination.of(
                    {f"{block}.{name}": (rows.taken, *rest)}, exact=True, cut=rows.cut
                )
                for key, (name, rows, rest) in exact.items()
            },
            **fused("output", block, {"out_proj": hidden}, values, cut=self.shard.columns(values)),
        }

    @property
    def _products(self) -> tuple[str, Rows, dict[str, Rows], dict[str, Rows]]:
        """What stands before the names, rows of what is convolved, of what makes inputs, and gates."""
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
        """Inputs that the convolution sees."""
        return self.delta.kernel

    @property
    def state_shape(self) -> Shape:
        """Of one slot's state, float32."""
        return self.delta.value_heads, self.delta.key_dim, self.delta.value_dim

    def slot_shapes(self, depth: int) -> tuple[tuple[Shape, bool], ...]:
        """What is kept of a slot, and whether it is float32: see `short_conv` and `DeltaMemory`."""
        delta = self.delta
        return (
            ((depth, self.channels), False),
            (self.state_shape, True),
            ((depth, delta.key_heads, delta.key_dim), True),
            ((depth, delta.value_heads, delta.value_dim), True),
            ((depth, delta.value_heads, 2), True),
        )

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results, some of them in float32."""
        return 3 * self.channels + 4 * self.sizes[1]


@dataclass(frozen=True)
class ScanLayout(DeltaLayout):
    """Mamba-2: heads of values share keys and queries by groups, whose outputs are normalised together."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of what gates the output, of values, keys, queries, and of steps, as they are stored."""
        keys, values = self.sizes
        return values, values, keys, keys, self.delta.value_heads

    @property
    def _products(self) -> tuple[str, Rows, dict[str, Rows], dict[str, Rows]]:
        convolved = self.shard.rows(*self.parts[1:4])
        return "mamba", convolved, {"in_proj": self.shard.rows(*self.parts)}, {}


@dataclass(frozen=True)
class ConvLayout:
    """A short convolution between two gates: what is kept of a slot is a ring of its latest inputs."""

    hidden_size: int
    kernel: int  # inputs that the convolution sees
    channels: int
    shard: Shard = WHOLE  # the rank that has these channels
    cache: ClassVar[tuple[Shape, ...]] = ()  # what one position holds in pages: nothing
    state_shape: ClassVar[Shape] = (0,)  # of one slot's state: there is none

    def sharded(self, shard: Shard) -> ConvLayout:
        """A rank's channels. The output makes a part of the sum."""
        return replace(
            self, channels=shard.share(self.channels, "channels of convolutions"), shard=shard
        )

    def destinations(self) -> dict[str, Destination]:
        hidden = self.hidden_size
        own = self.channels
        block = "conv"
        shard = self.shard
        taps = {f"{block}.conv.weight": (own, 1, self.kernel)}
        return {
            "norm": Destination.of({"input_layernorm.weight": (hidden,)}),
            **fused("inputs", block, {"in_proj": shard.rows(own, own, own)}, hidden),
            "conv": Destination.of(taps, exact=True, cut=shard.rows(own).cut),
            **fused("output", block, {"out_proj": hidden}, own, cut=shard.columns(own)),
        }

    def slot_shapes(self, depth: int) -> tuple[tuple[Shape, bool], ...]:
        """What is kept of a slot, and whether it is float32: see `short_conv`."""
        return (((depth, self.channels), False),)

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results, one of them in float32."""
        return 6 * self.channels
