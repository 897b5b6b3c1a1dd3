"""Rounds recorded on a CPU: the same rounds as those that run as they are written, for every family."""

from pathlib import Path
from typing import Any

import pytest

from spd.runtime import Engine, SamplingParams
from spd.runtime.round.graphs import RecordedRounds
from tests.helpers import Patch, Run, assert_same, make_engine, random_prompts, run_all
from tests.kernels.forms import needs_compiled
from tests.pairs import EAGLES, HEADS, MTP_OF, Pair, Pairs
from tests.test_invisible import LOOKED_UP, METHODS, OTHERS, RECURRENT, SPARSE, WINDOWED

pytestmark = needs_compiled

NAMES = [
    *(*METHODS, *HEADS, *EAGLES, *RECURRENT, "gemma4/assistant", "gemma4_moe/assistant"),
    *(f"{family}/ngram" for family in (*WINDOWED, *SPARSE, *LOOKED_UP, *OTHERS)),
    *(f"{family}/mtp" for family in MTP_OF),
]
PROMPTS = random_prompts(3, 30, 256, seed=1)
NOISY = SamplingParams(max_tokens=40, temperature=0.7, seed=2, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("recorded"))


def recorded(engine: Engine) -> RecordedRounds:
    captured = engine._device.captured
    assert isinstance(captured, RecordedRounds)
    return captured


def assert_same_rounds(ours: list[Run], written: list[Run]) -> None:
    assert_same(ours, written)
    for one, other in zip(ours, written, strict=True):
        assert one.drafts == other.drafts and one.logprobs == other.logprobs


def both(pair: Pair, dtype: str, **wishes: Any) -> tuple[Engine, Engine]:
    """Engines that record, and that do not."""
    given = {"slots": 2, "dtype": dtype, **wishes}
    return pair.engine(3, **given), pair.engine(3, graphs=False, **given)


@pytest.mark.covers(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_s_rounds_can_be_recorded(pairs: Pairs, name: str, dtype: str) -> None:
    engine, written = both(pairs.get(name), dtype)
    assert written._device.captured is None
    for prompts in (PROMPTS[:1], PROMPTS[1:]):
        params = [NOISY] * len(prompts)
        assert_same_rounds(run_all(engine, prompts, params), run_all(written, prompts, params))
    captured = recorded(engine).captured
    assert {shape.slots for shape in captured} == {1, 2}
    assert all(replay is not None for replay, _ in captured.values())


@pytest.mark.parametrize("lag", [0, 2])
def test_logprobs_that_are_read_later_are_their_own_round_s(pairs: Pairs, lag: int) -> None:
    engine, written = both(pairs.get("draft"), "float32", lag=lag, slots=1)
    assert_same_rounds(run_all(engine, PROMPTS[:1], [NOISY]), run_all(written, PROMPTS[:1], [NOISY]))
    assert recorded(engine).captured


def test_a_round_with_an_empty_slot_runs_as_it_is_written(pairs: Pairs) -> None:
    """Of four slots three are taken; the first one ends first."""
    engine, written = both(pairs.get("ngram"), "float32", slots=4)
    params = [SamplingParams(max_tokens=n, temperature=0.7, seed=3, ignore_eos=True) for n in (20, 50, 40)]
    assert_same_rounds(run_all(engine, PROMPTS, params), run_all(written, PROMPTS, params))
    assert {shape.slots for shape in recorded(engine).captured} == {3}


def test_another_number_of_threads_is_another_recording(pairs: Pairs) -> None:
    engine, written = both(pairs.get("draft"), "float32", threads=2, slots=1)
    rounds = recorded(engine)
    for threads in (2, 1, 2):
        rounds.library.threads = threads
        params = [SamplingParams(max_tokens=20, temperature=0.7, seed=4, ignore_eos=True)]
        assert_same_rounds(run_all(engine, PROMPTS[:1], params), run_all(written, PROMPTS[:1], params))
    assert {shape.threads for shape in rounds.captured} == {1, 2}


def test_a_shape_is_recorded_when_it_comes_again_and_no_more_than_so_many(
    pairs: Pairs, monkeypatch: Patch
) -> None:
    from spd.runtime.round import graphs

    monkeypatch.setattr(graphs, "MOST_RECORDED", 1)
    pair = pairs.get("draft")
    engine, written = pair.changing(graphs=None), pair.changing(graphs=False)
    params = [SamplingParams(max_tokens=60, temperature=0.7, seed=5, ignore_eos=True)]
    assert_same_rounds(run_all(engine, PROMPTS[:1], params), run_all(written, PROMPTS[:1], params))
    rounds = recorded(engine)
    assert len(rounds.captured) == 1 and len(rounds.met) > 2


def test_a_shape_that_comes_once_is_not_recorded(pairs: Pairs) -> None:
    engine = pairs.get("ngram").engine(3)
    run_all(engine, PROMPTS[:1], [SamplingParams(max_tokens=1)])
    assert len(recorded(engine).met) == 1 and not recorded(engine).captured


def test_torch_s_kernels_are_not_recorded(tiny: Any) -> None:
    folder: Path = tiny("qwen3")
    assert make_engine(folder, kernels="torch")._device.captured is None
