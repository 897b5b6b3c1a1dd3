"""Speculation is invisible: the same tokens, text and end with it and without it, whatever else varies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime import Engine, Request, SamplingParams
from tests.helpers import (
    Run,
    accepted,
    assert_same,
    drafted,
    make_engine,
    next_turn,
    random_prompts,
    run_all,
    run_one,
    run_requests,
)
from tests.page_checks import check_table
from tests.pairs import Pairs

TEMPERATURES = (0.0, 0.8, 1.3)
VOCAB = 256
Work = list[tuple[tuple[int, ...], SamplingParams]]
PROMPTS = random_prompts(4, 20, VOCAB) + random_prompts(2, 75, VOCAB, seed=1)
SLOW = pytest.mark.slow


def matrix_params(count: int = 24) -> Work:
    return [
        (prompt, SamplingParams(temperature=t, max_tokens=count, seed=100 + i))
        for i, prompt in enumerate(PROMPTS)
        for t in TEMPERATURES
    ]


def outputs(engine: Engine, work: Work) -> list[Run]:
    return run_all(engine, [p for p, _ in work], [q for _, q in work])


@pytest.fixture(scope="session")
def plain(pairs: Pairs) -> Callable[..., list[Run]]:
    """Plain runs of a pair's target, each once."""
    known: dict[Any, list[Run]] = {}

    def get(name: str, count: int = 24, **wishes: Any) -> list[Run]:
        model = pairs.get(name).model
        key = model, count, tuple(sorted(wishes.items()))
        if key not in known:
            known[key] = outputs(make_engine(model, **wishes), matrix_params(count))
        return known[key]

    return get


@pytest.fixture(scope="module")
def target(pairs: Pairs) -> Path:
    return pairs.get("self").model


@pytest.fixture(scope="module")
def draft(pairs: Pairs) -> Path:
    drafter: Path = pairs.get("draft").speculation["draft_model"]
    return drafter


# -- the matrices --------------------------------------------------------------------------------------

METHODS = ("ngram", "draft", "self", "draft+ngram")
BFLOAT16 = {"dtype": "bfloat16"}
FAMILIES = ("mistral", "qwen2", "gemma2", "gemma3", "phi3")
"""Whose layers slide or cap, over prompts that are longer than their windows."""
LOOKED_UP = (
    "olmo3",
    "ministral3",
    "exaone4",
    "cohere2",
    "hunyuan",
    "granite_moe",
    "gpt_oss",
    "gemma4",
    "gemma4_moe",
)
"""Whose attention, norms or caches are their own: beside lookup, in a batch and behind a lag."""
SPARSE = ("deepseek_v3", "deepseek_v2_lite", "glm4_moe", "qwen3_moe", "ernie4_5_moe")
"""Of latent attention and routed experts."""
EVERY_LAG = (0, 1, 2)
Row = tuple[str, int, Sequence[int], dict[str, Any]]
ROWS: list[Any] = [
    # name, k, lags, wishes
    *((method, k, EVERY_LAG, {}) for method in METHODS for k in (1, 2, 4, 8)),
    *((name, k, EVERY_LAG, {}) for name, k in (("one", 1), ("deepseek", 2), ("three", 3), ("one", 4))),
    *((name, k, EVERY_LAG, {}) for name, k in (("speculators", 1), ("eagle", 2))),
    *((name, k, EVERY_LAG, {}) for name, k in (("speculators", 3), ("eagle", 4))),
    *((m, k, (lag,), BFLOAT16) for m in METHODS if m != "self" for k, lag in ((1, 0), (4, 1), (8, 2))),
    *(
        (f"deepseek_v3/{method}", k, (lag,), {"dtype": dtype, "slots": slots})
        for dtype in ("float32", "bfloat16")
        for method in ("ngram", "draft")
        for k, lag, slots in ((1, 2, 1), (4, 1, 4))
    ),
    *(
        (f"{family}/{method}", k, (lag,), {"slots": slots})
        for family in FAMILIES
        for method, k, lag, slots in (("ngram", 3, 0, 1), ("draft", 1, 1, 1), ("draft", 5, 2, 3))
    ),
    *((f"{family}/ngram", 3, (1,), {"slots": 3}) for family in LOOKED_UP),
    *(
        pytest.param(f"{family}/{method}", k, (lag,), {"dtype": dtype, "slots": slots}, marks=SLOW)
        for family in (*SPARSE, *LOOKED_UP)
        for dtype in ("float32", "bfloat16")
        for method in ("ngram", *(("draft",) if family in SPARSE else ()), "self")
        for k, lag, slots in ((1, 2, 3), (2, 0, 1), (3, 1, 4), (4, 0, 4), (4, 2, 2))
    ),
]


