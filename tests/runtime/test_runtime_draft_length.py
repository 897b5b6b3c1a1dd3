"""How many tokens are drafted: fixed when asked, else what acceptance and cost favour."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spd.runtime.engine.draft_length import (
    ENOUGH,
    PATIENCE,
    PROBE_EVERY,
    PROBE_OUTCOMES,
    PROBE_SELDOM,
    SAMPLES,
    WARM_UP_ROUNDS,
    Acceptance,
    DraftLength,
    RoundTimes,
    expected_tokens,
    foretold,
)


def play(
    length: DraftLength, rounds: int, rate: float, draft_seconds: float = 0.001, verify_seconds: float = 0.01
) -> list[int]:
    """The k of each round when this share of the drafts is accepted, all of them leading."""
    chosen = []
    for _ in range(rounds):
        k = length.choose()
        chosen.append(k)
        length.observe_cost(k, verify_seconds, draft_seconds * k, k)
        length.observe(k, k, round(rate * k))
    return chosen


@pytest.mark.parametrize(
    ("maximum", "adaptive", "rounds", "rate", "ks"),
    [
        *[(maximum, False, 100, rate, {maximum}) for maximum in (0, 1, 7) for rate in (0.0, 1.0)],
        (0, True, 100, 0.0, {0}),
        (5, True, WARM_UP_ROUNDS, 0.0, {5}),  # the first rounds measure
        (1, True, 900, 0.0, {0, 1}),  # a probe is not above the maximum
    ],
)
def test_no_other_k_is_run(maximum: int, adaptive: bool, rounds: int, rate: float, ks: set[int]) -> None:
    chosen = play(DraftLength(maximum, adaptive), rounds, rate)
    assert set(chosen[60:] if rounds == 900 else chosen) == ks


def test_without_acceptance_k_goes_to_zero_and_is_probed_ever_less() -> None:
    chosen = play(DraftLength(6, adaptive=True), 3000, 0.0)
    settled = next(i for i in range(len(chosen)) if not any(chosen[i : i + PROBE_EVERY - 1]))
    probes = [i for i in range(settled, len(chosen)) if chosen[i] and not chosen[i - 1]]
    lasted = [next(n for n in range(1, 99) if not chosen[i + n]) for i in probes[:-1]]
    assert set(lasted) == {PROBE_OUTCOMES}, "each tries as many drafts as make evidence"
    gaps = [b - a - PROBE_OUTCOMES + 1 for a, b in itertools.pairwise(probes)]
    assert gaps[:4] == [2 * PROBE_EVERY, 4 * PROBE_EVERY, 8 * PROBE_EVERY, PROBE_SELDOM]
    assert set(gaps[3:]) == {PROBE_SELDOM}


def test_k_follows_the_measured_cost_of_verification() -> None:
    """Rows are cheap up to two and dear beyond: k stays there although nearly all would be accepted."""
    length = DraftLength(8, adaptive=True, overall=Acceptance(9.5, 10.0), times=RoundTimes(begun=True))
    assert length.choose() == 8
    for k in range(9):
        for _ in range(ENOUGH):
            length.observe_cost(k, 0.01 if k <= 2 else 0.05, 0.0, 0)
    assert length.choose() == 2
    for _ in range(ENOUGH):
        length.observe_cost(2, 0.01, 0.04, 2)  # and dear drafts count as well
    length.times.plain_best = PATIENCE
    assert length.choose() == 0


def test_a_rounds_slots_weigh_together() -> None:
    """Sixteen slots' outcomes are one round's evidence: their order means nothing, and none rules alone."""
    outcomes = [0, 4, 4, 2, 1, 4, 0, 3, 4, 4, 1, 2, 4, 0, 4, 3]
    rates = []
    for order in (outcomes, sorted(outcomes), sorted(outcomes, reverse=True)):
        length = DraftLength(4, adaptive=True)
        for _ in range(20):
            length.observe_cost(4, 0.01, 0.004, 4)
            for accepted in order:
                length.observe(4, 4, accepted)
        rates.append(length.rate)
    could = [accepted + (accepted < 4) for accepted in outcomes]
    told = sum(map(foretold, could))
    assert rates == pytest.approx([(sum(outcomes) - told) / (sum(could) - told)] * 3, rel=0.02)


def test_rounds_held_up_are_outvoted() -> None:
    """A first cold round, and every fifth one, take ten times as long: what is believed is what is usual."""
    length = DraftLength(4, adaptive=True)
    for number in range(4 * SAMPLES):
        slow = 10 if number % 5 == 0 else 1
        length.observe_cost(2, 0.004 * slow, 0.001 * slow, 2, 0.001 * slow)
        if number >= SAMPLES:
            assert length.times.costs([2])[2] == pytest.approx(0.006)


def test_a_few_bad_rounds_are_drafted_through() -> None:
    """From plain rounds the drafter has to catch up: none is run before they seemed better for a while."""
    length = DraftLength(4, adaptive=True)
    length.by_load[1], length.times.begun = length.times, True
    for _ in range(ENOUGH):
        for k in (0, 2):
            length.observe_cost(k, 0.01 + 0.005 * k, 0.0, 0)
    for rate in (0.1, 0.9) * 10:
        chosen = []
        for _ in range(PATIENCE):
            length.overall = Acceptance(20 * rate, 20.0)
            chosen.append(length.choose())
        assert chosen.count(0) <= ENOUGH, "but where it is timed"
    length.overall = Acceptance(2, 20)
    assert not [length.choose() for _ in range(2 * PATIENCE)][-1]


seconds = st.floats(1e-6, 10)
outcomes = st.lists(st.tuples(st.booleans(), st.booleans(), seconds, st.just(0.0) | seconds), max_size=60)


@settings(max_examples=80, deadline=None)
@given(maximum=st.integers(0, 5), outcomes=outcomes, forwards=st.booleans())
def test_k_stays_in_range_whatever_is_observed(
    maximum: int, outcomes: list[tuple[bool, bool, float, float]], forwards: bool
) -> None:
    length = DraftLength(maximum, adaptive=True)
    for proposed, accepted, verify_seconds, draft_seconds in outcomes:
        k = length.choose()
        assert 0 <= k <= maximum
        length.observe_cost(k, verify_seconds, draft_seconds, k * forwards)
        length.observe(k, k * proposed, k * proposed * accepted)
        assert 0 <= length.rate <= 1
        assert all(cost > 0 for cost in length.times.costs(range(maximum + 1)).values())


# -- several requests --------------------------------------------------------------------------------


def taught(*rates: float, maximum: int = 6) -> tuple[DraftLength, list[Acceptance]]:
    """Lengths after many rounds at k = `maximum` of requests that accept each draft with these chances."""
    length, present = DraftLength(maximum, adaptive=True), [Acceptance() for _ in rates]
    source = random.Random(0)
    for _ in range(200):
        length.attend([(one, maximum) for one in present])
        length.observe_cost(maximum, 0.010, 0.001 * maximum, maximum)
        for one, rate in zip(present, rates, strict=True):
            accepted = next((i for i in range(maximum) if source.random() >= rate), maximum)
            length.observe(maximum, maximum, accepted, one)
    return length, present


def test_each_requests_own_acceptance_weighs() -> None:
    """One that accepts nearly all and one that accepts nothing want more than two that accept half."""
    length, (good, bad) = taught(0.97, 0.0)
    assert good.rate(0.5) > 0.9 and bad.rate(0.5) < 0.3
    length.by_load[1] = length.by_load[2]  # the same costs
    length.times.begun = True
    length.attend([(good, 6)])
    alone = length.choose()
    length.attend([(bad, 6)])
    assert alone == 6 and length.choose() <= 1
    length.attend([(good, 6), (bad, 6)])
    rates = [one.rate(length.rate) for one in (good, bad)]
    each = [expected_tokens([rate], [6], 6)[6] for rate in rates]
    assert expected_tokens(rates, [6, 6], 6)[6] == pytest.approx(sum(each) / 2)


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


def simulate(policy: DraftLength, count: int, rate: float, requests: int, *, waves: bool) -> Played:
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
    speeds = [
        simulate(DraftLength(k, False), count, rate, requests, waves=waves).speed for k in range(MOST + 1)
    ]
    return speeds[0], max(speeds)


@pytest.mark.covers(2)
@pytest.mark.parametrize("waves", [False, True])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.63, 0.9])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_nearly_the_best_of_all_fixed_lengths_is_reached(count: int, rate: float, waves: bool) -> None:
    """Few requests want two or three drafts, many want none: each where it is so."""
    plain, best = best_of(count, rate, waves=waves)
    policy = DraftLength(MOST, True)
    simulate(policy, count, rate, 4 * count, waves=waves)
    later = simulate(policy, count, rate, 40 * count, waves=waves)
    assert later.speed > 0.93 * best and later.speed > 0.945 * plain


@pytest.mark.parametrize("count", [1, 4])
def test_drafting_comes_back_when_texts_change(count: int) -> None:
    policy = DraftLength(MOST, True)
    simulate(policy, count, 0.02, 30 * count, waves=False)
    simulate(policy, count, 0.9, 80 * count, waves=False)
    plain, best = best_of(count, 0.9, waves=False)
    assert simulate(policy, count, 0.9, 20 * count, waves=False).speed > 0.9 * best > plain
