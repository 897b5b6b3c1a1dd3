"""Medians with their spread, intervals and tests: the only statistics that are reported."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp, log, pi, sqrt
from statistics import median, stdev
from typing import Any


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sample does not exceed (nearest rank)."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


WINSORIZED = 7
"""Values from which on the extremes of a sample are drawn in."""


def repeat_interval(values: Sequence[float]) -> dict[str, Any]:
    """The median of repeated positive measurements and where the median of as many new ones will lie.

    As JSON: `low` and `high` hold a second run's median with 95 % chance; `half_width` is half of that as a
    share of the median. All three are None where there is one value.

    Student's t on the logarithms: both medians vary, each with pi / 2 times the variance of a mean. From
    WINSORIZED values on the least and the largest count as their neighbours, for one hiccup of the machine
    says little of a median (Tukey & McLaughlin 1963). Raises ValueError for an empty sample or one that is
    not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError("nothing positive was measured")
    middle, n = median(values), len(values)
    if n < 2:
        return {"median": middle, "low": None, "high": None, "values": tuple(values), "half_width": None}
    logarithms = sorted(log(value) for value in values)
    drawn_in = n >= WINSORIZED
    if drawn_in:
        logarithms[0], logarithms[-1] = logarithms[1], logarithms[-2]
    deviation = stdev(logarithms) / (1 - 2 * drawn_in / n)
    freedom = n - 1 - 2 * drawn_in
    reach = student_quantile(freedom) * deviation * sqrt(pi / n)
    low, high = middle * exp(-reach), middle * exp(reach)
    share = (high - low) / (2 * middle)
    return {"median": middle, "low": low, "high": high, "values": tuple(values), "half_width": share}


def student_quantile(freedom: float) -> float:
    """The size that Student's t exceeds in 5 % of cases: about the normal's (Abramowitz & Stegun 26.7.5).

    Off by 1 % at 2 degrees of freedom and less at more; below 2 that of 1.
    """
    if freedom < 2:
        return 12.706
    return 1.96 + 2.372 / freedom + 2.822 / freedom**2 + 2.556 / freedom**3 + 1.590 / freedom**4
