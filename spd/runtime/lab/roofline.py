"""The time that reading alone takes: bytes that a forward pass must read over the rate of reading them.

The rate is measured in the same process, since it is not the rate of copies, and differs by machine and load.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from spd.formats.model_config import ModelConfig
from spd.runtime.models.weight_form import WeightForm
from spd.runtime.models.weights import streamed_tables
from spd.runtime.plan.memory import page_bytes, rank_layout, state_bytes
from spd.runtime.round.limits import PAGE_SIZE

READ_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Well beyond the caches of either."""
PASSES = 5


@dataclass(frozen=True)
class Floor:
    """What a pass moves: weights once, states twice (read and written), each position of the context."""

    weight_bytes: int
    position_bytes: int

    def seconds(self, context: float, rate: float) -> float:
        """With `context` positions in the cache, at `rate` bytes a second."""
        return (self.weight_bytes + context * self.position_bytes) / rate


def floor_of(config: ModelConfig, dtype: str, form: WeightForm, ranks: int = 1) -> Floor | None:
    """The floor of a model on one of `ranks`; None where routing decides reads."""
    if config.experts is not None:
        return None
    once = _streamed(config, dtype, form, ranks) + 2 * state_bytes(config, ranks)
    return Floor(once, page_bytes(config, dtype, ranks) // PAGE_SIZE)


def _streamed(config: ModelConfig, dtype: str, form: WeightForm, ranks: int) -> int:
    """Weights that every pass reads: the layers' and those that make logits; embeddings are looked up.

    What a head makes of its target's streams it makes once a round, not in every pass.
    """
    layout = rank_layout(config, ranks)
    inside = sum(
        form.bytes_of(destination, layout.prefix.format(index), dtype)
        for index, layer in enumerate(layout.layers)
        for destination in layer.destinations()
    )
    outside = streamed_tables(config, layout)
    return inside + sum(form.bytes_of(table, "", dtype, table=True) for table in outside)


@torch.inference_mode()
def measure_read_rate(device: str) -> float:
    """Bytes a second of summing a large tensor, the fastest of a few passes."""
    kind = torch.device(device).type
    values = torch.ones(READ_BYTES[kind] // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(PASSES):
        _wait(kind)
        began = time.perf_counter()
        values.sum()
        _wait(kind)
        best = min(best, time.perf_counter() - began)
    return values.nbytes / best


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
