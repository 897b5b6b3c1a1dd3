"""Two benchmarks row by row: what changed, and whether that is more than noise. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from spd.runtime.lab.rows import ALL, IDENTITY, KEYS
from spd.runtime.lab.statistics import welch

SIGNIFICANT = 0.05
"""A change is called one where noise alone would show as much in fewer cases than this."""
CONDITIONS = ("device", "dtype", "quantize", "kernels", "threads")
"""Of a plan: what a comparison may be about, so that rows match all the same, and it is said."""


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
    conditions: tuple[str, ...]
    """Where and in what the two ran, as far as that differs: `dtype bfloat16 → float32`."""


def row_key(result: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two rows must have in common to be compared: the work, how it was done, real or made-up."""
    settings = result["settings"]
    samples = [sample for sample in result.get("samples", ()) if _is_of(sample["work"], row)]
    names = {name for sample in samples for name in sample["prompts"]} or result["prompts"]
    prompts = frozenset(result["prompts"][name] for name in names)
    dummy = any(plan["load"] == "dummy" for plan in result["plans"])
    work = result["model"], settings["max_tokens"], settings["ignore_eos"], prompts, dummy
    return *work, row["acceptance"], *(row[name] for name in IDENTITY)


def _is_of(work: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a pass over that work is counted in the row."""
    load = work["load"]
    its = work["temperature"], work["prompt_tokens"], load["concurrency"], load["rate"]
    return row["category"] in (ALL, work["category"]) and its == tuple(row[name] for name in KEYS[1:])


def _keyed(result: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Rows by key; of those with one key, as two settings that come to the same give, each by its place."""
    seen: Counter[tuple[Any, ...]] = Counter()
    found = {}
    for row in result["rows"]:
        key = row_key(result, row)
        numbered = (*key, seen[key])
        found[numbered] = row
        seen[key] += 1
    return found


def _conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    plans = [result["plans"][0] if result["plans"] else {} for result in (before, after)]
    pairs = [(name, *(plan.get(name) for plan in plans)) for name in CONDITIONS]
    return tuple(f"{name} {then} → {now}" for name, then, now in pairs if then != now)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Match the rows of two results and test each for a change."""
    old, new = _keyed(before), _keyed(after)
    changes = tuple(_change(old[key], row) for key, row in new.items() if key in old)
    only = len(old.keys() - new.keys()), len(new.keys() - old.keys())
    return Comparison(changes, *only, _conditions(before, after))


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    samples: list[Sequence[float]] = [row["tokens_per_second"]["values"] for row in (before, after)]
    return Change(
        after,
        before["tokens_per_second"]["median"],
        after["tokens_per_second"]["median"],
        welch(*([log(value) for value in values] for values in samples)),
    )
