"""What engines take and what the device has, known before any of them is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest import mock

from spd.runtime import EngineConfig
from spd.runtime.plan import machine
from spd.runtime.plan.plan import EnginePlan, make_plan

BOUNDLESS = 2**62


def plan_anyway(config: EngineConfig) -> EnginePlan:
    """The plan of an engine with every slot at full length, also where it has no room."""
    with mock.patch.object(machine, "free_memory", lambda device: BOUNDLESS):
        return make_plan(config)


def needed_bytes(plan: EnginePlan) -> int:
    """Bytes of all its parts."""
    return plan.need.total


def usable_bytes(config: EngineConfig, device: str) -> int:
    """Bytes that engines like this one may take of what is free now."""
    return int(machine.free_memory(device) * config.memory_fraction)


def side_by_side(needs: Mapping[str, int], usable: int) -> list[tuple[str, ...]]:
    """Which of several engines, by what each takes, are built together: groups that run one after another.

    All of them where they fit; else the first with each other one; else each by itself.
    """
    first, *others = needs
    ways: Sequence[list[tuple[str, ...]]] = ([tuple(needs)], [(first, other) for other in others])
    for groups in ways:
        if all(sum(needs[one] for one in group) <= usable for group in groups):
            return groups
    return [(one,) for one in needs]
