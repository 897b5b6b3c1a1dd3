"""Statistics of repeated measurements: medians with every value, paired ratios, plain intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
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
    """Summarize a sample; raises ValueError for an empty one."""
    if not values:
        raise ValueError("nothing was measured")
    return Summary(median(values), min(values), max(values), tuple(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Summarize the ratios of values measured in the same round: a slow minute hits both sides."""
    return summarize([a / b for a, b in zip(numerators, denominators, strict=True)])


def median_interval(
    values: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """An interval that holds the median of whatever the sample is from, with at least `confidence`.

    Two order statistics, by the binomial distribution of how many values fall below the median;
    nothing is assumed of the distribution. None where the sample is too small (fewer than 6 values
    at 0.95).
    """
    n = len(values)
    ordered = sorted(values)
    interval = None
    outside = 0.0  # probability that the median lies below the rank-th value
    for rank in range(n // 2):
        outside += comb(n, rank) / 2**n
        if 1 - 2 * outside < confidence:
            break
        interval = (ordered[rank], ordered[n - 1 - rank])
    return interval


def ratio_of_sums(over: Sequence[float], under: Sequence[float]) -> tuple[float, float | None]:
    """Return sum over sum, and its standard error where pairs are independent.

    Linearised, as for clusters of unequal size (Cochran, Sampling Techniques, 6.3): what is inside
    one pair may depend. No error for one pair; raises ValueError where the sum below is not
    positive.
    """
    total = sum(under)
    n = len(under)
    if total <= 0:
        raise ValueError("nothing was counted")
    ratio = sum(over) / total
    if n < 2:
        return ratio, None
    squares = sum((a - ratio * b) ** 2 for a, b in zip(over, under, strict=True))
    return ratio, sqrt(n / (n - 1) * squares) / total
