"""MTP heads change no text, and draft as well after a prefix hit, a pause or an interruption as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request, SamplingParams
from tests.helpers import Run, make_engine, random_prompts, run_all, run_one
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime.mtp_reference import PlainMtp
from tests.runtime.test_runtime_mtp import compared
from tests.test_invisible import PARAMETERS, PROMPTS, VOCAB, matrix_params, outputs

HEADS: dict[str, dict[str, Any]] = {
    "one": {"family": "deepseek"},
    "three": {"family": "mimo", "modules": 3, "hidden_share": 0.1},
    "deepseek": {"family": "deepseek", "variant": "deepseek_v3"},
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Targets whose heads often agree with them."""
    shelf = tmp_path_factory.mktemp("agreeing")

    def get(name: str) -> Path:
        if not (shelf / name).exists():
            write_tiny_mtp(shelf / name, kind="copy", **HEADS[name])
        return shelf / name

    return get


def mtp_engine(target: Path, k: int, **wishes: Any) -> Engine:
    return make_engine(target, spec="mtp", draft_max=k, **wishes)


@pytest.mark.parametrize(("name", "k"), [("one", 1), ("deepseek", 2), ("three", 3), ("one", 4)])
def test_tokens_do_not_depend_on_k_temperature_or_lag(
    heads: Callable[[str], Path], name: str, k: int
) -> None:
    work = matrix_params(16)[::4]
    plain = outputs(make_engine(heads(name)), work)
    reference: list[Run] = []
    for lag in (0, 1, 2):
        runs = outputs(mtp_engine(heads(name), k, lag=lag), work)
        assert [run.output for run in runs] == [run.output for run in plain]
        reference = reference or runs
        assert [run.drafts for run in runs] == [run.drafts for run in reference]
    accepted, drafted = (
        sum(getattr(run.metrics, counted) for run in reference) for counted in ("draft_n_accepted", "draft_n")
    )
    assert 0 < accepted < drafted
    if k > 1:
        assert max(record.accepted for run in reference for record in run.rounds) > 1


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_every_parameter(heads: Callable[[str], Path], name: str) -> None:
    target = heads("one")
    work = [
        (prompt, SamplingParams(**{"max_tokens": 20, "seed": 5, **PARAMETERS[name]}))
        for prompt in PROMPTS[1:4:2]
    ]
    base = outputs(make_engine(target), work)
    for lag in (0, 2):
        runs = outputs(mtp_engine(target, 3, lag=lag), work)
        assert [run.output for run in runs] == [run.output for run in base], lag
        assert [run.logprobs for run in runs] == [run.logprobs for run in base], lag
        assert sum(len(run.rounds) for run in runs) >= 3


def test_a_batch_of_different_requests_equals_each_alone(heads: Callable[[str], Path]) -> None:
    kinds = [PARAMETERS[n] for n in ("top_p", "repetition", "bias", "stop_ids", "logprobs", "frequency")]
    work = [
        (prompt, SamplingParams(**{"max_tokens": 10 + 4 * i, "seed": i, **kinds[i]}))
        for i, prompt in enumerate(PROMPTS)
    ]
    for name, lag in (("three", 0), ("deepseek", 2)):
        alone = [run_one(heads(name), prompt, params) for prompt, params in work]
        runs = outputs(mtp_engine(heads(name), 3, slots=4, lag=lag), work)
        assert [run.output for run in runs] == [run.output for run in alone]


