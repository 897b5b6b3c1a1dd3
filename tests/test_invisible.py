"""Speculation is invisible: the same tokens, text and end with it and without it, whatever else varies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime import Engine, Request, SamplingParams
from tests.helpers import Run, make_engine, random_prompts, run_all, run_one, run_requests

TEMPERATURES = (0.0, 0.8, 1.3)
VOCAB = 256


def damped(layer: int) -> float:
    """Later layers speak softly, so that a draft of the first two often agrees."""
    return 1.0 if layer < 2 else 0.12


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3", layers=4, residual_gain=damped, seed=3)


@pytest.fixture(scope="module")
def draft(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3", layers=2, residual_gain=damped, seed=3)


@pytest.fixture(scope="module")
def methods(target: Path, draft: Path) -> dict[str, dict[str, Any]]:
    return {
        "ngram": {"spec": "ngram", "ngram_min": 1},
        "draft": {"spec": "draft", "draft_model": draft},
        "self": {"spec": "draft", "draft_model": target},
        "draft+ngram": {"spec": "draft+ngram", "draft_model": draft, "ngram_min": 1},
    }


PROMPTS = random_prompts(4, 20, VOCAB) + random_prompts(2, 75, VOCAB, seed=1)


def matrix_params(count: int = 24) -> list[tuple[tuple[int, ...], SamplingParams]]:
    return [
        (prompt, SamplingParams(temperature=t, max_tokens=count, seed=100 + i))
        for i, prompt in enumerate(PROMPTS)
        for t in TEMPERATURES
    ]


def outputs(engine: Engine, work: list[tuple[tuple[int, ...], SamplingParams]]) -> list[Run]:
    return run_all(engine, [p for p, _ in work], [q for _, q in work])


@pytest.fixture(scope="module")
def plain(target: Path) -> list[Run]:
    return outputs(make_engine(target), matrix_params())


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("method", ["ngram", "draft", "self", "draft+ngram"])
def test_tokens_do_not_depend_on_drafter_k_temperature_or_lag(
    target: Path, methods: dict[str, dict[str, Any]], plain: list[Run], method: str, k: int
) -> None:
    reference: list[Run] = []
    for lag in (0, 1, 2):
        runs = outputs(make_engine(target, draft_max=k, lag=lag, **methods[method]), matrix_params())
        assert [run.output for run in runs] == [run.output for run in plain]
        reference = reference or runs
        # At fixed k the drafts and acceptances are those of the synchronous run, round by round.
        assert [run.drafts for run in runs] == [run.drafts for run in reference]
    accepted = sum(run.metrics.draft_n_accepted for run in reference)
    assert accepted > 0, "nothing was speculated: the test saw nothing"
    if method == "draft":
        assert accepted < sum(run.metrics.draft_n for run in reference), "nothing was rejected"


@pytest.mark.parametrize("method", ["ngram", "draft", "draft+ngram"])
def test_bfloat16(target: Path, methods: dict[str, dict[str, Any]], method: str) -> None:
    base = outputs(make_engine(target, dtype="bfloat16"), matrix_params())
    for k, lag in ((1, 0), (4, 1), (8, 2)):
        wishes = {**methods[method], "dtype": "bfloat16", "draft_max": k, "lag": lag}
        runs = outputs(make_engine(target, **wishes), matrix_params())
        assert [run.output for run in runs] == [run.output for run in base]


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


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_every_parameter_with_every_proposer(
    target: Path, methods: dict[str, dict[str, Any]], name: str
) -> None:
    options = {"max_tokens": 28, "seed": 5, **PARAMETERS[name]}
    work = [(prompt, SamplingParams(**options)) for prompt in PROMPTS[:4]]
    base = outputs(make_engine(target), work)
    for method, wishes in methods.items():
        for lag in (0, 2):
            runs = outputs(make_engine(target, draft_max=4, lag=lag, **wishes), work)
            assert [run.output for run in runs] == [run.output for run in base], (method, lag)
            assert [run.logprobs for run in runs] == [run.logprobs for run in base], (method, lag)
    neutral = [SamplingParams(temperature=q.temperature, max_tokens=28, seed=5) for _, q in work]
    plain_runs = run_all(make_engine(target), [p for p, _ in work], neutral)
    if name not in ("logprobs", "ignore_eos"):
        assert [run.output for run in plain_runs] != [run.output for run in base], "no visible effect"


def test_a_batch_of_different_requests_equals_each_alone(
    target: Path, methods: dict[str, dict[str, Any]]
) -> None:
    kinds = [PARAMETERS[n] for n in ("top_p", "repetition", "bias", "stop_ids", "logprobs", "frequency")]
    work = [
        (prompt, SamplingParams(**{"max_tokens": 10 + 4 * i, "seed": i, **kinds[i]}))
        for i, prompt in enumerate(PROMPTS)
    ]
    alone = [run_one(target, prompt, params) for prompt, params in work]
    for method, lag in (("ngram", 0), ("draft", 0), ("draft", 2), ("self", 1)):
        engine = make_engine(target, slots=4, draft_max=3, lag=lag, **methods[method])
        runs = outputs(engine, work)
        assert [run.output for run in runs] == [run.output for run in alone], (method, lag)
        assert [run.logprobs for run in runs] == [run.logprobs for run in alone]


@pytest.mark.parametrize("method", ["ngram", "draft", "draft+ngram"])
def test_prefix_hit_equals_miss(target: Path, methods: dict[str, dict[str, Any]], method: str) -> None:
    common = random_prompts(1, 150, VOCAB, seed=9)[0]
    params = SamplingParams(temperature=0.8, max_tokens=80, seed=4, ignore_eos=True)
    prompts = [common, (*common, 1, 2, 3), common[:140], common, common[:100] + (9,) * 60]
    for wishes in ({}, {"draft_max": 4, **methods[method]}):
        engine = make_engine(target, ctx=500, **wishes)
        shared = [run_all(engine, [prompt], [params])[0] for prompt in prompts]
        fresh = [
            run_one(target, prompt, params, ctx=500, prefix_sharing=False, **wishes) for prompt in prompts
        ]
        assert [run.output for run in shared] == [run.output for run in fresh]
        assert [run.metrics.cached_tokens for run in shared] == [0, 128, 128, 128, 64]
        assert all(run.metrics.cached_tokens == 0 for run in fresh)
        # The reply goes on from the reply: what a turn generated is found again under its own kind.
        reply = shared[0].tokens
        longer = (*common, *reply, 7, 8, 9)
        spans = (("prompt", len(common)), ("generated", len(reply)), ("prompt", 3))
        again = make_engine(target, ctx=500, prefix_sharing=False, **wishes)
        found = [
            [e.token_ids for e in one.stream([Request("x", longer, params, spans)])]
            for one in (engine, again)
        ]
        assert found[0] == found[1]
        assert engine.metrics("x").cached_tokens == len(common) + len(reply) - 1


@pytest.mark.parametrize("paused", [False, True])
def test_a_next_turn_drafts_as_a_fresh_start_does(target: Path, paused: bool) -> None:
    """However the turn before ended: in the middle of accepted drafts, or while nobody drafted."""
    prompt, k = random_prompts(1, 20, VOCAB, seed=5)[0], 4
    wishes = {"spec": "draft", "draft_model": target, "draft_max": k, "adaptive": True}
    for count in (18, 26, 33, 40):
        engine = make_engine(target, **wishes)
        full_of_noise = random_prompts(1, 200, VOCAB, seed=7)
        run_all(engine, full_of_noise, [SamplingParams(max_tokens=40, ignore_eos=True)])
        engine._draft_length.choose = lambda: 0 if paused else k  # type: ignore[method-assign]
        reply = run_all(engine, [prompt], [SamplingParams(max_tokens=count, ignore_eos=True)])[0].tokens
        longer = (*prompt, *reply, 7, 8, 9)
        spans = (("prompt", len(prompt)), ("generated", count), ("prompt", 3))
        turn = Request("x", longer, SamplingParams(max_tokens=40, ignore_eos=True), spans)
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


def test_every_length_and_stop_position_in_the_window(
    target: Path, methods: dict[str, dict[str, Any]]
) -> None:
    long = run_one(target, PROMPTS[1], SamplingParams(max_tokens=24))
    for method in ("self", "draft"):
        engine = make_engine(target, draft_max=7, **methods[method])
        for count in range(1, 18):
            run = run_all(engine, [PROMPTS[1]], [SamplingParams(max_tokens=count)])[0]
            assert (run.tokens, run.finish_reason) == (long.tokens[:count], "length")
            stop = long.tokens[count - 1]
            first = long.tokens.index(stop) + 1
            # The stop on the last allowed token is a stop, not a length.
            params = SamplingParams(max_tokens=first, stop_token_ids=(stop,))
            run = run_all(engine, [PROMPTS[1]], [params])[0]
            assert (run.tokens, run.finish_reason) == (long.tokens[:first], "stop")


def test_context_ends_the_text(target: Path, methods: dict[str, dict[str, Any]]) -> None:
    for length in (126, 127):
        prompt = random_prompts(1, length, VOCAB, seed=2)[0]
        for wishes in ({}, {"draft_max": 7, **methods["self"]}, {"draft_max": 7, **methods["ngram"]}):
            run = run_one(target, prompt, SamplingParams(), ctx=128, **wishes)
            assert len(run.tokens) == 128 - length and run.finish_reason == "length"


@pytest.mark.parametrize("kind", ["wrong", "out of range", "random length"])
def test_an_adversarial_drafter_changes_nothing(
    target: Path, methods: dict[str, dict[str, Any]], plain: list[Run], kind: str
) -> None:
    engine = make_engine(target, draft_max=4, lag=1, **methods["ngram"])
    state, source = engine._parts.state, random.Random(0)

    def bad(k: int, *_: Any) -> int:
        if kind == "out of range":
            choices = [-1, -(2**40), engine.model_config.vocab_size + 5, 3, 2**40]
        else:
            choices = list(range(VOCAB))
        rows = [[source.choice(choices) for _ in range(k)] for _ in range(state.slots)]
        state.draft[:, :k] = torch.tensor(rows)
        state.num_drafts.fill_(source.randrange(k + 1) if kind == "random length" else k)
        return 0

    engine._parts.proposer.draft = bad  # type: ignore[union-attr, method-assign]
    runs = outputs(engine, matrix_params())
    assert [run.output for run in runs] == [run.output for run in plain]


def test_adaptive_lengths_change_nothing(
    target: Path, methods: dict[str, dict[str, Any]], plain: list[Run]
) -> None:
    lengths = random.Random(1)
    for method in ("draft", "ngram"):
        engine = make_engine(target, draft_max=8, lag=1, adaptive=True, **methods[method])
        engine._draft_length.choose = lambda: lengths.choice([0, 0, 0, 1, 3, 8])  # type: ignore[method-assign]
        runs = outputs(engine, matrix_params())
        assert [run.output for run in runs] == [run.output for run in plain]
        assert sum(run.metrics.draft_n_accepted for run in runs) > 0


def test_many_rounds_without_drafts_then_drafting(target: Path) -> None:
    """The draft's cache is brought up after k = 0 rounds: self-drafting still accepts everything."""
    ks = iter([0] * 21 + [4] * 100)
    engine = make_engine(target, draft_max=4, spec="draft", draft_model=target)
    engine._draft_length.choose = lambda: next(ks)  # type: ignore[method-assign]
    run = run_all(engine, [PROMPTS[0]], [SamplingParams(max_tokens=50, ignore_eos=True)])[0]
    assert run.metrics.draft_n_accepted == run.metrics.draft_n > 10


