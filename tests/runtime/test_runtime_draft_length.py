"""The choice of the draft length: fixed if requested, else by acceptance and cost.

And of lookup alone.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spd.formats.demo import demo_folder
from spd.runtime import EngineConfig, SamplingParams, make_plan
from spd.runtime.engine import draft_length as rules
from spd.runtime.engine.draft_length import PLAIN_PATIENCE, Acceptance, DraftLength
from spd.runtime.engine.round_times import MIN_SAMPLES, PROBE_INTERVAL, RoundTimes
from spd.runtime.plan.config import LONG_MATCH, NGRAM_MIN
from spd.runtime.plan.plan import EnginePlan
from tests.helpers import Patch, assert_same_runs, make_engine, random_prompts, run_all


def play(length: DraftLength, rounds: int, rate: float) -> list[int]:
    """Return the k of each round if this share of the drafts is accepted, all of them leading."""
    chosen = []
    for _ in range(rounds):
        chosen.append(k := length.choose_k())
        length.observe_cost(k, 0.01, 0.001 * k, k)
        length.observe(k, k, round(rate * k))
    return chosen


@pytest.mark.parametrize(
    ("maximum", "adaptive", "rounds", "rate", "ks"),
    [
        *[(maximum, False, 100, rate, {maximum}) for maximum in (0, 1, 7) for rate in (0.0, 1.0)],
        (0, True, 100, 0.0, {0}),
        (5, True, rules.WARM_UP_ROUNDS, 0.0, {5}),  # the first rounds measure
        (1, True, 900, 0.0, {0, 1}),  # a probe is not above the maximum
    ],
)
def test_no_other_k_is_run(
    maximum: int, adaptive: bool, rounds: int, rate: float, ks: set[int]
) -> None:
    chosen = play(DraftLength(maximum, adaptive), rounds, rate)
    assert set(chosen[60:] if rounds == 900 else chosen) == ks


def test_without_acceptance_k_goes_to_zero_and_is_probed_ever_less() -> None:
    chosen = play(DraftLength(6, adaptive=True), 3000, 0.0)
    settled = next(i for i in range(len(chosen)) if not any(chosen[i : i + PROBE_INTERVAL - 1]))
    probes = [i for i in range(settled, len(chosen)) if chosen[i] and not chosen[i - 1]]
    lasted = [next(n for n in range(1, 99) if not chosen[i + n]) for i in probes[:-1]]
    assert set(lasted) == {rules.PROBE_OUTCOMES}, "each tries as many drafts as make evidence"
    gaps = [b - a - rules.PROBE_OUTCOMES + 1 for a, b in itertools.pairwise(probes)]
    assert gaps[:4] == [*(n * PROBE_INTERVAL for n in (2, 4, 8)), rules.MAX_PROBE_INTERVAL]
    assert set(gaps[3:]) == {rules.MAX_PROBE_INTERVAL}


def test_a_rounds_slots_weigh_together() -> None:
    """The outcomes of sixteen slots are one round's evidence: their order does not matter."""
    outcomes = [0, 4, 4, 2, 1, 4, 0, 3, 4, 4, 1, 2, 4, 0, 4, 3]
    rates = []
    for order in (outcomes, sorted(outcomes), sorted(outcomes, reverse=True)):
        length = DraftLength(4, adaptive=True)
        for _ in range(20):
            length.observe_cost(4, 0.01, 0.004, 4)
            for accepted in order:
                length.observe(4, 4, accepted)
        rates.append(length.rate)
    tried = [accepted + (accepted < 4) for accepted in outcomes]
    correlated = sum(map(rules.correlated_acceptance, tried))
    assert rates == pytest.approx(
        [(sum(outcomes) - correlated) / (sum(tried) - correlated)] * 3, rel=0.02
    )


