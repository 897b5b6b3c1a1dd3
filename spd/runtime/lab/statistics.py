"""Medians with their spread, intervals and tests: the only statistics that are reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, exp, isfinite, lgamma, log, log1p, pi, sqrt
from statistics import fmean, median, stdev, variance
from typing import Any


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sample does not exceed (nearest rank)."""
    if not values:
        raise ValueError("nothing was measured")
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Spread:
    """A median, and the interval in which a second run's median lies with 95 % chance.

    `low` and `high` are None where one repetition says nothing of the next.
    """

    median: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    @property
    def half_width(self) -> float | None:
        """Half of the interval as a share of the median."""
        if self.low is None or self.high is None or not self.median:
            return None
        return (self.high - self.low) / (2 * self.median)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "half_width": self.half_width}


WINSORIZED = 7
"""Values from which on the extremes of a sample are drawn in."""


def repeat_interval(values: Sequence[float]) -> Spread:
    """The median of repeated positive measurements and where the median of as many new ones will lie.

    Student's t on the logarithms: both medians vary, each with pi / 2 times the variance of a mean. From
    WINSORIZED values on the least and the largest count as their neighbours, for one hiccup of the machine
    says little of a median (Tukey & McLaughlin 1963). Raises ValueError for an empty sample or one that is
    not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError("nothing positive was measured")
    middle, n = median(values), len(values)
    if n < 2:
        return Spread(middle, None, None, tuple(values))
    logarithms = sorted(log(value) for value in values)
    drawn_in = n >= WINSORIZED
    if drawn_in:
        logarithms[0], logarithms[-1] = logarithms[1], logarithms[-2]
    deviation = stdev(logarithms) / (1 - 2 * drawn_in / n)
    freedom = n - 1 - 2 * drawn_in
    reach = student_quantile(freedom, 0.975) * deviation * sqrt(pi / n)
    return Spread(middle, middle * exp(-reach), middle * exp(reach), tuple(values))


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """Probability of means at least this far apart if both samples had one mean (Welch's t, two-sided).

    1.0 where a sample is too small to say; 0.0 where both are constant and differ.
    """
    if len(first) < 2 or len(second) < 2:
        return 1.0
    errors = variance(first) / len(first), variance(second) / len(second)
    distance = abs(fmean(first) - fmean(second))
    if not sum(errors):
        return 0.0 if distance else 1.0
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / (len(first) - 1) + errors[1] ** 2 / (len(second) - 1))
    return 2 * (1 - student_cdf(distance / sqrt(sum(errors)), freedom))


def student_cdf(t: float, freedom: float) -> float:
    """Probability that Student's t of `freedom` degrees lies below t."""
    if not isfinite(t):
        return 1.0 if t > 0 else 0.0
    tail = incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=1024)
def student_quantile(freedom: float, probability: float) -> float:
    """The t below which Student's t lies with `probability`, between 0.5 and 1 (by bisection)."""
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    front = exp(a * log(x) + b * log1p(-x) + lgamma(a + b) - lgamma(a) - lgamma(b)) / a
    fraction = 1.0
    for m in range(100, 0, -1):  # from the innermost term outwards
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + even / (1 + odd / fraction)
    first = -(a + b) * x / (a + 1)
    return front / (1 + first / fraction)
