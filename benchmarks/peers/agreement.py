"""The agreement of two engines' acceptance: vLLM's counters of each, over the same prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.peers.protocol import Speculation

WITHIN = 0.02
"""Relative differences above this are named."""


def total(counts: Iterable[Mapping[str, Any] | None]) -> Speculation | None:
    """Return the sum of several answers' counters; None where one has none."""
    drafts = 0
    tokens = 0
    accepted = 0
    positions = list[int]()
    for count in counts:
        if count is None:
            return None
        drafts += count["drafts"]
        tokens += count["draft_tokens"]
        accepted += count["accepted"]
        positions += [0] * (len(count["per_position"]) - len(positions))
        for position, accepted_count in enumerate(count["per_position"]):
            positions[position] += accepted_count
    return Speculation(drafts, tokens, accepted, tuple(positions)) if drafts else None


def figures(counted: Speculation) -> dict[str, Any]:
    """Return vLLM's figures: accepted over drafts, 1 + accepted over rounds, and by position."""
    return {
        "drafts": counted.drafts,
        "acceptance_rate": counted.accepted / counted.draft_tokens,
        "acceptance_length": 1 + counted.accepted / counted.drafts,
        "per_position": [count / counted.drafts for count in counted.per_position],
    }


def agreement(compared: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the relative differences of two engines' `figures`, the largest, and a verdict."""
    differences = {
        name: compared[name] / base[name] - 1
        for name in ("acceptance_rate", "acceptance_length")
        if base[name]
    }
    positions = zip(compared["per_position"], base["per_position"], strict=False)
    for number, (first, second) in enumerate(positions, 1):
        if second:
            differences[f"position {number}"] = first / second - 1
    largest = max((abs(value) for value in differences.values()), default=0.0)
    return {"differences": differences, "largest": largest, "agree": largest <= WITHIN}


def agreement_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the comparison as text, a line for each figure of each pair."""
    lines = []
    for pair, comparison in report["agreement"].items():
        words = "agree" if comparison["agree"] else "differ"
        lines.append(f"acceptance of {pair}: {words}, {comparison['largest']:.1%} apart at most")
        compared, base = (report["entries"][name]["acceptance"] for name in pair.split(" / "))
        for name in ("acceptance_rate", "acceptance_length"):
            lines.append(f"  {name:<20}{compared[name]:>8.4f}{base[name]:>8.4f}")
        for number, both in enumerate(
            zip(compared["per_position"], base["per_position"], strict=False), 1
        ):
            lines.append(f"  {f'position {number}':<20}{both[0]:>8.4f}{both[1]:>8.4f}")
    return lines