def test_a_few_bad_rounds_are_drafted_through() -> None:
    """After plain rounds the drafter has to catch up, so they are run only after some patience."""
    length = DraftLength(4, adaptive=True)
    length.times_by_load[1, False, 0] = length.times
    length.times.has_started = True
    for _ in range(MIN_SAMPLES):
        for k in (0, 2):
            length.observe_cost(k, 0.01 + 0.005 * k, 0.0, 0)
    for rate in (0.1, 0.9) * 10:
        length.overall = Acceptance(20 * rate, 20.0)
        assert [length.choose_k() for _ in range(PLAIN_PATIENCE)].count(0) <= rules.PLAIN_SAMPLES, (
            "but where it is timed"
        )
    length.overall = Acceptance(2, 20)
    assert not [length.choose_k() for _ in range(2 * PLAIN_PATIENCE)][-1]


seconds = st.floats(1e-6, 10)
outcomes = st.lists(
    st.tuples(st.booleans(), st.booleans(), seconds, st.just(0.0) | seconds), max_size=60
)


@settings(max_examples=80, deadline=None)
@given(maximum=st.integers(0, 5), outcomes=outcomes, forwards=st.booleans())
def test_k_stays_in_range_whatever_is_observed(
    maximum: int, outcomes: list[Any], forwards: bool
) -> None:
    length = DraftLength(maximum, adaptive=True)
    for proposed, accepted, verify_seconds, draft_seconds in outcomes:
        k = length.choose_k()
        assert 0 <= k <= maximum
        length.observe_cost(k, verify_seconds, draft_seconds, k * forwards)
        length.observe(k, k * proposed, k * proposed * accepted)
        assert 0 <= length.rate <= 1
        assert all(cost > 0 for cost in length.times.costs(range(maximum + 1)).values())


def test_each_requests_own_acceptance_weighs() -> None:
    """Requests that accept nearly all and nothing need more drafts than two that accept half."""
    maximum = 6
    source = random.Random(0)
    length = DraftLength(maximum, adaptive=True)
    good, bad = (Acceptance(), Acceptance())
    for _ in range(200):
        length.set_requests([(good, maximum), (bad, maximum)])
        length.observe_cost(maximum, 0.010, 0.001 * maximum, maximum)
        for acceptance, rate in ((good, 0.97), (bad, 0.0)):
            accepted = next((i for i in range(maximum) if source.random() >= rate), maximum)
            length.observe(maximum, maximum, accepted, acceptance)
    assert good.rate(0.5) > 0.9 and bad.rate(0.5) < 0.3
    length.times_by_load[1, False, 0] = length.times_by_load[2, False, 0]  # the same costs
    length.times.has_started = True
    for acceptance, low, high in ((good, 6, 6), (bad, 0, 1)):
        length.set_requests([(acceptance, 6)])
        assert low <= length.choose_k() <= high
    length.set_requests([(good, 6), (bad, 6)])
    rates = [acceptance.rate(length.rate) for acceptance in (good, bad)]
    tokens = [rules.expected_tokens([rate], [6], 6)[6] for rate in rates]
    assert rules.expected_tokens(rates, [6, 6], 6)[6] == pytest.approx(sum(tokens) / 2)


LONG = 4 * rules.SHORT_CONTEXT


def play_at(length: DraftLength, positions: int, row_seconds: float, rounds: int) -> list[int]:
    """Return the k of each round of contexts whose rows cost so much; most drafts are accepted."""
    length.set_positions(positions)
    chosen = []
    for _ in range(rounds):
        chosen.append(k := length.choose_k())
        length.observe_cost(k, 0.010 + row_seconds * k, 0.0002 * k, k)
        length.observe(k, k, round(0.8 * k))
    return chosen


def test_each_context_length_has_its_own_costs() -> None:
    """Where a row costs little many drafts pay, where it costs a round none does; at once."""
    length = DraftLength(6, adaptive=True)
    length.set_requests([(Acceptance(), 6)])
    for _ in range(2):
        play_at(length, 100, 0.0001, 150)
        play_at(length, LONG, 0.05, 150)
    assert min(play_at(length, 100, 0.0001, 4)) >= 5
    assert max(play_at(length, LONG, 0.05, 4)) == 0


