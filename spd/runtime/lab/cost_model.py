"""What a round costs and what it brings, as a trace shows it, and what another k would give. No torch here.

A round of k drafts takes verify(k + 1 rows) + draft(k) + rest + host, and commits one token and as many
drafts as were accepted: S_i is the share of rounds in which at least i were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from statistics import fmean, median

from spd.runtime.engine.metrics import RoundRecord

ROW_COST = 0.01
"""Assumed extra cost of verifying one more row, as a share, until it has been measured."""
LEAST = 3
"""Rounds that make a cost a measured one."""


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of the parts of a round, by the number of drafts where they depend on it."""

    verify: Mapping[int, float]
    """Measured medians by rows."""
    draft: Mapping[int, float]
    """Of drafting k tokens."""
    rest: float
    host: float

    def verify_ms(self, rows: int) -> float:
        """Measured, between two measured ones, or carried on from the nearest."""
        return _between(self.verify, rows)

    def draft_ms(self, k: int) -> float:
        """Of drafting k tokens: measured, or in proportion to the nearest."""
        if not k or not self.draft:
            return 0.0
        if len(self.draft) == 1:
            ((known, ms),) = self.draft.items()
            return ms * k / known
        return max(0.0, _between(self.draft, k, through_zero=True))

    def round_ms(self, k: int) -> float:
        """A whole round."""
        return self.verify_ms(k + 1) + self.draft_ms(k) + self.rest + self.host

    @property
    def plain_measured(self) -> bool:
        """Whether a round without drafts was among the measured ones."""
        return 1 in self.verify


def fit_costs(records: Sequence[RoundRecord]) -> CostModel:
    """Medians of every part. A round drafts for the next one, whose k may be another."""
    verify: dict[int, list[float]] = {}
    draft: dict[int, list[float]] = {}
    for record, after in zip(records, [*records[1:], None], strict=True):
        verify.setdefault(record.k + 1, []).append(record.ms["verify"])
        if after is not None and after.request == record.request and after.k:
            draft.setdefault(after.k, []).append(record.ms["draft"])
    return CostModel(
        _medians(verify),
        _medians(draft),
        median(record.ms["rest"] for record in records),
        median(record.ms.get("host", 0.0) for record in records),
    )


def _medians(samples: Mapping[int, list[float]]) -> dict[int, float]:
    enough = {key: values for key, values in samples.items() if len(values) >= LEAST} or samples
    return {key: median(values) for key, values in sorted(enough.items())}


def _between(known: Mapping[int, float], at: int, *, through_zero: bool = False) -> float:
    """Linear between the nearest known keys; beyond them as the line through all says, never falling."""
    if at in known:
        return known[at]
    below, above = ([key for key in known if (key < at) == side] for side in (True, False))
    if below and above:
        low, high = max(below), min(above)
        return known[low] + (at - low) / (high - low) * (known[high] - known[low])
    nearest = max(below) if below else min(above)
    if through_zero:
        return known[nearest] * at / nearest
    if len(known) == 1:
        return known[nearest] * (1 + ROW_COST * at) / (1 + ROW_COST * nearest)
    slope = max(0.0, _slope(known))
    return max(known[nearest] + slope * (at - nearest), known[nearest] / 2)


def _slope(known: Mapping[int, float]) -> float:
    middle, level = fmean(known), fmean(known.values())
    return sum((x - middle) * (y - level) for x, y in known.items()) / sum((x - middle) ** 2 for x in known)


@dataclass(frozen=True)
class Acceptance:
    """Shares of rounds that accepted at least 1, 2, … drafts, of those that could have.

    `held` has such shares, with their rounds, for each k that whole traces held. They differ: with few drafts
    a round, more of the rounds lie in text that is easy to draft.
    """

    survival: tuple[float, ...]
    rounds: int
    held: Mapping[int, Acceptance] = field(default_factory=dict)

    def length(self, k: int) -> float:
        """Tokens a round at k on average, by the line through the shares of every k held.

        Positions beyond those seen go on as all after the first did.
        """
        shares: list[float] = []
        for position, pooled in enumerate(self.survival[:k]):
            known = {each: found for each, found in self.held.items() if len(found.survival) > position}
            share = pooled if len(known) < 2 else _on_line(known, position, k)
            shares.append(min(max(0.0, share), shares[-1] if shares else 1.0))
        before, after = sum(shares[:-1]), sum(shares[1:])  # the last alone may be of a handful of rounds
        rate = after / before if before else sum(shares)
        while len(shares) < k:
            shares.append((shares[-1] if shares else 1.0) * rate)
        return 1.0 + sum(shares)

    @property
    def conditional(self) -> tuple[float, ...]:
        """The chance of each position, given that all before it were accepted."""
        before = (1.0, *self.survival)
        return tuple(now / then if then else 0.0 for then, now in zip(before, self.survival, strict=False))


def _on_line(held: Mapping[int, Acceptance], position: int, k: int) -> float:
    """The share of a position at k, on the line over log(k) through held ones, each weighed by its rounds."""
    points = [(log(each), found.survival[position], found.rounds) for each, found in held.items()]
    total = sum(rounds for _, _, rounds in points)
    middle, level = (sum(point[i] * point[2] for point in points) / total for i in (0, 1))
    spread = sum(rounds * (x - middle) ** 2 for x, _, rounds in points)
    slope = sum(rounds * (x - middle) * (share - level) for x, share, rounds in points) / spread
    return level + slope * (log(k) - middle)


def fit_acceptance(records: Iterable[RoundRecord]) -> Acceptance:
    """Count accepted drafts by position over rounds that had room for so many."""
    listed = [record for record in records if record.k]
    longest = max((record.k for record in listed), default=0)
    survival = []
    for position in range(longest):
        room = [record for record in listed if record.k > position]
        if len(room) < LEAST:
            break
        survival.append(sum(record.accepted > position for record in room) / len(room))
    return Acceptance(tuple(survival), len(listed))


def fit_acceptances(traces: Iterable[Sequence[RoundRecord]]) -> Acceptance:
    """`fit_acceptance` of all rounds, and for each k that whole traces held by itself."""
    everything: list[RoundRecord] = []
    held: dict[int, list[RoundRecord]] = {}
    for trace in traces:
        drafting = [record for record in trace if record.k]
        everything += drafting
        if len({record.k for record in drafting}) == 1:
            held.setdefault(drafting[0].k, []).extend(drafting)
    each = {k: fit_acceptance(records) for k, records in held.items() if len(records) >= LEAST}
    return replace(fit_acceptance(everything), held=each)
