"""Requests that adaptive k does not prepare for drafting, beside those that it does: the text stays."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from spd.formats.demo import demo_draft_folder, demo_folder
from spd.runtime import Engine, SamplingParams
from tests.helpers import make_engine, run_all, run_one

METHODS: dict[str, dict[str, Any]] = {
    "mtp": {"spec": "mtp", "draft_max": 3},
    "draft": {"spec": "draft", "draft_model": demo_draft_folder(), "draft_max": 3},
}
COMMON = tuple(range(300, 390))
PROMPTS = [COMMON, COMMON, (*COMMON[:70], 9, 8, 7), COMMON[:40], (*COMMON, 5, 6), COMMON, COMMON[10:60]]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.8 * (number % 2), seed=number, ignore_eos=True)
    for number in range(len(PROMPTS))
]


def engine_of(method: str, prepared: list[bool], **wishes: Any) -> Engine:
    """An engine that adapts k and prepares requests in this order, over and over."""
    engine = make_engine(demo_folder(), adaptive=True, **METHODS[method], **wishes)
    order = itertools.cycle(prepared)
    engine._scheduler.prepares = lambda together: next(order)
    return engine


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_plain_decoding(method: str, lag: int) -> None:
    """Prepared and unprepared requests share prefixes with their own kind, and give way to one another."""
    plain = [run_one(demo_folder(), *each, spec="off") for each in zip(PROMPTS, PARAMS, strict=True)]
    engine = engine_of(method, [False, True, True, False], slots=4, lag=lag, ctx=160, cache_pages=6)
    source = random.Random(lag)
    engine._draft_length.choose = lambda: source.choice([0, 0, 0, 1, 3])  # type: ignore[method-assign]
    for _ in range(2):
        runs = run_all(engine, PROMPTS, PARAMS)
        assert [run.output for run in runs] == [run.output for run in plain]
        drafted = [run.metrics.draft_n > 0 for run in runs]
        assert any(drafted) and not all(drafted)
        for run in runs:
            assert all(record.draft == [] for record in run.rounds) == (run.metrics.draft_n == 0)
    assert engine._scheduler.preemptions
    engine._scheduler.check()


@pytest.mark.parametrize("method", METHODS)
def test_who_is_prepared_drafts_as_if_nobody_else_had_been_there(method: str) -> None:
    """It finds nothing of what the drafter has not written, and everything that it has."""
    engine = engine_of(method, [False, True, True, False], slots=1, cache_pages=24)
    engine._draft_length.choose = lambda: 3  # type: ignore[method-assign]
    engine._scheduler._kind_of_history = lambda sequence: None  # type: ignore[method-assign]
    runs = [run_all(engine, [COMMON], PARAMS[:1])[0] for _ in range(4)]
    fresh = make_engine(demo_folder(), **METHODS[method], slots=1, prefix_sharing=False)
    alone = run_all(fresh, [COMMON], PARAMS[:1])[0]
    assert [run.output for run in runs] == [alone.output] * 4
    found = [run.metrics.cached_tokens for run in runs]
    assert found[:2] == [0, 0] and found[2] == found[3] >= 64
    assert [run.drafts for run in runs[1:3]] == [alone.drafts] * 2
    assert [run.metrics.draft_n for run in runs[::3]] == [0, 0]


@pytest.mark.parametrize("first", [True, False])
def test_a_chat_keeps_to_what_wrote_it(first: bool) -> None:
    """Alone, who goes on finds what was before, whatever would be decided now; a new text does not."""
    engine = engine_of("mtp", [first, not first, not first], slots=2)
    turns = [run_all(engine, [COMMON], PARAMS[:1])[0], run_all(engine, [(*COMMON, 5, 6)], PARAMS[:1])[0]]
    assert turns[1].metrics.cached_tokens >= 64
    assert [run.metrics.draft_n > 0 for run in turns] == [first, first]
    other = run_all(engine, [PROMPTS[-1]], PARAMS[:1])[0]
    assert (other.metrics.draft_n > 0) == (not first)


def test_an_unprepared_request_asks_nothing_of_the_drafter() -> None:
    """No prefill, no states kept, no catching up; a fixed k prepares everybody."""
    engine = engine_of("mtp", [False], slots=2)
    proposer: Any = engine._parts.proposer
    for name in ("admit", "prefill", "capture", "catch_up", "draft"):
        setattr(proposer, name, lambda *given, name=name: pytest.fail(name))
    runs = run_all(engine, PROMPTS[:3], PARAMS[:3])
    assert all(run.metrics.draft_n == 0 for run in runs)
    fixed = make_engine(demo_folder(), **METHODS["mtp"])
    assert all(fixed._scheduler.prepares(count) for count in range(1, 20))
