"""Captured and eager, 0 to 2 rounds behind, alone and in a batch: one text, and one story of acceptance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import SamplingParams
from tests.gpu import gpu_helpers as lane
from tests.helpers import Damped, Run, outputs, random_prompts

CASES = [("off", 0), *((method, k) for method in ("ngram", "draft") for k in (1, 4))]


def same_logprobs(runs: list[Run], others: list[Run]) -> None:
    for run, other in zip(runs, others, strict=True):
        assert run.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def check_case(
    model: Path, work: lane.Work, plain: list[Run], wishes: dict[str, Any], eager: tuple[int, ...] = (0, 2)
) -> list[Run]:
    """Eager and captured runs, in step and behind, against the plain text and against each other.

    Eager ones take many times as long, so they leave out the lag between unless they are asked for it.
    """
    told: list[dict[str, Any]] | None = None
    for graphs, lags in ((False, eager), (True, (0, 1, 2))):
        with lane.gpu_engine(model, graphs=graphs, **wishes) as engine:
            assert engine.plan.shape.kernels == "triton" and engine.plan.shape.graphs is graphs
            for lag in lags:
                runs = lane.run_work(engine, work, lag)
                assert outputs(runs) == outputs(plain), (graphs, lag)
                same_logprobs(runs, plain)
                told = told or lane.story(runs)
                assert lane.story(runs) == told, (graphs, lag)
            if graphs:
                captured = engine._device.captured
                assert captured is not None and captured.captured
    return runs


def spoke(runs: list[Run]) -> None:
    """Something was accepted and something rejected, or the comparison saw nothing."""
    drafted, accepted = (
        sum(getattr(run.metrics, n) for run in runs) for n in ("draft_n", "draft_n_accepted")
    )
    assert 0 < accepted < drafted


@pytest.fixture(scope="module")
def demo_work() -> lane.Work:
    prompts = lane.demo_prompts()
    return lane.every_kind(prompts, lane.likely_stop(demo_folder(), prompts[2], dtype="bfloat16"))


@pytest.fixture(scope="module")
def demo_plain(demo_work: lane.Work) -> list[Run]:
    return lane.plain_runs(demo_folder(), demo_work, dtype="bfloat16")


def test_the_work_sees_something(demo_plain: list[Run]) -> None:
    assert {run.finish_reason for run in demo_plain} >= {"stop", "length"}
    assert len({tuple(run.tokens) for run in demo_plain}) == len(demo_plain)


@pytest.mark.parametrize(("method", "k"), CASES)
def test_alone(demo_work: lane.Work, demo_plain: list[Run], method: str, k: int) -> None:
    wishes = {"dtype": "bfloat16", **lane.method_wishes(method, k)}
    runs = check_case(demo_folder(), demo_work, demo_plain, wishes)
    if k:
        spoke(runs)


@pytest.mark.parametrize(("method", "k"), [("off", 0), ("ngram", 4), ("draft", 4)])
def test_in_a_batch(demo_work: lane.Work, demo_plain: list[Run], method: str, k: int) -> None:
    """Sixteen slots: every request twice, beside all the others; acceptance as alone."""
    wishes = {"dtype": "bfloat16", **lane.method_wishes(method, k)}
    wide = {**wishes, "slots": 16}
    runs = check_case(demo_folder(), demo_work * 2, demo_plain * 2, wide, eager=(0, 1, 2))
    half = len(demo_work)
    with lane.gpu_engine(demo_folder(), **wishes) as engine:
        alone = lane.story(lane.run_work(engine, demo_work, 1))
    assert lane.story(runs[:half]) == lane.story(runs[half:]) == alone
    if k:
        spoke(runs)


def test_lengths_that_change(demo_work: lane.Work, demo_plain: list[Run]) -> None:
    """Graphs of several lengths in turn, and drafts brought up outside of them."""
    told = []
    for graphs, lag in ((False, 0), (True, 0), (True, 2)):
        wishes = {"dtype": "bfloat16", "graphs": graphs, **lane.method_wishes("draft", 4)}
        with lane.gpu_engine(demo_folder(), **wishes) as engine:
            lengths = iter([4, 0, 1, 1, 0, 0, 4, 2, 0] * 100)
            engine._draft_length.choose = lambda lengths=lengths: next(lengths)  # type: ignore[method-assign]
            runs = lane.run_work(engine, demo_work[:2], lag)
        assert outputs(runs) == outputs(demo_plain[:2]), (graphs, lag)
        told.append(lane.story(runs))
    assert told[0] == told[1]


damped = Damped(loud=2)


def test_float32(tiny: Callable[..., Path]) -> None:
    target = tiny("qwen3", layers=4, residual_gain=damped, seed=3)
    draft = tiny("qwen3", layers=2, residual_gain=damped, seed=3)
    prompts = [*random_prompts(2, 20, 256), *random_prompts(2, 75, 256, seed=1)]
    wishes: dict[str, Any] = {"dtype": "float32", "ctx": 256}
    work = lane.every_kind(prompts, lane.likely_stop(target, prompts[2], **wishes))
    plain = lane.plain_runs(target, work, **wishes)
    for slots, method, k in ((1, "draft", 4), (16, "draft", 4), (1, "ngram", 1)):
        case = {**wishes, "slots": slots, **lane.method_wishes(method, k, draft)}
        runs = check_case(target, work, plain, case)
        if method == "draft":
            spoke(runs)


def test_a_shared_prefix() -> None:
    """What a page of another request holds is what would have been computed."""
    prompt = lane.demo_prompts()[3]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
    works = [[(p, params)] for p in (prompt, (*prompt, 9, 8, 7), prompt[:500], prompt)]
    for wishes in ({}, lane.method_wishes("draft", 4)):
        with lane.gpu_engine(demo_folder(), dtype="bfloat16", prefix_sharing=True, **wishes) as engine:
            shared = [lane.run_work(engine, work, 1)[0] for work in works]
        with lane.gpu_engine(demo_folder(), dtype="bfloat16", **wishes) as engine:
            fresh = [lane.run_work(engine, work, 1)[0] for work in works]
        assert outputs(shared) == outputs(fresh)
        assert [run.metrics.cached_tokens > 0 for run in shared] == [False, True, True, True]
