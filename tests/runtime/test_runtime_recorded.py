"""Recorded rounds on a CPU equal eager rounds, for every model family."""

from dataclasses import replace
from typing import Any

import pytest

from spd.runtime import Engine, SamplingParams
from spd.runtime.round import graphs
from spd.runtime.round.graphs import RecordedRounds
from tests.helpers import Patch, assert_same_runs, collect_drafts, random_prompts, run_all
from tests.invisible_matrix import METHODS, OF_FAMILIES, RECURRENT
from tests.kernels.forms import needs_compiled
from tests.pairs import BLOCK_DRAFTERS, EAGLE3_HEADS, MTP_HEADS, Pair, Pairs

pytestmark = needs_compiled
PROMPTS = random_prompts(3, 30, 256, seed=1)
NOISY = SamplingParams(max_tokens=40, temperature=0.7, seed=2, ignore_eos=True, logprobs=2)


def recorded(engine: Engine) -> RecordedRounds:
    captured = engine.round_queue.captured
    assert isinstance(captured, RecordedRounds)
    return captured


def assert_same_rounds(engine: Engine, written: Engine, prompts: Any, params: Any) -> None:
    ours = run_all(engine, prompts, params)
    theirs = run_all(written, prompts, params)
    assert_same_runs(ours, theirs)
    assert collect_drafts(ours) == collect_drafts(theirs)


def both(pair: Pair, dtype: str, **options: Any) -> tuple[Engine, Engine]:
    engine_options = {"slots": 2, "dtype": dtype, **options}
    return pair.make_engine(3, **engine_options), pair.make_engine(
        3, graphs=False, **engine_options
    )


FAMILIES = [
    pytest.param(name, marks=() if i % 3 == 0 else pytest.mark.slow)
    for i, name in enumerate(OF_FAMILIES)
]
"""The default lane has every third one: they run the operations that all have in other orders."""


@pytest.mark.covers(1, count=8)
@pytest.mark.parametrize(
    "name", [*METHODS, *MTP_HEADS, *EAGLE3_HEADS, *BLOCK_DRAFTERS, *RECURRENT, *FAMILIES]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_s_rounds_can_be_recorded(pairs: Pairs, name: str, dtype: str) -> None:
    engine, written = both(pairs.get(name), dtype)
    assert written.round_queue.captured is None
    for prompts in (PROMPTS[:1], PROMPTS[1:]):
        assert_same_rounds(engine, written, prompts, [NOISY] * len(prompts))
    captured = recorded(engine).captured
    assert {shape.slots for shape in captured} == {1, 2}
    assert all(replay is not None for replay, _ in captured.values())


@pytest.mark.parametrize("lag", [0, 2])
def test_logprobs_that_are_read_later_are_their_own_round_s(pairs: Pairs, lag: int) -> None:
    engine, written = both(pairs.get("draft"), "float32", lag=lag, slots=1)
    assert_same_rounds(engine, written, PROMPTS[:1], [NOISY])
    assert recorded(engine).captured


def test_a_round_with_an_empty_slot_runs_as_it_is_written(pairs: Pairs) -> None:
    """Three of four slots are occupied, and the first one ends first."""
    engine, written = both(pairs.get("ngram"), "float32", slots=4)
    params = [replace(NOISY, max_tokens=n) for n in (20, 50, 40)]
    assert_same_rounds(engine, written, PROMPTS, params)
    assert {shape.slots for shape in recorded(engine).captured} == {3}


def test_another_number_of_threads_is_another_recording(pairs: Pairs) -> None:
    engine, written = both(pairs.get("draft"), "float32", threads=2, slots=1)
    rounds = recorded(engine)
    for threads in (2, 1, 2):
        rounds.library.threads = threads
        assert_same_rounds(engine, written, PROMPTS[:1], [replace(NOISY, max_tokens=20)])
    assert {shape.threads for shape in rounds.captured} == {1, 2}


def test_a_shape_that_comes_again_is_recorded_up_to_so_many(
    pairs: Pairs, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(graphs, "MAX_RECORDED", 1)
    pair = pairs.get("draft")
    engine = pair.make_varying_engine(graphs=None)
    written = pair.make_varying_engine(graphs=False)
    assert_same_rounds(engine, written, PROMPTS[:1], [replace(NOISY, max_tokens=60, seed=5)])
    rounds = recorded(engine)
    assert len(rounds.captured) == 1 and len(rounds.run_shapes) > 2
    engine = pairs.get("ngram").make_engine(3)
    run_all(engine, PROMPTS[:1], [SamplingParams(max_tokens=1)])
    assert len(recorded(engine).run_shapes) == 1 and not recorded(engine).captured
    assert pairs.get("ngram").make_engine(3, kernels="torch").round_queue.captured is None