@pytest.mark.parametrize(
    "name", ["three", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one", "deepseek"))]
)
def test_a_prefix_hit_drafts_as_a_miss_does(heads: Callable[[str], Path], name: str) -> None:
    target = heads(name)
    common = random_prompts(1, 150, VOCAB, seed=9)[0]
    params = SamplingParams(temperature=0.8, max_tokens=70, seed=4, ignore_eos=True)
    prompts = [common, (*common, 1, 2, 3), common[:140], common[:129], common[:100] + (9,) * 60]
    engine = mtp_engine(target, 4, ctx=500)
    shared = [run_all(engine, [prompt], [params])[0] for prompt in prompts]
    alone = {"spec": "mtp", "draft_max": 4, "ctx": 500, "prefix_sharing": False}
    fresh = [run_one(target, prompt, params, **alone) for prompt in prompts]
    assert [run.metrics.cached_tokens for run in shared] == [0, 128, 128, 128, 64]
    assert [run.output for run in shared] == [run.output for run in fresh]
    assert [run.drafts for run in shared] == [run.drafts for run in fresh]
    # The reply goes on from the reply, whose last rounds wrote entries of the head that are found again.
    engine = mtp_engine(target, 4, ctx=500)
    reply = run_all(engine, [common], [params])[0].tokens
    longer, spans = (*common, *reply, 7, 8, 9), (("prompt", 150), ("generated", 70), ("prompt", 3))
    again = mtp_engine(target, 4, ctx=500, prefix_sharing=False)
    drafts = []
    for one in (engine, again):
        drafts.append([])
        one.trace = lambda record, seen=drafts[-1]: seen.append((record.draft, record.accepted))  # type: ignore[misc]
        list(one.stream([Request("x", longer, params, spans)]))
    assert drafts[0] == drafts[1]
    assert engine.metrics("x").cached_tokens == 150 + 70 - 1


def against_reference(heads: Callable[[str], Path], name: str, engine: Engine, count: int) -> list[Run]:
    """Run the prompts; every draft must be the reference's."""
    greedy = SamplingParams(max_tokens=count, ignore_eos=True)
    runs = run_all(engine, PROMPTS[1:5], [greedy] * 4)
    plain = PlainMtp(heads(name), HEADS[name]["family"], HEADS[name].get("modules", 1))
    wrong, seen, _ = compared(plain, list(zip(PROMPTS[1:5], runs, strict=True)))
    assert seen > 10 and wrong == 0
    return runs


@pytest.mark.parametrize("name", [pytest.param("one", marks=pytest.mark.slow), "three"])
def test_drafts_after_rounds_without_any_are_right(heads: Callable[[str], Path], name: str) -> None:
    """Pauses shorter and longer than a catch-up, between rounds of every length."""
    plain = [run_one(heads(name), p, SamplingParams(max_tokens=60, ignore_eos=True)) for p in PROMPTS[1:5]]
    for slots, lag in ((1, 0), (3, 2)):
        engine = mtp_engine(heads(name), 4, adaptive=True, slots=slots, lag=lag)
        source = random.Random(slots)
        pauses = [[0] * n + [source.choice((1, 2, 3, 4)) for _ in range(2)] for n in (1, 3, 18, 5, 35, 2) * 9]
        ks = iter([k for pause in pauses for k in pause])
        engine._draft_length.choose = lambda ks=ks: next(ks)  # type: ignore[method-assign, misc]
        runs = against_reference(heads, name, engine, 60)
        assert [run.tokens for run in runs] == [run.tokens for run in plain]


@pytest.mark.parametrize("name", ["one", "three"])
def test_pages_given_away_in_a_pause_are_whole(heads: Callable[[str], Path], name: str) -> None:
    """A text that ends while the head lags behind leaves what a later prompt can draft from."""
    engine = mtp_engine(heads(name), 3, ctx=400, adaptive=True)
    engine._draft_length.choose = lambda: 0  # type: ignore[method-assign]
    greedy = SamplingParams(max_tokens=70, ignore_eos=True)
    first = run_all(engine, [PROMPTS[0]], [greedy])[0]
    engine._draft_length.choose = lambda: 3  # type: ignore[method-assign]
    longer = (*PROMPTS[0], *first.tokens)
    spans = (("prompt", len(PROMPTS[0])), ("generated", 70))
    found: list[Any] = []
    engine.trace = found.append
    list(engine.stream([Request("x", longer, greedy, spans)]))
    assert engine.metrics("x").cached_tokens == len(longer) - 1
    run = Run(tokens=[t for r in found for t in r.committed], rounds=found)
    plain = PlainMtp(heads(name), HEADS[name]["family"], HEADS[name].get("modules", 1))
    wrong, seen, _ = compared(plain, [(longer, run)])
    assert seen > 10 and wrong == 0


def test_interrupted_texts_draft_as_before(heads: Callable[[str], Path]) -> None:
    prompts = [random_prompts(1, n, VOCAB, seed=n)[0] for n in (70, 130, 9, 200, 64, 30)]
    greedy = [SamplingParams(max_tokens=50 + 9 * i, ignore_eos=True) for i in range(6)]
    alone = [run_one(heads("three"), p, q, ctx=320) for p, q in zip(prompts, greedy, strict=True)]
    engine = mtp_engine(heads("three"), 4, ctx=320, slots=5, lag=1, cache_pages=6)
    runs = run_all(engine, prompts, greedy)
    assert [run.output for run in runs] == [run.output for run in alone]
    assert sum(run.metrics.preemptions for run in runs) > 1
    plain = PlainMtp(heads("three"), "mimo", 3)
    wrong, seen, _ = compared(plain, list(zip(prompts, runs, strict=True)))
    assert seen > 50 and wrong == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_and_its_own_head(dtype: str) -> None:
    """Trained weights, latent attention and experts: greedy and drawn, beside each other, at every lag."""
    prompts = [tuple(range(5 + n, 45 + n)) for n in (0, 40, 900)] * 2
    params = [SamplingParams(max_tokens=24, temperature=0.8 * (i > 2), seed=i) for i in range(6)]
    wishes: dict[str, Any] = {"dtype": dtype, "slots": 3}
    plain = run_all(make_engine(demo_folder(), **wishes), prompts, params)
    for k in (1, 4):
        story: list[Any] = []
        for lag in (0, 1, 2):
            runs = run_all(
                make_engine(demo_folder(), spec="mtp", draft_max=k, lag=lag, **wishes), prompts, params
            )
            assert [run.output for run in runs] == [run.output for run in plain]
            story = story or [run.drafts for run in runs]
            assert [run.drafts for run in runs] == story
        assert sum(accepted for run in story for _, accepted in run) > 0