def test_not_finite_logits_end_one_request_only(target: Path, methods: dict[str, dict[str, Any]]) -> None:
    alone = [run_one(target, p, SamplingParams(max_tokens=20)) for p in PROMPTS[:3]]
    engine = make_engine(target, slots=3, draft_max=3, **methods["draft"])
    honest = engine._parts.runner.logits

    def poisoned(hidden: torch.Tensor, views: Any = ()) -> torch.Tensor:
        logits = honest(hidden, views)
        if engine._parts.state.length[1] > len(PROMPTS[1]) + 6:
            logits[1] = float("nan")
        return logits

    engine._parts.runner.logits = poisoned  # type: ignore[method-assign]
    runs = run_all(engine, PROMPTS[:3], [SamplingParams(max_tokens=20)] * 3)
    assert runs[1].finish_reason == "error"
    assert 6 < len(runs[1].tokens) < 20 and runs[1].tokens == alone[1].tokens[: len(runs[1].tokens)]
    assert [runs[i].output for i in (0, 2)] == [alone[i].output for i in (0, 2)]
    engine._parts.runner.logits = honest  # type: ignore[method-assign]
    again = run_all(engine, [PROMPTS[1]], [SamplingParams(max_tokens=20)])[0]
    assert again.output == alone[1].output


