"""What engines take and what the device has, known before any of them is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest import mock

from spd.runtime import EngineConfig
from spd.runtime.plan import machine
from spd.runtime.plan.plan import EnginePlan, make_plan

UNLIMITED_BYTES = 2**62


def plan_anyway(config: EngineConfig) -> EnginePlan:
    """Return the plan of an engine with every slot at full length, even if it does not fit."""
    with mock.patch.object(machine, "free_memory_bytes", lambda device: UNLIMITED_BYTES):
        return make_plan(config)


def needed_bytes(plan: EnginePlan) -> int:
    """Return the bytes of all its parts."""
    return plan.need.total


def usable_bytes(config: EngineConfig, device: str) -> int:
    """Return the bytes that engines like this one may use of the free memory."""
    return int(machine.free_memory_bytes(device) * config.memory_fraction)


def side_by_side(needs: Mapping[str, int], usable: int) -> list[tuple[str, ...]]:
    """Return groups of engines, by the bytes that each needs; a group is built together, one after
    another.

    All of them where they fit; else the first with each other one; else each by itself.
    """
    first, *remaining = needs
    ways: Sequence[list[tuple[str, ...]]] = (
        [tuple(needs)],
        [(first, other) for other in remaining],
    )
    for groups in ways:
        if all(sum(needs[engine] for engine in group) <= usable for group in groups):
            return groups
    return [(engine,) for engine in needs]
