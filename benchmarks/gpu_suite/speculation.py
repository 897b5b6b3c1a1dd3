"""What imposed acceptance means, and how much of the possible gain a measured round keeps.

Acceptance is imposed as other engines do it: every draft is accepted with one probability p, given
that those before it were, so a round commits 1 + p + ... + p^k tokens on average.
"""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE_K = 4
REFERENCE_LENGTH = 3.08
"""Acceptance length that an EAGLE-3 head reached at k = 4 on an 8B model in published
measurements."""


def mean_length(rate: float, k: int) -> float:
    """Return a round's mean tokens when each of k drafts is accepted with probability `rate`."""
    return 1.0 + sum(rate**i for i in range(1, k + 1))


def acceptance_rate(length: float, k: int) -> float:
    """Return the probability at which a round of k drafts commits `length` tokens on average.

    Raises ValueError where no probability does: length must lie in 1 to k + 1.
    """
    if not 1.0 <= length <= k + 1:
        raise ValueError(f"no acceptance gives {length} tokens a round with {k} drafts")
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle, k) < length else (low, middle)
    return high


def reference_length(k: int) -> float:
    """Return tokens a round at k drafts, for a draft model with REFERENCE_LENGTH at REFERENCE_K."""
    return mean_length(acceptance_rate(REFERENCE_LENGTH, REFERENCE_K), k)


@dataclass(frozen=True)
class Gain:
    """One speculative setting against plain decoding."""

    speedup: float
    """Tokens a second over plain decoding's."""
    share_of_ceiling: float
    """Tokens a second over what the bytes of a round allow at the measured read rate."""
    ideal_cost: float
    """Bytes of a speculative round over those of a plain one."""
    efficiency: float
    """speedup over (tokens a round / ideal_cost): what is left of the gain that the bytes allow."""


def gain(
    length: float,
    plain_seconds: float,
    round_seconds: float,
    plain_floor: float,
    round_floor: float,
) -> Gain:
    """Judge a round that commits `length` tokens a slot.

    Floors are seconds that reading the bytes takes.
    """
    speedup = length * plain_seconds / round_seconds
    ideal_cost = round_floor / plain_floor
    return Gain(
        speedup=speedup,
        share_of_ceiling=round_floor / round_seconds,
        ideal_cost=ideal_cost,
        efficiency=speedup / (length / ideal_cost),
    )