def test_abort_in_flight_frees_everything(target: Path, methods: dict[str, dict[str, Any]]) -> None:
    alone = run_one(target, PROMPTS[0], SamplingParams(max_tokens=30))
    engine = make_engine(target, slots=2, draft_max=3, lag=2, **methods["draft"])
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
    engine._pages.check()


def test_metrics_add_up(target: Path, methods: dict[str, dict[str, Any]]) -> None:
    for method in ("ngram", "draft", "self"):
        params = SamplingParams(max_tokens=33, ignore_eos=True, temperature=0.5)
        run = run_one(target, PROMPTS[0], params, draft_max=4, **methods[method])
        m = run.metrics
        assert m.completion_tokens == len(run.tokens) == 33 == sum(len(r.committed) for r in run.rounds)
        assert m.rounds == len(run.rounds) == sum(m.acceptance_histogram)
        assert m.completion_tokens == m.rounds + m.draft_n_accepted == m.rounds + sum(run.drafted)
        assert m.draft_n_accepted == sum(i * n for i, n in enumerate(m.acceptance_histogram))
        assert m.draft_n == sum(len(r.draft) for r in run.rounds)
        for record in run.rounds:
            assert record.sampled[: record.accepted] == record.draft[: record.accepted]
            assert record.committed == record.sampled[: len(record.committed)]
