"""The blocks of a layer that keep, of each slot, what does not grow with its text. No torch here.

See `layouts` for the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from spd.formats.block_config import DeltaConfig
from spd.runtime.models.destinations import NOTHING, Cut, Cuts, Destination, Shape, Shard, fused


@dataclass(frozen=True)
class DeltaLayout:
    """A gated DeltaNet: queries, keys, values and what gates the output; corrections and steps of each head.

    What is kept of a slot does not grow with its text: a state, and rings of `depth` of its last rows.
    """

    hidden_size: int
    delta: DeltaConfig
    epsilon: float
    """Of the norm of the output, which sees no scale of the stream."""
    pre_norm: str = "input_layernorm"
    shard: Shard | None = None
    whole: DeltaConfig | None = None
    """Of all ranks, where `delta` is a rank's."""
    cache: ClassVar[tuple[Shape, ...]] = ()
    """What one position holds in pages: nothing."""

    def sharded(self, shard: Shard) -> DeltaLayout:
        """A rank's value heads, in runs that share a key head. The output makes a part of the sum.

        Runs are equally long: a key head whose value heads are more than a run stands on several ranks, or
        several times on one.
        """
        own = shard.share(self.delta.value_heads, "value heads of recurrent layers")
        run = math.gcd(own, self.delta.value_heads // self.delta.key_heads)
        part = replace(self.delta, value_heads=own, key_heads=own // run)
        return replace(self, delta=part, shard=shard, whole=self.delta)

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        delta = self.delta
        return 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim

    def _cuts(self) -> Cuts:
        if self.shard is None or self.whole is None:
            return NOTHING
        own, key, size = self.delta.value_heads, self.delta.key_dim, self.delta.value_dim
        run, group = own // self.delta.key_heads, self.whole.value_heads // self.whole.key_heads
        first, keys = self.shard.rank * own, self.whole.key_heads * key
        runs = [divmod(head, group) for head in range(first, first + own, run)]
        channels = [(of + head * key, of + (head + 1) * key) for of in (0, keys) for head, _ in runs]
        channels.append((2 * keys + first * size, 2 * keys + (first + own) * size))
        heads, inputs, gates = self.shard.rows(own), [], []
        for head, skip in runs:  # what is stored key head by key head, `skip` value heads before the run
            start, behind = 2 * head * (key + group * size), 2 * head * group + skip
            values = start + 2 * key + skip * size
            inputs += [(start, start + 2 * key), (values, values + run * size)]
            inputs.append((values + group * size, values + (group + run) * size))
            gates += [(behind, behind + run), (behind + group, behind + group + run)]
        return {
            "in_proj_qkv": Cut(0, tuple(channels)),
            "conv1d": Cut(0, tuple(channels)),
            "in_proj_z": self.shard.rows(own, size),
            "in_proj_qkvz": Cut(0, tuple(inputs)),
            "in_proj_ba": Cut(0, tuple(gates)),
            **dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), heads),
            "out_proj": self.shard.columns(own * size),
        }

    def destinations(self) -> dict[str, Destination]:
        delta, hidden, cuts = self.delta, self.hidden_size, self._cuts()
        (block, inputs, gates), heads = self._products, (delta.value_heads,)
        exact: dict[str, tuple[str, Shape]] = {
            "conv": ("conv1d.weight", (self.channels, 1, delta.kernel)),
            **{"rate": ("A_log", heads), "step_bias": ("dt_bias", heads)},
            "head_norm": ("norm.weight", (delta.value_dim * (1 if delta.corrects else delta.value_heads),)),
        }
        if not delta.corrects:
            exact["skip"] = ("D", heads)
        if delta.conv_bias:
            exact["conv_bias"] = ("conv1d.bias", (self.channels,))
        return {
            "norm": Destination.of({f"{self.pre_norm}.weight": (hidden,)}, exact=True),
            **fused("inputs", block, inputs, hidden, cuts=cuts),
            **(fused("gates", block, gates, hidden, cuts=cuts) if gates else {}),
            **{
                key: Destination.of({f"{block}.{name}": shape}, exact=True, cut=cuts.get(name.split(".")[0]))
                for key, (name, shape) in exact.items()
            },
            **fused("output", block, {"out_proj": hidden}, delta.value_heads * delta.value_dim, cuts=cuts),
        }

    @property
    def _products(self) -> tuple[str, dict[str, int], dict[str, int]]:
        """What stands before the names, and the rows of the matrices that make inputs, and gates."""
        heads, values = self.delta.value_heads, self.delta.value_heads * self.delta.value_dim
        if self.delta.interleaved:
            return "linear_attn", {"in_proj_qkvz": self.channels + values}, {"in_proj_ba": 2 * heads}
        inputs = {"in_proj_qkv": self.channels, "in_proj_z": values}
        return "linear_attn", inputs, {"in_proj_b": heads, "in_proj_a": heads}

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
        return 3 * self.channels + 4 * self.delta.value_heads * self.delta.value_dim


