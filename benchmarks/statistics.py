"""Medians with their spread, and paired ratios: the only statistics the benchmarks report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Summary:
    """A sample in one line: the median, the extremes and every value in the order measured."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g}, n={len(self.values)})"


def summarize(values: Sequence[float]) -> Summary:
    """Summarize a sample; raises ValueError for an empty one, since no figure is better than a made one."""
    if not values:
        raise ValueError("nothing was measured")
    return Summary(median(values), min(values), max(values), tuple(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Summarize the ratios of values measured in the same round, so that a slow minute hits both sides."""
    return summarize([a / b for a, b in zip(numerators, denominators, strict=True)])