def test_masks_of_rows_count_where_a_request_has_a_grammar() -> None:
    """Drafts that pay without the host's masks do not where each row's mask takes as long as a round."""
    length = DraftLength(4, adaptive=True)
    chosen: dict[bool, list[int]] = {}
    for is_constrained in (False, True, False, True):
        length.set_requests([(Acceptance(), 4)], is_constrained=is_constrained)
        chosen[is_constrained] = []
        for _ in range(100):
            chosen[is_constrained].append(k := length.choose_k())
            mask_seconds = 0.010 * (k + 1) if is_constrained else 0.0
            length.observe_cost(k, 0.010, 0.0002 * k, k, gap=mask_seconds)
            length.observe(k, k, round(0.5 * k))
    assert min(chosen[False][-20:]) >= 2
    assert chosen[True][-20:].count(0) >= 16, "all but probes"


def test_rounds_that_something_delayed_do_not_count() -> None:
    """Another program takes the processor in every other round, for six rounds' time."""
    source = random.Random(3)
    length = DraftLength(4, adaptive=True)
    length.set_requests([(Acceptance(), 4)])
    chosen = []
    for _ in range(2000):
        chosen.append(k := length.choose_k())
        delay = 0.060 if source.random() < 0.5 else 0.0
        length.observe_cost(k, 0.010 + 0.003 * k + delay, 0.003 * k, k)
        length.observe(k, k, min(k, source.randrange(2)))
    assert chosen[-1000:].count(0) >= 700, "half of the first drafts are accepted, and no other"


def test_probes_that_cost_much_become_rarer() -> None:
    """All of them take about a hundredth of the time, where a draft costs as much as a round."""
    length = DraftLength(4, adaptive=True)
    chosen = []
    for _ in range(6000):
        chosen.append(k := length.choose_k())
        length.observe_cost(k, 0.010 + 0.005 * k, 0.005 * k, k)
        length.observe(k, k, 0)
    lasting = chosen[-3000:]
    extra = sum(lasting)  # a draft costs as much as a plain round
    assert 0 < extra <= 0.02 * len(lasting)


@pytest.mark.parametrize(("cap", "k"), [(8, 8), (3, 3)])
def test_a_load_with_a_grammar_times_lookup_alone_and_plain_rounds(cap: int, k: int) -> None:
    length = DraftLength(3, adaptive=True, lookup_k=8)
    length.set_requests([(Acceptance(), cap)], is_constrained=True)
    timed = 1 + MIN_SAMPLES
    expected = [3] * rules.WARM_UP_ROUNDS + [k] * timed + [0] * rules.PLAIN_SAMPLES
    assert [length.choose_k() for _ in expected] == expected


def test_the_round_behind_a_prompt_is_not_timed() -> None:
    """Caches are cold there, so it would make rounds without drafts look dear in short replies."""
    engine = make_engine(demo_folder(), spec="mtp", adaptive=True, slots=1)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    runs = run_all(engine, random_prompts(2, 20, 256), [params] * 2)
    rounds = sum(run.metrics.rounds for run in runs)
    timed = sum(map(len, engine.draft_length.times.verify.values()))
    assert timed == rounds - len(runs) > 0


def test_a_new_context_length_is_timed_without_drafts_first_and_begins_with_the_nearest() -> None:
    length = DraftLength(6, adaptive=True)
    length.set_requests([(Acceptance(), 6)])
    play_at(length, 100, 0.0001, 150)
    assert length.choose_k() >= 5
    chosen = play_at(length, LONG, 0.0002, 12)
    assert chosen[:MIN_SAMPLES] == [0] * MIN_SAMPLES and min(chosen[MIN_SAMPLES:8]) >= 5
    assert length.break_even(6) == pytest.approx((0.010 + 6 * 0.0004) / 0.010, rel=0.01)


