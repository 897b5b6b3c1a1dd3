"""Writes the table of hybrids.md: `PYTHONPATH=. python docs/hybrid_tables.py`. Planned, not measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from spd.formats.folder import ModelFolder
from spd.runtime import EngineConfig
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.memory import (
    EngineShape,
    at_context,
    largest,
    measure,
    page_bytes,
    state_bytes,
)
from spd.runtime.plan.plan import resolve_plan
from spd.runtime.round.limits import PAGE_SIZE
from tests.recipes.published_hybrids import RELEASES, write_published

CARDS = (24, 32, 80)
"""GiB of one GPU."""
TAKEN = 0.5
"""GiB of it that the driver and torch keep: assumed."""
RANKS = (1, 2, 4, 8, 16)
WANTED = 32768
"""Tokens of context for which ranks are counted."""
STEP = 1024
SHOWN = {
    **{name: name for name in ("Qwen3.5-0.8B", "Qwen3.5-2B", "Qwen3.5-4B", "Qwen3.5-9B")},
    "Qwen3.8-27B": "Qwen3.5, 3.6, 3.8-27B",
    "Qwen3.8-27B-FP8": "Qwen3.8-27B-FP8",
    "Qwen3.6-35B-A3B": "Qwen3.5, 3.6-35B-A3B",
    "Qwen3.6-35B-A3B-FP8": "Qwen3.6-35B-A3B-FP8",
    **{name: name for name in ("Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B")},
}
"""Releases, and what stands for those of one shape."""


def plan_of(folder: ModelFolder, tp: int = 1) -> EngineShape:
    """What one request with the model's own MTP layer takes, of the longest context."""
    config = EngineConfig(model=folder, tp=tp, ctx=folder.config.max_positions)
    return resolve_plan(config, Machine("cuda", 0, (9, 0), from_driver_only=True)).shape


def usable(card: int) -> int:
    """Bytes of a card that are used, at most."""
    return int((card - TAKEN) * 2**30 * EngineConfig.memory_fraction)


def fits(shape: EngineShape, card: int) -> str:
    """The longest context that fits, in whole thousands."""
    found = largest(
        lambda ctx: measure(at_context(shape, ctx)).total <= usable(card), shape.ctx, STEP
    )
    return f"{found // STEP}K" if found else "no"


def cards(folder: ModelFolder, weights: int) -> str:
    """How many cards of the largest size it takes for a usual context."""
    enough = (
        ranks
        for ranks in RANKS
        if weights / ranks < usable(CARDS[-1])
        and measure(at_context(plan_of(folder, ranks), WANTED)).total <= usable(CARDS[-1])
    )
    return str(next(enough))


def rows() -> Iterator[tuple[str, ...]]:
    """One of each published model."""
    for name, label in SHOWN.items():
        with tempfile.TemporaryDirectory() as place:
            folder = ModelFolder(write_published(Path(place), RELEASES[name]))
            shape = plan_of(folder)
            need = measure(shape)
            states = state_bytes(folder.config)
            tokens = page_bytes(folder.config, "bfloat16") / PAGE_SIZE
            yield (
                label,
                f"{(need.weights + need.draft_weights) / 2**30:,.1f} GiB",
                f"{states / 2**20:,.0f} MiB",
                f"{need.states / 2**20:,.0f} MiB",
                f"{tokens * 1000 / 2**20:,.1f} MiB",
                *(fits(shape, card) for card in CARDS),
                cards(folder, need.weights),
            )


def table() -> str:
    """The whole table."""
    header = ("model", "weights with MTP", "states", "states and rings", "1,000 tokens")
    lines = [
        (*header, *(f"{card} GiB" for card in CARDS), f"cards of {CARDS[-1]} GiB"),
        ("---",) * 9,
        *rows(),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
