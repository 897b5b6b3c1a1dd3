"""What ranks exchange a round, and what that and the reading of weights take: a model, not a measurement.

The counts are exact, and a test holds them against those of real runs; times come from the constants of a
machine and a link. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spd.errors import IncompatibleError
from spd.formats.model_config import ModelConfig
from spd.runtime.models import family_layout
from spd.runtime.models.destinations import Shard
from spd.runtime.models.layouts import LayerLayout, MoeLayout
from spd.runtime.models.weights import streamed_tables

CHOICE_BYTES = 12
"""What a rank says of its best token of a row: its score, its logit and its id, four bytes each."""
ID_BYTES = 8


@dataclass(frozen=True)
class Exchange:
    """Collectives, and the bytes that a rank receives through them."""

    collectives: int = 0
    bytes: int = 0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.collectives + other.collectives, self.bytes + other.bytes)

    def times(self, count: int) -> Exchange:
        """The same `count` times over."""
        return Exchange(self.collectives * count, self.bytes * count)


def gathered(ranks: int, part: int) -> Exchange:
    """One all-gather of `part` bytes from each rank; none where there is one rank."""
    return Exchange(1, part * (ranks - 1)) if ranks > 1 else Exchange()


def layers_exchange(layers: int, hidden: int, ranks: int, rows: int, width: int) -> Exchange:
    """The two sums of each layer over `rows` rows of `hidden` elements of `width` bytes."""
    return gathered(ranks, rows * hidden * width).times(2 * layers)


def pass_exchange(config: ModelConfig, ranks: int, rows: int, width: int) -> Exchange:
    """One forward pass of a model: its embedding and every layer."""
    embedded = gathered(ranks, rows * config.hidden_size * width)
    return embedded + layers_exchange(config.num_layers, config.hidden_size, ranks, rows, width)


def draw_exchange(ranks: int, rows: int) -> Exchange:
    """The draw of a token in each row where nothing but the temperature matters."""
    return gathered(ranks, rows * CHOICE_BYTES)


def shared_drafts(ranks: int, group: int, slots: int, drafts: int, rank: int = 1) -> Exchange:
    """Rank 0's drafts, handed to the other groups; rank 0 receives nothing."""
    if group == ranks or not drafts:
        return Exchange()
    return Exchange(1, slots * drafts * ID_BYTES if rank else 0)


@dataclass(frozen=True)
class Link:
    """How ranks are connected: seconds before the first byte of a collective, bytes a second after it."""

    name: str
    latency: float
    rate: float

    def seconds(self, exchange: Exchange) -> float:
        """What an exchange takes."""
        return exchange.collectives * self.latency + exchange.bytes / self.rate


@dataclass(frozen=True)
class Speeds:
    """What each rank reads a second, and the link; `shared`: ranks read through one memory."""

    read_rate: float
    link: Link
    shared: bool = False

    def seconds(self, nbytes: float, group: int, ranks: int, exchange: Exchange) -> float:
        """A pass of a model of `nbytes`, divided among each group of ranks."""
        each = nbytes / group * (ranks if self.shared else 1)
        return each / self.read_rate + self.link.seconds(exchange)


NVLINK = Link("NVLink", 10e-6, 360e9)
PCIE = Link("PCIe", 25e-6, 40e9)
NODES = Link("two nodes", 40e-6, 40e9)
LOOPBACK = Link("loopback", 300e-6, 2e9)
"""Latencies are assumed; rates are 0.8 of one direction of 450 GB/s (NVLink 4), 50 GB/s (PCIe 5.0 x16 after
its protocol) and 50 GB/s (NDR InfiniBand, 400 Gb/s)."""
GPU_READ = 0.8 * 3.35e12
"""Of one H100 SXM: 0.8 of the data sheet's 3.35 TB/s."""
CPU_READ = 20e9
"""Of one desktop's memory: assumed."""


def speeds_of(device: str) -> Speeds:
    """The machine that a plan assumes."""
    return Speeds(CPU_READ, LOOPBACK, shared=True) if device == "cpu" else Speeds(GPU_READ, PCIE)


def streamed_bytes(config: ModelConfig, width: int) -> float:
    """Weights that a pass over one row reads: all but the embedding's table and the experts not chosen."""
    layout = family_layout(config)
    head = streamed_tables(config, layout)[0].size * width
    return head + sum(layer_bytes(layer, width) for layer in layout.layers)


def layer_bytes(layer: LayerLayout, width: int) -> float:
    """Weights of a layer that a pass over one row reads."""
    total = float(sum(destination.size for destination in layer.destinations()))
    if isinstance(layer.mlp, MoeLayout):
        routed = layer.mlp.destinations()
        every = routed["experts_gate_up"].size + routed["experts_down"].size
        experts = layer.mlp.experts
        total -= every * (1 - experts.router.per_token / experts.num_experts)
    return total * width


@dataclass(frozen=True)
class DraftCost:
    """What decides how many ranks should share a drafter: bytes a token and exchanges, by group size."""

    hidden: int
    layers: int
    nbytes: float
    width: int
    embedded: bool = True

    def exchange(self, group: int, rows: int = 1) -> Exchange:
        """What one draft token of `rows` rows exchanges inside a group."""
        found = layers_exchange(self.layers, self.hidden, group, rows, self.width)
        if self.embedded:
            found += gathered(group, rows * self.hidden * self.width)
        return found + draw_exchange(group, rows)

    def seconds(self, speeds: Speeds, group: int, ranks: int) -> float:
        """One draft token, drafted for one request."""
        return speeds.seconds(self.nbytes, group, ranks, self.exchange(group))


def choose_group(cost: DraftCost, speeds: Speeds, ranks: int, possible: Iterable[int]) -> tuple[int, str]:
    """The size of the groups that draft soonest by this model, and why in words."""
    times = {group: 1000 * cost.seconds(speeds, group, ranks) for group in possible}
    best = min(times, key=lambda group: (times[group], group))
    others = ", ".join(f"{ms:.2f} at {group}" for group, ms in times.items() if group != best)
    words = f"{times[best]:.2f} ms a draft token by the cost model"
    return best, f"{words}; {others}" if others else f"{words}; no other size divides it"


def possible_sizes(layers: Iterable[LayerLayout], vocab_size: int, ranks: int) -> list[int]:
    """The divisors of a number of ranks among which a model can be divided."""
    found, kinds = [], set(layers)
    for size in (n for n in range(1, ranks + 1) if ranks % n == 0):
        try:
            if size > 1:
                Shard(0, size).ids(vocab_size)
                for kind in kinds:
                    kind.sharded(Shard(0, size))
        except IncompatibleError:
            continue
        found.append(size)
    return found