@pytest.mark.parametrize(
    ("requests", "seconds_a_row", "longest"), [(1, 0.002, 6), (1, 0.02, 0), (8, 0.002, 0)]
)
def test_sure_drafts_make_rounds_longer_where_that_pays(
    requests: int, seconds_a_row: float, longest: int
) -> None:
    """Six sure tokens of one request pay for rows that cost less, of all requests together."""
    length = DraftLength(6, adaptive=True, tiers=(0, 2, 6))
    length.set_requests([(Acceptance(), 6)] * requests)
    for k in (0, 6):
        length.times.verify[k].extend([0.010 + k * seconds_a_row] * MIN_SAMPLES)
    assert length.longest_k(0) == longest
    assert length.longest_k(6) == 6
    assert [length.round_up(drafts) for drafts in (0, 1, 3)] == [0, 2, 6]
    length.adaptive = False
    assert length.longest_k(2) == 2


def test_unmeasured_lengths_cost_in_proportion() -> None:
    short = RoundTimes()
    short.verify |= {k: deque([seconds] * MIN_SAMPLES) for k, seconds in ((0, 1.0), (4, 2.0))}
    long = RoundTimes(similar=short)
    assert long.verify_times() == {0: 1.0, 4: 2.0}
    long.verify[0].extend([3.0] * MIN_SAMPLES)
    assert long.verify_times() == {0: 3.0, 4: 6.0}
    long.verify[4].extend([9.0] * MIN_SAMPLES)
    assert long.verify_times() == {0: 3.0, 4: 9.0}


@pytest.mark.slow
def test_the_engine_tells_how_long_contexts_are(monkeypatch: Patch) -> None:
    """Contexts that grow past a class's border are counted in the next one; no text changes."""
    monkeypatch.setattr(rules, "SHORT_CONTEXT", 64)
    prompts = random_prompts(1, 44, 200)
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=3)]
    plain = run_all(make_engine(demo_folder()), prompts, params)
    for lag in (0, 2):
        engine = make_engine(demo_folder(), spec="mtp", adaptive=True, lag=lag)
        assert_same_runs(run_all(engine, prompts, params), plain)
    assert {key for key, times in engine.draft_length.times_by_load.items() if times.verify} == {
        (1, False, 0),
        (1, False, 1),
    }


TOKENS = 64
MAX_DRAFTS = 4
"""Of every request, and drafts a round."""


def simulate(
    policy: DraftLength, count: int, rate: float, requests: int, *, waves: bool = False
) -> float:
    """Return the tokens per millisecond of `count` concurrent requests, of `requests` in all.

    The next request begins where one ends, or (waves) where all have ended. Sixteen rows are
    verified at once, further ones are costly. Times have noise and outliers.
    """
    source = random.Random(1)
    clock = random.Random(0)
    time = 0.0
    k = 0
    num_started = 0
    active: list[
        Any
    ] = []  # how likely a draft is accepted, how many tokens are left, what is known of it

    def jitter(time: float) -> float:
        hiccup = 6 if clock.random() < 0.02 else 1
        return time * clock.uniform(0.95, 1.08) * hiccup

    while active or num_started < requests:
        before = len(active)
        active = [entry for entry in active if entry[1] > 0]
        begin = 0 if waves and active else min(count - len(active), requests - num_started)
        for _ in range(begin):
            active.append([min(0.98, max(0.02, source.gauss(rate, 0.1))), TOKENS, Acceptance()])
        # the drafter's cache of a prompt is written
        num_started = num_started + begin
        time = time + 0.85 * begin
        if begin or len(active) != before:
            policy.set_requests([(acceptance, policy.maximum) for _, _, acceptance in active])
        if not active:
            continue
        next_k = policy.choose_k()
        rows = len(active) * (k + 1)
        verify = jitter(1.7 + 0.1 * len(active) + 0.02 * min(rows, 16) + 0.1 * max(rows - 16, 0))
        draft = jitter(next_k * (0.35 + 0.03 * len(active)))
        time += (
            verify + draft + (0 if next_k else 0.06 + 0.008 * len(active))
        )  # its cache is kept up
        policy.observe_cost(k, verify, draft, next_k)
        for entry in active:
            drafted = k if entry[1] < TOKENS else 0
            accepted = next((i for i in range(drafted) if source.random() >= entry[0]), drafted)
            if drafted:
                policy.observe(k, drafted, accepted, entry[2])
            entry[1] -= accepted + 1
        k = next_k
    return TOKENS * requests / time


