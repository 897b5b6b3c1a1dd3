"""How many tokens to draft next: fixed, or the k that measured acceptance and cost favour. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DECAY = 0.9
"""What earlier rounds weigh after one more, in costs and in acceptance."""
WARM_UP_ROUNDS = 4
PROBE_EVERY = 16
PROBE_SELDOM = 256
"""Rounds without drafts between two probes: at first, and after probes that changed nothing."""
PROBE_LENGTH = 2
PROBE_MEMORY = 0.1
"""What is left of the evidence when a probe is made, so that its outcome can overrule it."""
PRIOR = 4.0
"""Drafts of other requests that a request's own evidence is weighed against."""
ROW_COST = 0.01
"""Assumed extra cost of verifying one more row, as a share, until it has been measured."""


def expected_tokens(rate: float, k: int) -> float:
    """Tokens a round commits on average when each draft is accepted with probability `rate`."""
    return float(k + 1) if rate >= 1 else (1 - rate ** (k + 1)) / (1 - rate)


def _towards(old: float, new: float) -> float:
    return DECAY * old + (1 - DECAY) * new


@dataclass(slots=True)
class Acceptance:
    """One request's drafts that were accepted, and those that could have been: sums that fade."""

    accepted: float = 0.0
    tried: float = 0.0

    def rate(self, prior: float) -> float:
        """The share accepted; `prior`, that of all requests, counts as `PRIOR` drafts."""
        return (self.accepted + PRIOR * prior) / (self.tried + PRIOR)


