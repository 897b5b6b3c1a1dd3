"""MTP and EAGLE-3 heads draft as well after a pause or an interruption as ever, and change no text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import Request, RoundRecord, SamplingParams
from tests.helpers import Run, make_engine, next_turn, random_prompts, run_all, run_requests
from tests.pairs import Pair, Pairs
from tests.runtime.eagle3_reference import PlainEagle3
from tests.runtime.test_runtime_mtp import compared
from tests.test_invisible import PROMPTS, VOCAB


def assert_the_reference_s(headed: Pair, prompts: list[tuple[int, ...]], runs: list[Run]) -> None:
    """Every draft must be the reference's."""
    assert headed.reference is not None
    wrong, seen, _ = compared(headed.reference(), list(zip(prompts, runs, strict=True)))
    assert seen > 10 and wrong == 0


@pytest.mark.parametrize(
    "name",
    ["three", "eagle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one", "speculators"))],
)
def test_drafts_after_rounds_without_any_are_right(pairs: Pairs, name: str) -> None:
    """Pauses shorter and longer than a catch-up, between rounds of every length."""
    headed, prompts = pairs.get(name), PROMPTS[1:5]
    greedy = [SamplingParams(max_tokens=60, ignore_eos=True)] * 4
    plain = run_all(make_engine(headed.model), prompts, greedy)
    for slots, lag in ((1, 0), (3, 2)):
        engine = headed.engine(4, adaptive=True, slots=slots, lag=lag)
        source = random.Random(slots)
        pauses = [[0] * n + [source.choice((1, 2, 3, 4)) for _ in range(2)] for n in (1, 3, 18, 5, 35, 2) * 9]
        ks = iter([k for pause in pauses for k in pause])
        engine._draft_length.choose = lambda ks=ks: next(ks)  # type: ignore[method-assign, misc]
        runs = run_all(engine, prompts, greedy)
        assert_the_reference_s(headed, prompts, runs)
        assert [run.tokens for run in runs] == [run.tokens for run in plain]


@pytest.mark.parametrize("name", ["one", "three", "eagle", "speculators"])
def test_pages_given_away_in_a_pause_are_whole(pairs: Pairs, name: str) -> None:
    """A text that ends while the head lags behind leaves what a later prompt can draft from."""
    engine = pairs.get(name).engine(3, ctx=400, adaptive=True)
    engine._draft_length.choose = lambda: 0  # type: ignore[method-assign]
    greedy = SamplingParams(max_tokens=70, ignore_eos=True)
    first = run_all(engine, [PROMPTS[0]], [greedy])[0]
    engine._draft_length.choose = lambda: 3  # type: ignore[method-assign]
    turn = next_turn(PROMPTS[0], first.tokens, greedy, said=())
    run = run_requests(engine, [turn])[0]
    assert run.metrics.cached_tokens == len(turn.prompt_ids) - 1
    assert_the_reference_s(pairs.get(name), [turn.prompt_ids], [run])


@pytest.mark.parametrize("name", ["three", "eagle"])
def test_interrupted_texts_draft_as_before(pairs: Pairs, name: str) -> None:
    prompts = [random_prompts(1, n, VOCAB, seed=n)[0] for n in (70, 130, 9, 200, 64, 30)]
    greedy = [SamplingParams(max_tokens=50 + 9 * i, ignore_eos=True) for i in range(6)]
    alone = run_all(make_engine(pairs.get(name).model, ctx=320), prompts, greedy)
    engine = pairs.get(name).engine(4, ctx=320, slots=5, lag=1, cache_pages=6)
    runs = run_all(engine, prompts, greedy)
    assert [run.output for run in runs] == [run.output for run in alone]
    assert sum(run.metrics.preemptions for run in runs) > 1
    assert_the_reference_s(pairs.get(name), prompts, runs)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["three", "eagle"])
def test_what_drafts_were_drawn_from_is_kept(pairs: Pairs, name: str, rule: str) -> None:
    """A law over the target's ids for each draft, with nothing for those that a head does not know."""
    pair = pairs.get(name)
    assert pair.reference is not None
    engine, plain = pair.engine(3, verify=rule), pair.reference()
    state, laws = engine._device.state, engine._device.sampler.draft_laws
    known = set(plain.said.tolist() if isinstance(plain, PlainEagle3) else range(320))
    assert laws is not None
    seen = 0

    def look(record: RoundRecord) -> None:
        nonlocal seen
        for draft, law in zip(state.draft[0, : state.num_drafts[0]].tolist(), laws[0], strict=False):
            assert law.sum() == pytest.approx(1, abs=1e-5) and law[draft] > 0
            possible = set(law.nonzero().flatten().tolist())
            assert possible <= known and len(possible) > len(known) // 2
            seen += 1

    engine.trace = look
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=2, ignore_eos=True)
    list(engine.stream([Request("r", PROMPTS[1], params)]))
    metrics = engine.metrics("r")
    assert seen > 20 and 0 < metrics.draft_n_accepted < metrics.draft_n


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