def best_of(count: int, rate: float, **waves: bool) -> tuple[float, float]:
    """Return the speed without drafts, with an idle drafter, and that of the best fixed k."""
    speeds = [
        simulate(DraftLength(k, False), count, rate, 12 * count, **waves)
        for k in range(MAX_DRAFTS + 1)
    ]
    return speeds[0], max(speeds)


@pytest.mark.covers(2)
@pytest.mark.parametrize("waves", [False, True])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.63, 0.9])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_nearly_the_best_of_all_fixed_lengths_is_reached(
    count: int, rate: float, waves: bool
) -> None:
    """For few requests two or three drafts are best, for many none."""
    plain, best = best_of(count, rate, waves=waves)
    policy = DraftLength(MAX_DRAFTS, True)
    simulate(policy, count, rate, 4 * count, waves=waves)
    assert simulate(policy, count, rate, 40 * count, waves=waves) > max(0.93 * best, 0.945 * plain)


@pytest.mark.parametrize("count", [1, 4])
def test_drafting_comes_back_when_texts_change(count: int) -> None:
    policy = DraftLength(MAX_DRAFTS, True)
    simulate(policy, count, 0.02, 30 * count)
    simulate(policy, count, 0.9, 80 * count)
    plain, best = best_of(count, 0.9)
    assert simulate(policy, count, 0.9, 20 * count) > 0.9 * best > plain


K = 3
COPYING = 8


def copied(
    copying: list[bool], draft_seconds: float = 0.004, rate: float = 0.6, row: float = 0.0001
) -> Any:
    """Return the policy, a request's acceptance, and the k of each round; -1 where lookup could continue
    a model's drafts.

    Lookup's drafts are all accepted in rounds that copy; in other rounds it has no match.
    """
    length = DraftLength(K, True, lookup_k=COPYING)
    acceptance = Acceptance()
    chosen = list[int]()
    length.set_requests([(acceptance, COPYING)])
    for copies in copying:
        k = length.choose_k()
        chosen.append(-1 if length.chained else k)
        forwards = length.chained or (k if k <= K else 0)
        length.observe_cost(k, 0.010 + row * k, draft_seconds * forwards, forwards)
        drafted = k if copies else forwards
        length.observe(
            k=k,
            drafted=drafted,
            accepted=k if copies else round(rate * drafted),
            acceptance=acceptance,
            match=7 * copies,
        )
    return length, acceptance, chosen


def test_lookup_drafts_alone_while_text_is_copied() -> None:
    _, _, chosen = copied([False] * 40 + [True] * 20 + [False] * 20)
    assert COPYING not in chosen[:41] and COPYING not in chosen[62:]
    assert chosen[41:61].count(COPYING) > 15, "but for the rounds that time another k"