@pytest.mark.parametrize(("name", "k", "lags", "wishes"), ROWS, ids=str)
def test_tokens_do_not_depend_on_drafter_k_temperature_or_lag(
    pairs: Pairs,
    plain: Callable[..., list[Run]],
    name: str,
    k: int,
    lags: Sequence[int],
    wishes: dict[str, Any],
) -> None:
    # Models that take longer answer every fourth question.
    pair, count, every = pairs.get(name), *((24, 1) if name in METHODS else (16, 4))
    dtype = {n: wishes[n] for n in ("dtype",) if n in wishes}
    expected, work = plain(name, count, **dtype)[::every], matrix_params(count)[::every]
    reference: list[Run] = []
    if name == "draft+ngram":
        wishes = {"ngram_min": 1, **wishes}
    for lag in lags:
        runs = outputs(pair.engine(k, lag=lag, **wishes), work)
        assert [run.output for run in runs] == [run.output for run in expected]
        reference = reference or runs
        # At fixed k the drafts and acceptances are those of the synchronous run, round by round.
        assert [run.drafts for run in runs] == [run.drafts for run in reference]
    method = name.rpartition("/")[2]
    least = 0 if method == "ngram" and every > 1 else 1  # random text rarely goes on as n-grams say
    assert drafted(reference) > 0 and accepted(reference) >= least, "the test saw nothing"
    if method in ("draft", "one", "three", "deepseek", "eagle", "speculators"):
        assert accepted(reference) < drafted(reference), "nothing was rejected"
        if k > 1 and "/" not in name:
            assert max(record.accepted for run in reference for record in run.rounds) > 1


PARAMETERS: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all_truncations": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"temperature": 0.7, "frequency_penalty": 0.8},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "bias": {"logit_bias": ((5, 4.0), (6, -100.0), (7, 3.5)), "temperature": 0.9},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(0, 256, 16))},
    "stop_ids": {"temperature": 1.0, "stop_token_ids": tuple(range(5, 256, 16))},
    "stop_strings": {"temperature": 1.1, "stop": ("a", "e", "7", "Q")},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "ignore_eos": {"ignore_eos": True, "temperature": 1.3},
    "max_tokens": {"max_tokens": 7},
}


@pytest.mark.parametrize("names", [METHODS, ("one", "one+ngram")], ids=lambda names: names[0])
@pytest.mark.parametrize("parameter", sorted(PARAMETERS))
def test_every_parameter_with_every_proposer(pairs: Pairs, parameter: str, names: tuple[str, ...]) -> None:
    options = {"max_tokens": 28, "seed": 5, **PARAMETERS[parameter]}
    asked = PROMPTS[:4] if names == METHODS else PROMPTS[1:4:2]
    work, base = [(prompt, SamplingParams(**options)) for prompt in asked], pairs.get(names[0]).plain()
    expected = outputs(base, work)
    for name in names:
        pair, wishes = pairs.get(name), {"ngram_min": 1} if name == "draft+ngram" else {}
        engines = [pair.engine(4, lag=lag, **wishes) for lag in (0, 2)]
        for engine in [*engines, *([pair.changing(lag=1)] if name == "one+ngram" else [])]:
            assert_same(outputs(engine, work), expected, (name, engine.plan.lag))
    neutral = SamplingParams(temperature=work[0][1].temperature, max_tokens=28, seed=5)
    if parameter not in ("logprobs", "ignore_eos"):
        without = outputs(base, [(prompt, neutral) for prompt in asked])
        assert [run.output for run in without] != [run.output for run in expected], "no visible effect"


SOME = ("top_p", "repetition", "bias", "stop_ids", "logprobs", "frequency")


