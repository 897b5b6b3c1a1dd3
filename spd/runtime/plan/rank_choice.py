"""How many ranks hold the target and the drafter: checked, or chosen by a cost model. No torch here.

What ranks exchange is counted exactly, and a test holds the counts against those of real runs; times are a
model's, from the constants of a machine and a link, not measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from spd.errors import IncompatibleError, UsageError
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpSource
from spd.runtime.models import family_layout
from spd.runtime.models.destinations import Shard
from spd.runtime.models.layouts import LayerLayout, MoeLayout
from spd.runtime.models.mtp_weights import module_layer
from spd.runtime.models.weight_form import DTYPE_BYTES
from spd.runtime.models.weights import streamed_tables
from spd.runtime.plan.config import EngineConfig

MOST_RANKS = 64
CHOICE_BYTES = 12
"""What a rank says of its best token of a row: its score, its logit and its id, four bytes each."""
Exchange = list[int]
"""Of each all-gather the bytes of one rank's part: with N ranks each receives N - 1 times as many."""


def pass_exchange(layers: int, hidden: int, rows: int, width: int) -> Exchange:
    """A forward pass over rows of `hidden` elements of `width` bytes: the embedding, two sums a layer."""
    return [rows * hidden * width] * (2 * layers + 1)


def draw_exchange(rows: int) -> Exchange:
    """The draw of a token in each row where nothing but the temperature matters."""
    return [rows * CHOICE_BYTES]


@dataclass(frozen=True)
class Speeds:
    """Bytes a rank reads a second; seconds before a collective's first byte, and its bytes a second."""

    read_rate: float
    latency: float
    rate: float
    shared: bool = False
    """Whether ranks read through one memory."""

    def seconds(self, nbytes: float, group: int, ranks: int, exchange: Exchange) -> float:
        """A pass of a model of `nbytes`, divided among each group of ranks."""
        reading = nbytes / group * (ranks if self.shared else 1) / self.read_rate
        if group == 1:
            return reading
        return reading + (len(exchange) * self.latency + sum(exchange) * (group - 1) / self.rate)


PCIE = Speeds(0.8 * 3.35e12, 25e-6, 40e9)
"""Reading: 0.8 of the 3.35 TB/s of an H100 SXM's data sheet. The latency is assumed; the rate is 0.8 of the
50 GB/s of PCIe 5.0 x16 after its protocol."""
LOOPBACK = Speeds(20e9, 300e-6, 2e9, shared=True)
"""Ranks on one desktop: assumed."""


def draft_seconds(
    speeds: Speeds, config: ModelConfig, width: int, group: int, ranks: int, module: LayerLayout | None = None
) -> float:
    """One draft token for one request, in elements of `width` bytes; module: see `streamed_bytes`."""
    layers = config.num_layers if module is None else 1
    exchange = pass_exchange(layers, config.hidden_size, 1, width) + draw_exchange(1)
    return speeds.seconds(streamed_bytes(config, width, module), group, ranks, exchange)


def streamed_bytes(config: ModelConfig, width: int, module: LayerLayout | None = None) -> float:
    """Weights that a pass over one row reads: all but the embedding's table and the experts not chosen.

    module: the one layer of an MTP head that drafts for this model; a projection stands before it.
    """
    layout, hidden = family_layout(config), config.hidden_size
    around = streamed_tables(config, layout)[0].size + (0 if module is None else 2 * hidden * hidden)
    total = 0.0
    for layer in layout.layers if module is None else (module,):
        own = float(sum(destination.size for destination in layer.destinations()))
        if isinstance(layer.mlp, MoeLayout):
            routed, experts = layer.mlp.destinations(), layer.mlp.experts
            every = routed["experts_gate_up"].size + routed["experts_down"].size
            own -= every * (1 - experts.router.per_token / experts.num_experts)
        total += own * width
    return around * width + total


def divide(
    wishes: EngineConfig,
    model: ModelConfig,
    draft: ModelConfig | None,
    mtp: MtpSource | None,
    dtype: str,
    device: str,
) -> tuple[int, str]:
    """Ranks of each group that runs the drafter, of those that share the target, and why so many.

    Raises IncompatibleError where a model cannot be divided so, UsageError where nothing is to be divided.
    """
    tp, draft_tp = wishes.tp, wishes.draft_tp
    if tp == 1:
        return 1, "one rank"
    _check("--tp", tp, model, "the target")
    drafter = draft if mtp is None else mtp.config
    if drafter is None:
        if draft_tp is not None:
            raise UsageError(
                f"--draft-tp {draft_tp} says how many ranks share a drafter, and here no model drafts",
                fix=["leave --draft-tp out", "--spec draft --draft-model FOLDER"],
            )
        return 1, "nothing drafts with a model"
    if draft_tp is not None:
        _check("--draft-tp", draft_tp, drafter, "the drafter")
        return draft_tp, "asked for"
    module = None if mtp is None else module_layer(drafter, mtp.layout.family)
    speeds, width = LOOPBACK if device == "cpu" else PCIE, DTYPE_BYTES[dtype]
    sizes = possible_sizes(drafter, (n for n in range(1, tp + 1) if tp % n == 0))
    times = {n: 1000 * draft_seconds(speeds, drafter, width, n, tp, module) for n in sizes}
    best = min(times, key=lambda group: (times[group], group))
    others = ", ".join(f"{ms:.2f} at {group}" for group, ms in times.items() if group != best)
    others = others or "no other size divides it"
    return best, f"{times[best]:.2f} ms a draft token by the cost model; {others}"


def possible_sizes(config: ModelConfig, sizes: Iterable[int]) -> list[int]:
    """Those numbers of ranks among which a model can be divided."""
    layout, found = family_layout(config), []
    ids = streamed_tables(config, layout)[0].shape[0]  # that logits are made for
    for size in sizes:
        with suppress(IncompatibleError):
            if size > 1:
                Shard(0, size).ids(ids)
                for kind in set(layout.layers):
                    kind.sharded(Shard(0, size))
            found.append(size)
    return found


def _check(flag: str, ranks: int, config: ModelConfig, what: str) -> None:
    possible = possible_sizes(config, range(1, MOST_RANKS + 1))
    if ranks in possible:
        return
    reason = f"{config.num_heads} heads"
    if config.latent is None:
        reason += f", {config.num_kv_heads} of keys and values"
    if config.delta is not None:
        reason += f", {config.delta.value_heads} recurrent value heads"
    inner = [config.intermediate_size, *([config.experts.intermediate_size] if config.experts else [])]
    raise IncompatibleError(
        f"{flag} {ranks} does not divide {what}",
        reason=[f"{reason}, MLPs {' and '.join(f'{size:,}' for size in inner)} wide"],
        fix=[f"{flag} {n}" for n in possible[:6]],
        code="tensor_parallel",
    )
