"""What a round costs and what it brings, as a trace shows it, and what another k would give. No torch here.

A round of k drafts takes verify(k + 1 rows) + draft(k) + rest + host, and commits one token and as many
drafts as were accepted: S_i is the share of rounds in which at least i were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from spd.runtime.draft_length import ROW_COST
from spd.runtime.metrics import RoundRecord

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
    """Shares of rounds that accepted at least 1, 2, … drafts, of those that could have."""

    survival: tuple[float, ...]
    rounds: int

    def length(self, k: int) -> float:
        """Tokens a round at k on average; positions beyond those seen go on as the last one did."""
        total, share = 1.0, 1.0
        for position in range(k):
            share = self._share(position, share)
            total += share
        return total

    def _share(self, position: int, before: float) -> float:
        if position < len(self.survival):
            return self.survival[position]
        return before * self.conditional[-1] if self.survival else 0.0

    @property
    def conditional(self) -> tuple[float, ...]:
        """The chance of each position, given that all before it were accepted."""
        before = (1.0, *self.survival)
        return tuple(now / then if then else 0.0 for then, now in zip(before, self.survival, strict=False))

    def bounded(self) -> Acceptance:
        """The most that a rule with rejection sampling may accept where noise was coupled.

        With a total variation d between draft and target, rejection accepts 1 - d and Gumbel coupling at
        least (1 - d) / (1 + d), so a coupled rate a bounds the other by 2 a / (1 + a).
        """
        share, survival = 1.0, []
        for rate in self.conditional:
            share *= 2 * rate / (1 + rate)
            survival.append(share)
        return Acceptance(tuple(survival), self.rounds)


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


def tokens_per_second(costs: CostModel, acceptance: Acceptance, k: int) -> float:
    """What k drafts a round would give."""
    return 1000 * acceptance.length(k) / costs.round_ms(k) if costs.round_ms(k) else 0.0
