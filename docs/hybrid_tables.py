"""Print the table of hybrids.md: `PYTHONPATH=. python docs/hybrid_tables.py`. Planned, not measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from spd.formats.folder import ModelFolder
from spd.runtime import EngineConfig
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.memory import EngineShape, measure_memory, page_bytes, state_bytes
from spd.runtime.plan.memory_fit import find_largest, with_context
from spd.runtime.plan.plan import resolve_plan
from spd.runtime.round.limits import PAGE_SIZE
from tests.recipes.published_hybrids import RELEASES, write_published

CARD_GIB = (24, 32, 80)
"""Memory of one GPU, GiB."""
RESERVED_GIB = 0.5
"""Memory that the driver and torch use, GiB: assumed."""
RANKS = (1, 2, 4, 8, 16)
CONTEXT = 32768
"""The context for which cards are counted, tokens."""
STEP = 1024
LABELS = {
    **{name: name for name in ("Qwen3.5-0.8B", "Qwen3.5-2B", "Qwen3.5-4B", "Qwen3.5-9B")},
    "Qwen3.8-27B": "Qwen3.5, 3.6, 3.8-27B",
    "Qwen3.8-27B-FP8": "Qwen3.8-27B-FP8",
    "Qwen3.6-35B-A3B": "Qwen3.5, 3.6-35B-A3B",
    "Qwen3.6-35B-A3B-FP8": "Qwen3.6-35B-A3B-FP8",
    **{name: name for name in ("Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B")},
}
"""Releases and their labels; one release stands for all of its shape."""


def plan_shape(folder: ModelFolder, tp: int = 1) -> EngineShape:
    """Return the shape of an engine for one request of the longest context, with the MTP layer."""
    config = EngineConfig(model=folder, tp=tp, ctx=folder.config.max_positions)
    return resolve_plan(config, Machine("cuda", 0, (9, 0), is_foreseen=True)).shape


def usable_bytes(card: int) -> int:
    """Return the bytes of a card that may be used."""
    return int((card - RESERVED_GIB) * 2**30 * EngineConfig.memory_fraction)


def longest_context(shape: EngineShape, card: int) -> str:
    """Return the longest context that fits, in multiples of 1,024 tokens."""
    context = find_largest(
        lambda ctx: measure_memory(with_context(shape, ctx)).total <= usable_bytes(card),
        shape.ctx,
        STEP,
    )
    return f"{context // STEP}K" if context else "no"


def count_cards(folder: ModelFolder, weights: int) -> str:
    """Return the number of the largest cards that CONTEXT tokens need."""
    fitting_counts = (
        ranks
        for ranks in RANKS
        if weights / ranks < usable_bytes(CARD_GIB[-1])
        and measure_memory(with_context(plan_shape(folder, ranks), CONTEXT)).total
        <= usable_bytes(CARD_GIB[-1])
    )
    return str(next(fitting_counts))


def make_rows() -> Iterator[tuple[str, ...]]:
    """Yield one row for each published model."""
    for name, label in LABELS.items():
        with tempfile.TemporaryDirectory() as parent:
            folder = ModelFolder(write_published(Path(parent), RELEASES[name]))
            shape = plan_shape(folder)
            need = measure_memory(shape)
            states = state_bytes(folder.config)
            tokens = page_bytes(folder.config, "bfloat16") / PAGE_SIZE
            yield (
                label,
                f"{(need.weights + need.draft_weights) / 2**30:,.1f} GiB",
                f"{states / 2**20:,.0f} MiB",
                f"{need.states / 2**20:,.0f} MiB",
                f"{tokens * 1000 / 2**20:,.1f} MiB",
                *(longest_context(shape, card) for card in CARD_GIB),
                count_cards(folder, need.weights),
            )


def make_table() -> str:
    """Return the table."""
    header = ("model", "weights with MTP", "states", "states and rings", "1,000 tokens")
    lines = [
        (*header, *(f"{card} GiB" for card in CARD_GIB), f"cards of {CARD_GIB[-1]} GiB"),
        ("---",) * 9,
        *make_rows(),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(make_table())
