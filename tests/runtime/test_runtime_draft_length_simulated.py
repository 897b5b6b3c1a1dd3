"""Adaptive k against modelled rounds: how much of the best fixed k's speed it reaches, and of plain's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from spd.runtime.engine.draft_length import Acceptance, DraftLength

TOKENS = 64
"""Of every request."""
MOST = 4


class Machine:
    """What work takes in milliseconds: sixteen rows are verified at once, further ones are dear.

    What is measured has noise and hiccups.
    """

    def __init__(self) -> None:
        self.source = random.Random(0)

    def verify(self, count: int, k: int) -> float:
        """A verification of so many requests."""
        rows = count * (k + 1)
        return self._jitter(1.7 + 0.1 * count + 0.02 * min(rows, 16) + 0.1 * max(rows - 16, 0))

    def draft(self, count: int, k: int) -> float:
        """As many draft forwards."""
        return self._jitter(k * (0.35 + 0.03 * count))

    PREPARE = 0.85
    """Writing the drafter's cache of a prompt."""

    def keep_up(self, count: int) -> float:
        """Keeping the drafter's cache up, as a share of each round without drafts."""
        return 0.06 + 0.008 * count

    def _jitter(self, time: float) -> float:
        hiccup = 6 if self.source.random() < 0.02 else 1
        return time * self.source.uniform(0.95, 1.08) * hiccup


@dataclass
class Asked:
    """A request: how many tokens are left, and how likely each draft is accepted."""

    rate: float
    left: int = TOKENS
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass
class Played:
    """What came of it: tokens, milliseconds and requests."""

    tokens: int = 0
    time: float = 0.0
    requests: int = 0

    @property
    def speed(self) -> float:
        """Tokens a millisecond."""
        return self.tokens / self.time


def play(policy: DraftLength, count: int, rate: float, requests: int, *, waves: bool) -> Played:
    """So many requests, `count` together: the next begins where one ends, or (waves) where all have."""
    source, machine, found, k = random.Random(1), Machine(), Played(), 0
    present: list[Asked] = []
    while present or found.requests < requests:
        before = len(present)
        present = [one for one in present if one.left > 0]
        begin = 0 if waves and present else min(count - len(present), requests - found.requests)
        for _ in range(begin):
            chance = min(0.98, max(0.02, source.gauss(rate, 0.1)))
            present.append(Asked(chance))
            found.time += machine.PREPARE
        found.requests += begin
        if begin or len(present) != before:
            policy.attend([(one.acceptance, policy.maximum) for one in present])
        if present:
            k = _round(policy, machine, present, k, source, found)
    return found


def _round(
    policy: DraftLength, machine: Machine, present: list[Asked], k: int, source: random.Random, found: Played
) -> int:
    """One round at k; returns the next one's."""
    next_k = policy.choose()
    verify, draft = machine.verify(len(present), k), machine.draft(len(present), next_k)
    found.time += verify + draft + (0 if next_k else machine.keep_up(len(present)))
    policy.observe_cost(k, verify, draft, next_k)
    for one in present:
        most = k if one.left < TOKENS else 0
        accepted = next((i for i in range(most) if source.random() >= one.rate), most)
        if most:
            policy.observe(k, most, accepted, one.acceptance)
        found.tokens += min(one.left, accepted + 1)
        one.left -= accepted + 1
    return next_k


def best_of(count: int, rate: float, *, waves: bool) -> tuple[float, float]:
    """The speed without drafts beside a drafter that is kept up, and of the best fixed k."""
    requests = 12 * count
    speeds = [play(DraftLength(k, False), count, rate, requests, waves=waves).speed for k in range(MOST + 1)]
    return speeds[0], max(speeds)


@pytest.mark.covers(2)
@pytest.mark.parametrize("waves", [False, True])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.63, 0.9])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_nearly_the_best_of_all_fixed_lengths_is_reached(count: int, rate: float, waves: bool) -> None:
    """Few requests want two or three drafts, many want none: each where it is so."""
    plain, best = best_of(count, rate, waves=waves)
    policy = DraftLength(MOST, True)
    play(policy, count, rate, 4 * count, waves=waves)
    later = play(policy, count, rate, 40 * count, waves=waves)
    assert later.speed > 0.93 * best and later.speed > 0.945 * plain


@pytest.mark.parametrize("count", [1, 4])
def test_drafting_comes_back_when_texts_change(count: int) -> None:
    policy = DraftLength(MOST, True)
    play(policy, count, 0.02, 30 * count, waves=False)
    play(policy, count, 0.9, 80 * count, waves=False)
    plain, best = best_of(count, 0.9, waves=False)
    assert play(policy, count, 0.9, 20 * count, waves=False).speed > 0.9 * best > plain
