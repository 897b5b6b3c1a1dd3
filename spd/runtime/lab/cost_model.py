"""What a round costs and what it brings, as a trace shows it, and what another k would give. No torch here.

A round of k drafts takes verify(k + 1 rows) + draft(k) + rest + host, and commits one token and as many
drafts as were accepted: S_i is the share of rounds in which at least i were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import linear_regression, median

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

    def parts(self, k: int) -> dict[str, float]:
        """What a round spends on what."""
        drafting = _on_line({0: 0.0, **self.draft}, k) if self.draft else 0.0
        return {
            "verification": _on_line(self.verify, k + 1),
            "drafting": drafting,
            "sampling and bookkeeping": self.rest,
            "the host": self.host,
        }

    def round_ms(self, k: int) -> float:
        """A whole round."""
        return sum(self.parts(k).values())

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


def _on_line(known: Mapping[int, float], at: int) -> float:
    """As measured, or by the line through all that was, which never falls."""
    if at in known:
        return known[at]
    if len(known) == 1:
        ((measured, ms),) = known.items()
        return ms * (1 + ROW_COST * at) / (1 + ROW_COST * measured)
    nearest = min(known, key=lambda key: abs(key - at))
    slope = max(0.0, linear_regression(list(known), list(known.values())).slope)
    return max(known[nearest] + slope * (at - nearest), known[nearest] / 2)


@dataclass(frozen=True)
class Acceptance:
    """Shares of rounds that accepted at least 1, 2, … drafts, of those that could have.

    `held` has such shares for each k that whole traces held. They differ: with few drafts a round, more of
    the rounds lie in text that is easy to draft.
    """

    survival: tuple[float, ...]
    held: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def length(self, k: int) -> float:
        """Tokens a round at k on average, by the line through the shares of every k held.

        Positions beyond those seen go on as all after the first did.
        """
        shares: list[float] = []
        for position, share in enumerate(self.survival[:k]):
            known = {log(each): found for each, found in self.held.items() if len(found) > position}
            if len(known) > 1:
                line = linear_regression(list(known), [found[position] for found in known.values()])
                share = line.intercept + line.slope * log(k)
            shares.append(min(max(0.0, share), shares[-1] if shares else 1.0))
        before, after = sum(shares[:-1]), sum(shares[1:])  # the last alone may be of a handful of rounds
        rate = after / before if before else sum(shares)
        while len(shares) < k:
            shares.append((shares[-1] if shares else 1.0) * rate)
        return 1.0 + sum(shares)


def fit_acceptance(traces: Iterable[Sequence[RoundRecord]]) -> Acceptance:
    """Shares of all rounds, and for each k that whole traces held by itself."""
    everything: list[RoundRecord] = []
    held: dict[int, list[RoundRecord]] = {}
    for trace in traces:
        drafting = [record for record in trace if record.k]
        everything += drafting
        if len({record.k for record in drafting}) == 1:
            held.setdefault(drafting[0].k, []).extend(drafting)
    return Acceptance(_survival(everything), {k: _survival(records) for k, records in held.items()})


def _survival(records: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Shares of accepted drafts by position, over rounds that had room for so many."""
    shares: list[float] = []
    while len(room := [record for record in records if record.k > len(shares)]) >= LEAST:
        shares.append(sum(record.accepted > len(shares) for record in room) / len(room))
    return tuple(shares)