@dataclass
class DraftLength:
    """Chooses k for the next round; `observe` feeds it. Never changes the text, only the speed.

    `rate` is the measured probability that one more draft is accepted given that those before it
    were; a round in which the proposer had nothing to propose counts as a failure. All slots of a round
    weigh as much as all of another. Times in seconds.
    """

    maximum: int
    adaptive: bool
    tiers: tuple[int, ...] = ()
    """The values of k to choose from; empty means all from 0 to `maximum`."""
    accepted: float = 7.0
    tried: float = 10.0
    """Drafts that were accepted, and those that could have been: sums that fade from round to round."""
    rounds: int = 0
    since_probe: int = 0
    probe_gap: int = PROBE_EVERY
    draft_seconds: float | None = None
    """Of one draft forward (or one lookup)."""
    verify_seconds: dict[int, float] = field(default_factory=dict)
    """Of one verification, by k, with about as many requests as take part now."""
    present: Sequence[tuple[Acceptance, int]] = ()
    """Who takes part in the next rounds: each one's acceptance, and how many drafts it wants at most."""
    wanted: int = field(init=False)
    """The most drafts that anybody present wants."""
    least: int = field(init=False)
    """The fewest."""
    batch: int = 0
    by_batch: dict[int, dict[int, float]] = field(default_factory=dict)
    """`verify_seconds` of other numbers of requests, by their bit length."""
    carried: set[int] = field(default_factory=set)
    """Values of k whose time was taken over from another number of requests, until it is measured."""

    def __post_init__(self) -> None:
        self.wanted = self.least = self.maximum

    @property
    def rate(self) -> float:
        """Accepted drafts as a share of those that could have been."""
        return self.accepted / self.tried if self.tried else 0.0

    def attend(self, present: Sequence[tuple[Acceptance, int]]) -> None:
        """Say who takes part from now on; costs are kept apart for 1, 2 to 3, 4 to 7 requests and so on."""
        self.present, batch = present, len(present).bit_length()
        wanted = [most for _, most in present] or [self.maximum]
        self.wanted, self.least = max(wanted), min(wanted)
        if batch != self.batch:
            if self.batch:
                self.by_batch[self.batch] = self.verify_seconds
            known = self.by_batch.get(batch)
            self.carried = set() if known else set(self.verify_seconds)
            self.verify_seconds = known or dict(self.verify_seconds)
            self.batch = batch

    def expected(self, k: int) -> float:
        """Tokens that a request commits in a round at k, on average over those present."""
        return self._expectations(k)[k]

    def _expectations(self, maximum: int) -> list[float]:
        """`expected` of every k from 0 to `maximum`: one sum over all present for each draft."""
        prior = self.rate
        rates = [one.rate(prior) for one, _ in self.present] or [prior]
        chances, tokens = [1.0] * len(rates), [1.0]
        for position in range(1, maximum + 1):
            if position > self.least:
                each = zip(rates, self.present, strict=True)
                rates = [rate if most >= position else 0.0 for rate, (_, most) in each]
            chances = [chance * rate for chance, rate in zip(chances, rates, strict=True)]
            tokens.append(tokens[-1] + sum(chances) / len(chances))
        return tokens

    def choose(self) -> int:
        """k for the next round, 0 to `maximum`, and no more than anybody present wants."""
        choices = self.tiers or range(self.maximum + 1)
        maximum = min((k for k in choices if k >= self.wanted), default=self.maximum)
        if not self.adaptive or maximum == 0 or self.rounds < WARM_UP_ROUNDS:
            return maximum
        expected = self._expectations(maximum)
        best = max((k for k in choices if k <= maximum), key=lambda k: expected[k] / self.cost(k))
        if best:
            self.since_probe, self.probe_gap = 0, PROBE_EVERY
            return best
        self.since_probe += 1
        if self.since_probe < self.probe_gap:
            return 0
        # Each probe costs a round of all slots: the longer none has paid, the fewer there are.
        self.since_probe, self.probe_gap = 0, min(2 * self.probe_gap, PROBE_SELDOM)
        self.accepted *= PROBE_MEMORY
        self.tried *= PROBE_MEMORY
        return min(PROBE_LENGTH, maximum)

    def cost(self, k: int) -> float:
        """Seconds of a round at k: measured, between two measured ones, or carried over from the nearest."""
        if not self.verify_seconds:
            return 1.0 + (ROW_COST + 0.1) * k
        verify = self.verify_seconds.get(k)
        if verify is None:
            verify = self._estimate(k)
        return max(verify + k * (self.draft_seconds or 0.0), 1e-9)  # a coarse clock may say zero

    def _estimate(self, k: int) -> float:
        """Seconds of a verification that has not been measured."""
        below = max((known for known in self.verify_seconds if known < k), default=None)
        above = min((known for known in self.verify_seconds if known > k), default=None)
        if below is not None and above is not None:
            low, high = self.verify_seconds[below], self.verify_seconds[above]
            return low + (k - below) / (above - below) * (high - low)
        nearest = above if below is None else below
        assert nearest is not None
        return self.verify_seconds[nearest] * (1 + ROW_COST * k) / (1 + ROW_COST * nearest)

    def observe(self, k: int, drafted: int, accepted: int, own: Acceptance | None = None) -> None:
        """One slot's outcome of a round verified at k with `drafted` real drafts; `own` is its request's."""
        if not k:
            return
        tried = accepted + (accepted < drafted or not drafted)
        self.accepted += accepted
        self.tried += tried
        if own is not None:
            own.accepted = DECAY * own.accepted + accepted
            own.tried = DECAY * own.tried + tried

    def observe_cost(self, k: int, verify_seconds: float, draft_seconds: float, forwards: int) -> None:
        """What a round at k took: its verification, and the drafting after it in `forwards` passes.

        Comes before its slots' outcomes.
        """
        self.rounds += 1
        if k:
            self.accepted *= DECAY
            self.tried *= DECAY
        before = verify_seconds if k in self.carried else self.verify_seconds.get(k, verify_seconds)
        self.carried.discard(k)
        self.verify_seconds[k] = _towards(before, verify_seconds)
        if forwards:
            each = draft_seconds / forwards
            self.draft_seconds = _towards(
                self.draft_seconds if self.draft_seconds is not None else each, each
            )
