"""How many tokens to draft next: fixed, or the k that measured acceptance and cost favour. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

DECAY = 0.9
WARM_UP_ROUNDS = 4
PROBE_EVERY = 16
PROBE_LENGTH = 2
HOPEFUL_RATE = 0.6
ROW_COST = 0.01
"""Assumed extra cost of verifying one more row, as a share, until it has been measured."""


def expected_tokens(rate: float, k: int) -> float:
    """Tokens a round commits on average when each draft is accepted with probability `rate`."""
    return float(k + 1) if rate >= 1 else (1 - rate ** (k + 1)) / (1 - rate)


def _towards(old: float, new: float) -> float:
    return DECAY * old + (1 - DECAY) * new


@dataclass
class DraftLength:
    """Chooses k for the next round; `observe` feeds it. Never changes the text, only the speed.

    `rate` is the measured probability that one more draft is accepted given that those before it
    were; a round in which the proposer had nothing to propose counts as a failure. Times in seconds.
    """

    maximum: int
    adaptive: bool
    tiers: tuple[int, ...] = ()
    """The values of k to choose from; empty means all from 0 to `maximum`."""
    rate: float = 0.7
    rounds: int = 0
    since_probe: int = 0
    draft_seconds: float | None = None
    """Of one draft forward (or one lookup)."""
    verify_seconds: dict[int, float] = field(default_factory=dict)
    """Of one verification, by k."""

    def choose(self) -> int:
        """k for the next round, 0 to `maximum`."""
        if not self.adaptive or self.maximum == 0 or self.rounds < WARM_UP_ROUNDS:
            return self.maximum
        choices = self.tiers or range(self.maximum + 1)
        best = max(choices, key=lambda k: expected_tokens(self.rate, k) / self.cost(k))
        if best == 0:
            self.since_probe += 1
            if self.since_probe >= PROBE_EVERY:
                self.since_probe = 0
                return min(PROBE_LENGTH, self.maximum)
        return best

    def cost(self, k: int) -> float:
        """Seconds of a round at k: measured, or carried over from the nearest measured k."""
        if not self.verify_seconds:
            return 1.0 + (ROW_COST + 0.1) * k
        nearest = min(self.verify_seconds, key=lambda known: abs(known - k))
        verify = self.verify_seconds[nearest] * (1 + ROW_COST * k) / (1 + ROW_COST * nearest)
        return max(verify + k * (self.draft_seconds or 0.0), 1e-9)  # a coarse clock may say zero

    def observe(self, k: int, drafted: int, accepted: int) -> None:
        """One slot's outcome of a round verified at k with `drafted` real drafts."""
        self.rounds += 1
        if not k:
            return
        for _ in range(accepted):
            self.rate = _towards(self.rate, 1.0)
        if accepted < drafted or not drafted:
            self.rate = _towards(self.rate, 0.0)
        elif k <= PROBE_LENGTH < self.maximum:
            self.rate = max(self.rate, HOPEFUL_RATE)

    def observe_cost(self, k: int, verify_seconds: float, draft_seconds: float, forwards: int) -> None:
        """What a round at k took: its verification, and the drafting after it in `forwards` passes."""
        self.verify_seconds[k] = _towards(self.verify_seconds.get(k, verify_seconds), verify_seconds)
        if forwards:
            each = draft_seconds / forwards
            self.draft_seconds = _towards(
                self.draft_seconds if self.draft_seconds is not None else each, each
            )
