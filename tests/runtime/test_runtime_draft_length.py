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
    PROBE_MEMORY,
    PROBE_OUTCOMES,
    PROBE_SELDOM,
    SAMPLES,
    TIME_EVERY,
    WARM_UP_ROUNDS,
    Acceptance,
    DraftLength,
    RoundTimes,
    chance_of_next,
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


@pytest.mark.parametrize(
    ("rounds", "costs"),
    [
        # What a round does after its commit takes time without drafts, too: plain rounds are not free of it.
        ([(0, 0.010, 0.005, 0), (2, 0.010, 0.008, 2)] * ENOUGH, {0: 0.015, 1: 0.0165, 2: 0.018}),
        # Drafting takes what so many forwards were seen to take.
        ([(1, 0.004, 0.0010, 1), (2, 0.004, 0.0016, 2)] * ENOUGH, {1: 0.005, 2: 0.0056, 3: 0.0062}),
        # A first cold time is not believed.
        ([(0, 0.01, 0.0, 0), (0, 0.01, 0.0, 0), (2, 0.05, 0.0, 0)], {2: 0.01}),
        ([(0, 0.01, 0.0, 0), (0, 0.01, 0.0, 0), (2, 0.05, 0.0, 0), (2, 0.02, 0.0, 0)], {2: 0.02}),
    ],
)
def test_what_rounds_are_taken_to_cost(
    rounds: list[tuple[int, float, float, int]], costs: dict[int, float]
) -> None:
    length = DraftLength(4, adaptive=True)
    for one in rounds:
        length.observe_cost(*one)
    assert length.times.costs(costs) == pytest.approx(costs)


def test_the_rate_is_conditional() -> None:
    """Drafts after the first rejected one say nothing: one failure a round, not k."""
    length = DraftLength(8, adaptive=True, overall=Acceptance(5.0, 10.0))

    def told(accepted: float, tried: float) -> None:
        assert (length.overall.accepted, length.overall.tried) == pytest.approx((accepted, tried))

    length.observe(8, 8, 0)
    told(5, 11)
    length.observe(8, 8, 8)
    told(13 - foretold(8), 19 - foretold(8))
    length.observe(0, 0, 0)  # nothing was to be drafted
    told(13 - foretold(8), 19 - foretold(8))
    length.observe(8, 0, 0)  # nothing could be: as good as rejected
    told(13 - foretold(8), 20 - foretold(8))
    length.observe(8, 3, 2)
    told(15 - foretold(8) - foretold(3), 23 - foretold(8) - foretold(3))


@pytest.mark.parametrize("k", [1, 2, 4, 6])
@pytest.mark.parametrize("rate", [0.2, 0.58, 0.9])
def test_what_is_expected_is_what_comes(k: int, rate: float) -> None:
    """Where chances rise along a round as `chance_of_next` says, the first one's is found at any k.

    10,000 rounds; a false alarm is rarer than 1e-6: 5 standard errors of at most 0.5 / sqrt(10,000).
    """
    source, length = random.Random(k), DraftLength(k, adaptive=True, overall=Acceptance(0.0, 0.0))
    for _ in range(10_000):
        accepted = next((a for a in range(k) if source.random() >= chance_of_next(rate, a)), k)
        length.observe(k, k, accepted)
    assert length.rate == pytest.approx(rate, abs=0.025)


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


def test_a_probe_can_overrule_what_was_seen() -> None:
    length = DraftLength(4, adaptive=True)
    play(length, 110, 0.0)
    assert length.rate < 0.1
    while not length.choose():
        length.observe_cost(0, 0.01, 0.0, 0)
    assert 0.9 * PROBE_MEMORY < length.overall.tried <= PROBE_MEMORY, "nor is it forgotten"
    for _ in range(4):
        length.observe(2, 2, 2)
    assert length.rate > 0.3


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


def test_no_request_gets_more_than_the_most_that_one_wants() -> None:
    for adaptive in (True, False):
        length = DraftLength(6, adaptive=adaptive)
        for wants, k in (([6, 0], 6), ([2, 1], 2), ([0, 0], 0)):
            length.attend([(Acceptance(), most) for most in wants])
            assert length.choose() == k
    length = DraftLength(8, adaptive=False, tiers=(0, 4, 8))
    length.attend([(Acceptance(), 3)])
    assert length.choose() == 4, "the shape that holds what is wanted"


def test_costs_of_few_and_many_requests_are_kept_apart() -> None:
    """Verifying four drafts costs nothing more alone, and four times as much among sixteen."""
    length = DraftLength(4, adaptive=True)
    for count in (1, 16) * 8:
        length.attend([(Acceptance(9, 10), 4) for _ in range(count)])
        length.times.begun = True
        for k in (0, 4):
            length.observe_cost(k, 0.010 * (1 + (k * 1.5 if count == 16 else 0)), 0.0, 0)
    for count, wanted in ((1, 4), (16, 0), (1, 4), (20, 0)):
        length.attend([(Acceptance(9, 10), 4) for _ in range(count)])
        length.times.plain_best = PATIENCE
        assert length.choose() == wanted, count
