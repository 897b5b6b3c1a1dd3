"""Two benchmarks row by row: what changed, and whether that is more than noise. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from spd.runtime.measuring.rows import IDENTITY
from spd.runtime.measuring.statistics import welch

SIGNIFICANT = 0.05
"""A change is called one where noise alone would show as much in fewer cases than this."""


@dataclass(frozen=True)
class Change:
    """One row of two benchmarks."""

    row: Mapping[str, Any]
    before: float
    after: float
    probability: float
    """Of a difference at least as large if nothing had changed (Welch's t on logarithms)."""

    @property
    def share(self) -> float:
        """The change as a share of what was before."""
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        """`faster`, `slower` or `within noise`."""
        if self.probability > SIGNIFICANT:
            return "within noise"
        return "faster" if self.share > 0 else "slower"

    def regressed(self, threshold: float) -> bool:
        """Whether it is slower by more than `threshold`, and that is no noise."""
        return self.verdict == "slower" and -self.share > threshold

    def as_dict(self, threshold: float) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **{name: self.row[name] for name in IDENTITY},
            "before": self.before,
            "after": self.after,
            "change": self.share,
            "probability": self.probability,
            "verdict": self.verdict,
            "regressed": self.regressed(threshold),
        }


@dataclass(frozen=True)
class Comparison:
    """Matched rows, and how many of each side had no partner."""

    changes: tuple[Change, ...]
    only_before: int
    only_after: int


def row_key(result: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two rows must have in common to be compared."""
    settings = result["settings"]
    length = settings["max_tokens"], settings["ignore_eos"]
    return result["model"], *length, *(row[name] for name in IDENTITY)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Match the rows of two results and test each for a change."""
    old = {row_key(before, row): row for row in before["rows"]}
    new = {row_key(after, row): row for row in after["rows"]}
    changes = [_change(old[key], row) for key, row in new.items() if key in old]
    return Comparison(tuple(changes), len(old.keys() - new.keys()), len(new.keys() - old.keys()))


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    samples: list[Sequence[float]] = [row["tokens_per_second"]["values"] for row in (before, after)]
    return Change(
        after,
        before["tokens_per_second"]["median"],
        after["tokens_per_second"]["median"],
        welch(*([log(value) for value in values] for values in samples)),
    )
