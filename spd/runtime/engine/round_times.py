"""The measured times of rounds, by the number of drafts. No torch."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

MAX_SAMPLES = 7
"""Latest times of which the least counts: something else may have delayed the other rounds."""
MIN_SAMPLES = 2
"""Times of a k before they are used alone; the first one may have been cold."""
PROBE_INTERVAL = 16
"""Rounds without drafts before the first probe."""

_new_samples: Callable[[], dict[int, deque[float]]] = partial(
    defaultdict, partial(deque, maxlen=MAX_SAMPLES)
)


@dataclass
class RoundTimes:
    """Rounds of about as many requests: their latest times, and when another k is tried."""

    verify: dict[int, deque[float]] = field(default_factory=_new_samples)
    """Seconds of verification, by k."""
    draft: dict[int, deque[float]] = field(default_factory=_new_samples)
    """Seconds of drafting, by the number of draft forwards."""
    gaps: dict[int, deque[float]] = field(default_factory=_new_samples)
    """Seconds between rounds. The least is what the host takes when it writes no prompt: as that of
    k = 0 whatever k is, or by k where it computes a mask for each row."""
    is_constrained: bool = False
    """True if a request of the load has a grammar."""
    drafts_at_once: bool = False
    """True if one draft forward makes all drafts of a round."""
    similar: RoundTimes | None = None
    """The times of as many requests whose contexts have another length."""
    has_started: bool = False
    """True once the first trials are scheduled."""
    trials: deque[int] = field(default_factory=deque)
    """The k of each of the next rounds, which are run to measure them."""
    plain_best: int = 0
    """Consecutive rounds in which k = 0 has seemed best."""
    drafting: int = 0
    """Rounds in which drafts seemed best."""
    until_probe: int = PROBE_INTERVAL
    """Rounds without drafts until the next probe."""
    probe_gap: int = PROBE_INTERVAL  # rounds between the last two probes

    def costs(self, ks: Iterable[int], rows: int = 0) -> dict[int, float]:
        """Return the seconds of a round at each k. Before anything is timed the unit is
        verifications.

        rows: the drafts that are verified, where lookup continues those of a model; 0: k.
        """
        host = {k: min(gaps) for k, gaps in self.gaps.items()} or {0: 0.0}
        verify = self.verify_times() or {0: 1.0}
        draft = {0: 0.0, **self.draft_times()}
        forwards = {k: min(k, 1) if self.drafts_at_once else k for k in ks}
        return {
            k: max(_interpolate(rows or k, host), 1e-9)  # a clock may return zero
            + _interpolate(rows or k, verify)
            + _interpolate(count, draft)
            for k, count in forwards.items()
        }

    def verify_times(self) -> dict[int, float]:
        """Return the seconds of verification by k, measured or by a similar load's proportions."""
        similar = self.similar.verify_times() if self.similar else {}
        return _fill_in(least_times(self.verify), similar)

    def draft_times(self) -> dict[int, float]:
        """Return the seconds of drafting by the number of forwards, as `verify_times` does by k."""
        similar = self.similar.draft_times() if self.similar else {}
        return _fill_in(least_times(self.draft), similar)


def least_times(times: Mapping[int, deque[float]]) -> dict[int, float]:
    """Return each k's least time, of those with enough times if any; none above a larger k's."""
    enough = {k: samples for k, samples in times.items() if len(samples) >= MIN_SAMPLES} or times
    least = dict[int, float]()
    bound = math.inf
    for k in sorted(enough, reverse=True):
        least[k] = bound = min(bound, *enough[k])
    return least


def _fill_in(measured: Mapping[int, float], similar: Mapping[int, float]) -> dict[int, float]:
    """Return measured times, and those of `similar` for every other k in the same proportion."""
    ratios = sorted(
        seconds / similar[k] for k, seconds in measured.items() if similar.get(k, 0.0) > 0.0
    )
    scale = ratios[len(ratios) // 2] if ratios else 1.0
    if measured and not ratios:
        return dict(measured)
    return {**{k: scale * seconds for k, seconds in similar.items()}, **measured}


def _interpolate(k: int, values: Mapping[int, float]) -> float:
    """Return the value at k on the line through the nearest two; never one that falls with k."""
    nearest = sorted(values, key=lambda other: abs(other - k))[:2]
    first = nearest[0]
    last = nearest[-1]
    slope = (values[first] - values[last]) / (first - last) if first != last else 0.0
    return max(values[first] + (k - first) * max(slope, 0.0), 0.0)
