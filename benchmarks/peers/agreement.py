"""Whether two engines accept alike: vLLM's counters of each, summed over the same prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.peers.protocol import Speculation

WITHIN = 0.02
"""Relative differences above this are named."""


def total(counts: Iterable[Mapping[str, Any] | None]) -> Speculation | None:
    """The sum of what several answers counted; None where one counted nothing."""
    drafts = 0
    tokens = 0
    accepted = 0
    positions = list[int]()
    for one in counts:
        if one is None:
            return None
        drafts = drafts + one["drafts"]
        tokens = tokens + one["draft_tokens"]
        accepted += one["accepted"]
        positions += [0] * (len(one["per_position"]) - len(positions))
        for i, count in enumerate(one["per_position"]):
            positions[i] += count
    return Speculation(drafts, tokens, accepted, tuple(positions)) if drafts else None


def figures(counted: Speculation) -> dict[str, Any]:
    """vLLM's definitions: accepted drafts over drafts, 1 + accepted over rounds, accepted by position."""
    return {
        "drafts": counted.drafts,
        "acceptance_rate": counted.accepted / counted.draft_tokens,
        "acceptance_length": 1 + counted.accepted / counted.drafts,
        "per_position": [count / counted.drafts for count in counted.per_position],
    }


def agreement(mine: Mapping[str, Any], its: Mapping[str, Any]) -> dict[str, Any]:
    """Relative differences of two engines' `figures`, the largest of them, and whether it is small."""
    differences = {
        name: mine[name] / its[name] - 1
        for name in ("acceptance_rate", "acceptance_length")
        if its[name]
    }
    positions = zip(mine["per_position"], its["per_position"], strict=False)
    for number, (one, other) in enumerate(positions, 1):
        if other:
            differences[f"position {number}"] = one / other - 1
    largest = max((abs(value) for value in differences.values()), default=0.0)
    return {"differences": differences, "largest": largest, "agree": largest <= WITHIN}


def agreement_lines(report: Mapping[str, Any]) -> list[str]:
    """The comparison in words, a line for each figure of each pair."""
    lines = []
    for pair, found in report["agreement"].items():
        words = "agree" if found["agree"] else "differ"
        lines.append(f"acceptance of {pair}: {words}, {found['largest']:.1%} apart at most")
        mine, its = (report["entries"][name]["acceptance"] for name in pair.split(" / "))
        for name in ("acceptance_rate", "acceptance_length"):
            lines.append(f"  {name:<20}{mine[name]:>8.4f}{its[name]:>8.4f}")
        for number, both in enumerate(
            zip(mine["per_position"], its["per_position"], strict=False), 1
        ):
            lines.append(f"  {f'position {number}':<20}{both[0]:>8.4f}{both[1]:>8.4f}")
    return lines