@pytest.mark.parametrize(
    ("name", "lag", "kinds"),
    [
        *(("ngram", 0, SOME), ("draft", 0, SOME), ("draft", 2, SOME), ("self", 1, SOME)),
        *(("three", 0, SOME), ("deepseek", 2, SOME), ("eagle", 2, sorted(PARAMETERS))),
        pytest.param("speculators", 0, sorted(PARAMETERS), marks=SLOW),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_of_different_requests_equals_each_alone(
    pairs: Pairs, name: str, lag: int, kinds: Sequence[str]
) -> None:
    work = [
        (PROMPTS[i % 6], SamplingParams(**{"max_tokens": 10 + 4 * (i % 6), "seed": i, **PARAMETERS[kind]}))
        for i, kind in enumerate(kinds)
    ]
    pair = pairs.get(name)
    alone = [run_one(pair.model, *one) for one in work]
    assert_same(outputs(pair.engine(3, slots=4, lag=lag), work), alone)


@pytest.mark.parametrize(
    "name",
    [
        *("off", "ngram", "draft", "draft+ngram", "three", "eagle", "deepseek_v3/ngram", "gemma2/ngram"),
        *(pytest.param(name, marks=SLOW) for name in ("one", "deepseek", "speculators")),
    ],
)
def test_a_prefix_hit_drafts_as_a_miss_does(pairs: Pairs, name: str) -> None:
    """Also where the reply goes on from the reply: what a turn generated is found under its own kind."""
    common, pair = random_prompts(1, 150, VOCAB, seed=9)[0], pairs.get(name)
    params = SamplingParams(temperature=0.8, max_tokens=30, seed=4, ignore_eos=True)
    prompts = [common, (*common, 1, 2, 3), common[:140], common[:129], common[:100] + (9,) * 60]
    engine, alone = (pair.engine(4, ctx=500, prefix_sharing=sharing) for sharing in (True, False))
    shared, fresh = ([run_all(one, [p], [params])[0] for p in prompts] for one in (engine, alone))
    assert [run.metrics.cached_tokens for run in shared] == [0, 128, 128, 128, 64]
    assert all(run.metrics.cached_tokens == 0 for run in fresh)
    assert_same(shared, fresh)
    assert_same(shared[:1], [run_one(pair.model, common, params, ctx=500)])
    assert [run.drafts for run in shared] == [run.drafts for run in fresh]
    engine = pair.engine(4, ctx=500)
    long = SamplingParams(temperature=0.8, max_tokens=80, seed=4, ignore_eos=True)
    turn = next_turn(common, run_all(engine, [common], [long])[0].tokens, params)
    found, again = (run_requests(one, [turn])[0] for one in (engine, alone))
    assert found.output == again.output and found.drafts == again.drafts
    assert found.metrics.cached_tokens == 150 + 80 - 1


# -- one by one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("paused", [False, True])
def test_a_next_turn_drafts_as_a_fresh_start_does(target: Path, paused: bool) -> None:
    """However the turn before ended: in the middle of accepted drafts, or in rounds without drafts."""
    prompt, k = random_prompts(1, 20, VOCAB, seed=5)[0], 4
    wishes = {"spec": "draft", "draft_model": target, "draft_max": k, "adaptive": True}
    for count in (18, 26, 33, 40):
        engine = make_engine(target, **wishes)
        full_of_noise = random_prompts(1, 200, VOCAB, seed=7)
        run_all(engine, full_of_noise, [SamplingParams(max_tokens=40, ignore_eos=True)])
        engine._draft_length.choose = lambda: 0 if paused else k  # type: ignore[method-assign]
        reply = run_all(engine, [prompt], [SamplingParams(max_tokens=count, ignore_eos=True)])[0].tokens
        turn = next_turn(prompt, reply, SamplingParams(max_tokens=40, ignore_eos=True))
        runs = []
        for one in (engine, make_engine(target, prefix_sharing=False, **wishes)):
            one._draft_length.choose = lambda: k  # type: ignore[method-assign]
            runs += run_requests(one, [turn])
        assert runs[0].metrics.cached_tokens == len(prompt) + count - 1
        assert runs[0].tokens == runs[1].tokens
        assert runs[0].drafts == runs[1].drafts


def test_draft_context_limit(target: Path, draft: Path) -> None:
    """Prompts around the draft's own limit, and beyond: drafting ends there, the text goes on."""
    limit, k = 48, 4
    lengths = (*range(limit - k, limit + 2), 3 * limit)
    prompts = [random_prompts(1, n, VOCAB, seed=n)[0] for n in lengths]
    params = [SamplingParams(temperature=0.8, max_tokens=12, seed=i) for i in range(len(prompts))]
    alone = [run_one(target, p, q) for p, q in zip(prompts, params, strict=True)]
    wishes = {"spec": "draft", "draft_model": draft, "draft_max": k, "draft_ctx": limit}
    for slots in (1, len(prompts)):
        runs = run_all(make_engine(target, slots=slots, **wishes), prompts, params)
        assert [run.output for run in runs] == [run.output for run in alone]
        for prompt, run in zip(prompts, runs, strict=True):
            for record in run.rounds[1:]:
                # Position p is drafted from p tokens; the draft model sees at most `limit`.
                assert len(record.draft) <= max(0, limit - record.position + 1)
                if record.position + k <= limit and record.position + k < len(prompt) + 12:
                    assert len(record.draft) == k
    assert any(record.draft for record in runs[0].rounds)
    assert not any(record.draft for record in runs[-1].rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_self_draft_accepts_everything(target: Path, temperature: float, k: int) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=8, ignore_eos=True)
    run = run_one(target, PROMPTS[0], params, spec="draft", draft_model=target, draft_max=k)
    assert run.metrics.draft_n > 0
    assert run.metrics.draft_n_accepted == run.metrics.draft_n
    assert all(record.draft_forwards == k for record in run.rounds)


def test_every_length_and_stop_position_in_the_window(target: Path, pairs: Pairs) -> None:
    long = run_one(target, PROMPTS[1], SamplingParams(max_tokens=24))
    for method in ("self", "draft"):
        engine = pairs.get(method).engine(7)
        for count in range(1, 18):
            run = run_all(engine, [PROMPTS[1]], [SamplingParams(max_tokens=count)])[0]
            assert (run.tokens, run.finish_reason) == (long.tokens[:count], "length")
            stop = long.tokens[count - 1]
            first = long.tokens.index(stop) + 1
            # The stop on the last allowed token is a stop, not a length.
            params = SamplingParams(max_tokens=first, stop_token_ids=(stop,))
            run = run_all(engine, [PROMPTS[1]], [params])[0]
            assert (run.tokens, run.finish_reason) == (long.tokens[:first], "stop")


def test_context_ends_the_text(pairs: Pairs) -> None:
    for length in (126, 127):
        prompt = random_prompts(1, length, VOCAB, seed=2)[0]
        for method in ("off", "self", "ngram"):
            run = run_all(pairs.get(method).engine(7, ctx=128), [prompt], [SamplingParams()])[0]
            assert len(run.tokens) == 128 - length and run.finish_reason == "length"


@pytest.mark.parametrize("kind", ["wrong", "out of range", "random length"])
def test_an_adversarial_drafter_changes_nothing(
    pairs: Pairs, plain: Callable[..., list[Run]], kind: str
) -> None:
    engine = pairs.get("ngram").engine(4, lag=1)
    state, source = engine._device.state, random.Random(0)

    def bad(k: int, *_: Any) -> int:
        if kind == "out of range":
            choices = [-1, -(2**40), engine.plan.model.config.vocab_size + 5, 3, 2**40]
        else:
            choices = list(range(VOCAB))
        rows = [[source.choice(choices) for _ in range(k)] for _ in range(state.slots)]
        state.draft[:, :k] = torch.tensor(rows)
        state.num_drafts.fill_(source.randrange(k + 1) if kind == "random length" else k)
        return 0

    engine._device.proposer.draft = bad  # type: ignore[union-attr, method-assign]
    runs = outputs(engine, matrix_params())
    assert [run.output for run in runs] == [run.output for run in plain("ngram")]


def test_adaptive_lengths_change_nothing(pairs: Pairs, plain: Callable[..., list[Run]]) -> None:
    lengths = random.Random(1)
    for method in ("draft", "ngram"):
        engine = pairs.get(method).engine(8, lag=1, adaptive=True)
        engine._draft_length.choose = lambda: lengths.choice([0, 0, 0, 1, 3, 8])  # type: ignore[method-assign]
        runs = outputs(engine, matrix_params())
        assert [run.output for run in runs] == [run.output for run in plain(method)]
        assert accepted(runs) > 0


def test_many_rounds_without_drafts_then_drafting(target: Path) -> None:
    """The draft's cache is brought up after k = 0 rounds: self-drafting still accepts everything."""
    ks = iter([0] * 21 + [4] * 100)
    engine = make_engine(target, draft_max=4, spec="draft", draft_model=target)
    engine._draft_length.choose = lambda: next(ks)  # type: ignore[method-assign]
    run = run_all(engine, [PROMPTS[0]], [SamplingParams(max_tokens=50, ignore_eos=True)])[0]
    assert run.metrics.draft_n_accepted == run.metrics.draft_n > 10


def test_not_finite_logits_end_one_request_only(target: Path, pairs: Pairs) -> None:
    alone = [run_one(target, p, SamplingParams(max_tokens=20)) for p in PROMPTS[:3]]
    engine = pairs.get("draft").engine(3, slots=3)
    honest = engine._device.runner.logits

    def poisoned(hidden: torch.Tensor, views: Any = ()) -> torch.Tensor:
        logits = honest(hidden, views)
        if engine._device.state.length[1] > len(PROMPTS[1]) + 6:
            logits[1] = float("nan")
        return logits

    engine._device.runner.logits = poisoned  # type: ignore[method-assign]
    runs = run_all(engine, PROMPTS[:3], [SamplingParams(max_tokens=20)] * 3)
    assert runs[1].finish_reason == "error"
    assert 6 < len(runs[1].tokens) < 20 and runs[1].tokens == alone[1].tokens[: len(runs[1].tokens)]
    assert [runs[i].output for i in (0, 2)] == [alone[i].output for i in (0, 2)]
    engine._device.runner.logits = honest  # type: ignore[method-assign]
    again = run_all(engine, [PROMPTS[1]], [SamplingParams(max_tokens=20)])[0]
    assert again.output == alone[1].output


def test_abort_in_flight_frees_everything(target: Path, pairs: Pairs) -> None:
    alone = run_one(target, PROMPTS[0], SamplingParams(max_tokens=30))
    engine = pairs.get("draft").engine(3, slots=2, lag=2)
    available = engine._pages.num_available
    engine.add(Request("a", PROMPTS[1], SamplingParams(max_tokens=200)))
    engine.add(Request("b", PROMPTS[0], SamplingParams(max_tokens=30)))
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    ends: dict[str, str] = {}

    def take(events: Iterator[Any] | list[Any]) -> None:
        for event in events:
            tokens[event.request_id] += event.token_ids
            if event.finish_reason:
                ends[event.request_id] = event.finish_reason

    for _ in range(4):
        take(engine.step())
    engine.abort("a")
    engine.add(Request("c", PROMPTS[0], SamplingParams(max_tokens=30)))
    while engine.has_work:
        take(engine.step())
    assert ends == {"a": "abort", "b": "length", "c": "length"}
    assert tokens["b"] == tokens["c"] == alone.tokens
    assert engine._pages.num_available == available
    check_table(engine._pages)


def test_metrics_add_up(pairs: Pairs) -> None:
    for method in ("ngram", "draft", "self"):
        params = SamplingParams(max_tokens=33, ignore_eos=True, temperature=0.5)
        run = run_all(pairs.get(method).engine(4), PROMPTS[:1], [params])[0]
        m = run.metrics
        assert m.completion_tokens == len(run.tokens) == 33 == sum(len(r.committed) for r in run.rounds)
        assert m.rounds == len(run.rounds) == sum(m.acceptance_histogram)
        assert m.completion_tokens == m.rounds + m.draft_n_accepted == m.rounds + sum(run.drafted)
        assert m.draft_n_accepted == sum(i * n for i, n in enumerate(m.acceptance_histogram))
        assert m.draft_n == sum(len(r.draft) for r in run.rounds)
        for record in run.rounds:
            assert record.sampled[: record.accepted] == record.draft[: record.accepted]
            assert record.committed == record.sampled[: len(record.committed)]