def chained_rounds(share: float, row: float, rounds: int = 400) -> float:
    """Return the share of rounds whose drafts lookup may continue, of the later half.

    share: how many of the model's drafts end in text that lookup continues, which is then right.
    row: seconds of a draft's verification.
    """
    source = random.Random(2)
    length = DraftLength(K, True, lookup_k=COPYING)
    acceptance = Acceptance()
    length.set_requests([(acceptance, COPYING)])
    times = 0
    for number in range(rounds):
        k = length.choose_k()
        model_k = length.chained or (k if k <= K else 0)
        length.observe_cost(k, 0.010 + row * k, 0.002 * model_k, model_k)
        continues = model_k > 0 and source.random() < share
        accepted = k if continues else min(model_k, source.choice((0, 1, 3)))
        drafted = k if continues else model_k
        length.observe(k, drafted, accepted, acceptance, -model_k if continues else 0)
        acceptance.has_lookup_match = False  # the copies are short
        times += number >= rounds // 2 and length.chained > 0
    return times / (rounds // 2)


def test_lookup_continues_a_models_drafts_where_it_pays() -> None:
    """Where copies begin often and rows are cheap; not where none begins, nor where rows are dear."""
    assert chained_rounds(0.5, 0.0001) > 0.8
    assert chained_rounds(0.5, 0.01) == 0.0
    assert chained_rounds(0.0, 0.002) == 0.0


def test_a_chained_round_counts_for_the_model_and_for_lookup() -> None:
    """The model made three of eight drafts; lookup is judged where these were accepted."""
    length = DraftLength(K, True, lookup_k=COPYING)
    acceptance = Acceptance()
    for accepted in (1, 5):
        before = length.lookup.tried
        length.observe(COPYING, COPYING, accepted, acceptance, -K)
        assert (length.lookup.tried != before) == (accepted >= K)
    tried = [rules.uncorrelated_drafts(K, accepted)[0] for accepted in (1, K)]
    assert acceptance.tried == pytest.approx(rules.DECAY * tried[0] + tried[1])


def test_what_lookup_gives_says_nothing_of_the_model() -> None:
    length, acceptance, _ = copied([False] * 60)
    before = length.rate, acceptance.accepted, acceptance.tried
    for _ in range(30):
        length.observe_cost(COPYING, 0.011, 0.0, 0)
        length.observe(k=COPYING, drafted=COPYING, accepted=COPYING, acceptance=acceptance, match=7)
    assert (length.rate, acceptance.accepted, acceptance.tried) == before
    length.observe(COPYING, 0, 0, acceptance)
    assert (
        length.rate,
        acceptance.accepted,
        acceptance.tried,
    ) == before and not acceptance.has_lookup_match


def test_lookup_alone_ends_once_its_drafts_are_rejected() -> None:
    """Where copies end at once, lookup no longer drafts alone."""
    length, acceptance, _ = copied([False] * 40)
    chosen = list[int]()
    for _ in range(60):
        acceptance.has_lookup_match = True
        chosen.append(k := length.choose_k())
        length.observe_cost(k, 0.010 + 0.0001 * k, 0.004 * min(k, K) * (k <= K), k if k <= K else 0)
        length.observe(
            k=k,
            drafted=k,
            accepted=0 if k > K else 1,
            acceptance=acceptance,
            match=6 if k > K else 0,
        )
    assert COPYING in chosen[:10] and COPYING not in chosen[-20:]


def test_where_no_model_pays_a_match_is_followed() -> None:
    """Plain rounds report matches, so no slot has to draft for that; right ones are followed."""
    length, acceptance, _ = copied([False] * 60, draft_seconds=0.05, rate=0.3)
    length.times.trials.clear()
    assert length.choose_k() == 0
    for match, k in ((0, 0), (6, COPYING)):
        length.observe(k=0, drafted=0, accepted=0, acceptance=acceptance, match=match)
        length.times.trials.clear()
        assert acceptance.has_lookup_match == (match > 0) and length.choose_k() == k
    for accepted, trail in ((COPYING, True), (3, False)):
        length.observe(
            k=COPYING, drafted=COPYING, accepted=accepted, acceptance=acceptance, match=6
        )
        assert acceptance.has_lookup_match == trail


def plan_of(**options: Any) -> EnginePlan:
    return make_plan(EngineConfig(**{"model": demo_folder(), "device": "cpu", **options}))


@pytest.mark.parametrize(
    ("options", "spec", "lengths"),
    [
        ({"spec": "mtp+ngram"}, "mtp+ngram", (3, 8)),
        ({"spec": "draft+ngram"}, "draft+ngram", (4, 8)),
        ({"spec": "eagle3+ngram"}, "eagle3+ngram", (4, 8)),
        ({"spec": "auto+ngram"}, "mtp+ngram", (3, 8)),
        ({"spec": "mtp+ngram", "draft_max": 2}, "mtp+ngram", (2, 2)),
        ({"spec": "mtp+ngram", "draft_max": 16}, "mtp+ngram", (3, 16)),
        ({"spec": "mtp+ngram", "draft_max": 16, "adaptive": False}, "mtp+ngram", (16, 16)),
        ({"spec": "mtp+ngram", "adaptive": False}, "mtp+ngram", (3, 3)),
        ({"spec": "mtp+ngram", "verify": "block"}, "mtp+ngram", (3, 3)),
        ({"spec": "mtp+ngram", "draft_max": 0}, "off", (0, 0)),
        ({"spec": "mtp"}, "mtp", (3, 3)),
        ({"spec": "ngram"}, "ngram", (8, 8)),
    ],
)
def test_the_plan_limits_the_drafts_of_model_and_lookup(
    options: dict[str, Any], spec: str, lengths: tuple[int, int]
) -> None:
    plan = plan_of(**options)
    assert plan.spec == spec and (plan.shape.model_drafts, plan.shape.draft_max) == lengths
    assert plan.copy_draft_max == (plan.shape.draft_max if lengths[0] < lengths[1] else 0)
    assert max(plan.draft_tiers) == lengths[0]


def test_lookup_next_to_a_model_needs_longer_matches(tiny: Any) -> None:
    alone = (plan_of(spec="ngram"), plan_of(model=tiny("qwen3"), spec="auto+ngram"))
    assert {plan.ngram_min for plan in alone} == {NGRAM_MIN}
    for options, shortest in (({}, LONG_MATCH), ({"ngram_min": 2}, 2), ({"ngram_max": 4}, 4)):
        assert plan_of(spec="mtp+ngram", **options).ngram_min == shortest


@pytest.mark.slow
def test_lookup_drafts_alone_on_the_demo() -> None:
    """A prompt full of one line: lookup drafts alone, and the text is the plain one."""
    prompt = random_prompts(1, 20, 900, seed=3)[0] * 4
    params = SamplingParams(
        max_tokens=60, ignore_eos=True, logit_bias=tuple((t, 12.0) for t in prompt[:3])
    )
    plain = run_all(make_engine(demo_folder(), ctx=512), [prompt], [params])[0]
    engine = make_engine(demo_folder(), ctx=512, spec="mtp+ngram", adaptive=True)
    run = run_all(engine, [prompt], [params])[0]
    drafts = engine.plan.shape.model_drafts
    assert run.output == plain.output
    assert run.rounds[0].k == 0 and len(run.rounds) > rules.WARM_UP_ROUNDS
    pairs = itertools.pairwise(run.rounds)
    alone = [after for r, after in pairs if after.k > drafts and not r.draft_forwards]
    assert max(r.accepted for r in alone) > drafts, [r.k for r in run.rounds]


def test_a_forward_that_drafts_all_costs_the_same_for_every_k() -> None:
    """Times of a block drafter are those of one forward, whatever k is; without drafts there is none."""
    length = DraftLength(maximum=7, adaptive=True, drafts_at_once=True)
    length.set_requests([])
    for k in (0, 3, 7):
        for _ in range(MIN_SAMPLES):
            length.observe_cost(k, 0.010, 0.004 * (k > 0), forwards=int(k > 0))
    costs = length.times.costs(range(8))
    assert costs[0] == pytest.approx(0.010, rel=1e-3)
    assert [costs[k] for k in range(1, 8)] == pytest.approx([0.014] * 7, rel=1e-3)
