"""How many tokens are drafted: fixed when asked, else what acceptance and cost favour."""

from __future__ import annotations

import itertools
import random

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
    TIME_EVERY,
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


def test_accepted_drafts_come_in_runs() -> None:
    """Texts accept nearly all in places and little in others: a later draft fares better than the first."""
    places = [sum(rate**i for i in range(5)) for rate in (0.95, 0.45)]
    steady = sum(0.7**i for i in range(5))
    assert steady < expected_tokens([0.7], [4], 4)[4] < sum(places) / 2


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


def test_with_full_acceptance_k_goes_to_the_maximum() -> None:
    chosen = play(DraftLength(9, adaptive=True), 2000, 1.0)
    assert sorted(set(chosen[60:])) == [0, 8, 9], "others are timed"
    assert chosen[60:].count(9) > 0.95 * len(chosen[60:])


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


def test_plain_rounds_are_timed_while_drafts_are_accepted() -> None:
    """Their cost is known, not guessed: where they turn cheap, they are chosen although all is accepted."""
    length = DraftLength(4, adaptive=True)
    chosen = play(length, 6 * TIME_EVERY, 1.0)
    assert 2 * ENOUGH <= chosen.count(0) <= 3 * ENOUGH
    later = []
    for _ in range(20 * TIME_EVERY):
        k = length.choose()
        later.append(k)
        length.observe_cost(k, 0.002 if k == 0 else 0.01, 0.001 * k, k)
        length.observe(k, k, k)
    assert later[-60:].count(0) > 40


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
