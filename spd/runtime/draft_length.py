"""How many tokens to draft next: fixed, or the k that measured acceptance and cost favour. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9
WARM_UP_ROUNDS = 4
PROBE_EVERY = 32


def expected_tokens(rate: float, k: int) -> float:
    """Tokens a round commits on average when each draft is accepted with probability `rate`."""
    return float(k + 1) if rate >= 1 else (1 - rate ** (k + 1)) / (1 - rate)


@dataclass
class DraftLength:
    """Chooses k for the next round; `observe` feeds it. Never changes the text, only the speed."""

    maximum: int
    adaptive: bool
    rate: float = 0.7
    draft_cost: float = 0.1
    """Seconds of one draft forward over seconds of one verification."""
    rounds: int = 0
    since_probe: int = 0

    def choose(self) -> int:
        """k for the next round, 0 to `maximum`."""
        if not self.adaptive or self.maximum == 0 or self.rounds < WARM_UP_ROUNDS:
            return self.maximum
        best = max(
            range(self.maximum + 1), key=lambda k: expected_tokens(self.rate, k) / (1 + self.draft_cost * k)
        )
        if best == 0:
            self.since_probe += 1
            if self.since_probe >= PROBE_EVERY:
                self.since_probe = 0
                return min(2, self.maximum)
        return best

    def observe(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float, forwards: int
    ) -> None:
        """One slot's outcome of a round that verified `drafted` tokens."""
        self.rounds += 1
        if drafted:
            # Conditional rate: every accepted draft is a success, the first rejected one a failure.
            trials = min(accepted + 1, drafted)
            for outcome in [1.0] * min(accepted, trials) + [0.0] * (trials - min(accepted, trials)):
                self.rate += (1 - DECAY) * (outcome - self.rate)
        if forwards and verify_seconds > 0:
            cost = draft_seconds / forwards / verify_seconds
            self.draft_cost += (1 - DECAY) * (cost - self.draft_cost)