@dataclass(frozen=True)
class ScanLayout(DeltaLayout):
    """Mamba-2: heads of values share keys and queries by groups, whose outputs are normalised together."""

    def sharded(self, shard: Shard) -> ScanLayout:
        """A rank's groups. The output makes a part of the sum."""
        groups = shard.share(self.delta.key_heads, "groups of recurrent layers")
        part = replace(self.delta, value_heads=self.delta.value_heads // shard.size, key_heads=groups)
        return replace(self, delta=part, shard=shard, whole=self.delta)

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of what gates the output, of values, keys, queries, and of steps, as they are stored."""
        delta = self.delta
        values, keys = delta.value_heads * delta.value_dim, delta.key_heads * delta.key_dim
        return values, values, keys, keys, delta.value_heads

    def _cuts(self) -> Cuts:
        if self.shard is None:
            return NOTHING
        (values, *_, heads), rank, size = self.parts, self.shard.rank, self.shard.size
        begins = [rank * own + sum(self.parts[:i]) * size for i, own in enumerate(self.parts)]
        ranges = [(begin, begin + own) for begin, own in zip(begins, self.parts, strict=True)]
        channels = tuple((start - size * values, end - size * values) for start, end in ranges[1:4])
        return {
            **{"in_proj": Cut(0, tuple(ranges)), "conv1d": Cut(0, channels)},
            **{"norm": self.shard.rows(values), "out_proj": self.shard.columns(values)},
            **dict.fromkeys(("A_log", "dt_bias", "D"), self.shard.rows(heads)),
        }

    @property
    def _products(self) -> tuple[str, dict[str, int], dict[str, int]]:
        return "mamba", {"in_proj": sum(self.parts)}, {}


@dataclass(frozen=True)
class ConvLayout:
    """A short convolution between two gates: what is kept of a slot is a ring of its latest inputs."""

    hidden_size: int
    kernel: int
    """Inputs that the convolution sees."""
    channels: int
    shard: Shard | None = None
    """The rank that has these channels; None: all of them."""
    cache: ClassVar[tuple[Shape, ...]] = ()
    """What one position holds in pages: nothing."""
    state_shape: ClassVar[Shape] = (0,)
    """Of one slot's state: there is none."""

    def sharded(self, shard: Shard) -> ConvLayout:
        """A rank's channels. The output makes a part of the sum."""
        return replace(self, channels=shard.share(self.channels, "channels of convolutions"), shard=shard)

    def destinations(self) -> dict[str, Destination]:
        hidden, own, block, cuts = self.hidden_size, self.channels, "conv", dict[str, Cut]()
        if self.shard is not None:
            rows, columns = self.shard.rows(own), self.shard.columns(own)
            (start, stop), each = rows.ranges[0], (0, hidden, 2 * hidden)
            inputs = Cut(0, tuple((of + start, of + stop) for of in each))
            cuts = {"in_proj": inputs, "conv": rows, "out_proj": columns}
        taps = {f"{block}.conv.weight": (own, 1, self.kernel)}
        return {
            "norm": Destination.of({"input_layernorm.weight": (hidden,)}),
            **fused("inputs", block, {"in_proj": 3 * own}, hidden, cuts=cuts),
            "conv": Destination.of(taps, exact=True, cut=cuts.get("conv")),
            **fused("output", block, {"out_proj": hidden}, own, cuts=cuts),
        }

    def slot_shapes(self, depth: int) -> tuple[tuple[Shape, bool], ...]:
        """What is kept of a slot, and whether it is float32: see `short_conv`."""
        return (((depth, self.channels), False),)

    @property
    def widest(self) -> int:
        """Elements a row of the intermediate results, one of them in float32."""
        return 6 * self.channels
