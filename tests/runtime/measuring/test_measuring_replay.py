"""`verify`'s parts: faults planted in a real engine are found, and the engine as it is passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import EngineConfig
from spd.runtime.engine.request import Request
from spd.runtime.lab.prompt_set import Prompt, Question, encode_questions, read_prompts
from spd.runtime.lab.replay import make_requests, promised_equal, replay_requests
from tests.helpers import Damped, random_prompts
from tests.runtime import seeded_faults as planted

Pair = tuple[EngineConfig, EngineConfig]

QUESTIONS = [
    Question(Prompt(f"q/{i}", "q", ""), ids)
    for i, ids in enumerate(random_prompts(3, 20, 256) + random_prompts(1, 75, 256, seed=1))
]

damped = Damped(loud=2)


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path]) -> tuple[EngineConfig, EngineConfig]:
    """Plain decoding, and a draft model that is often right, at fixed k."""
    target, draft = (tiny("qwen3", layers=n, residual_gain=damped, seed=3) for n in (4, 2))
    plain = EngineConfig(model=target, threads=1, dtype="float32", ctx=256, spec="off")
    return plain, replace(plain, spec="draft", draft_model=draft, draft_max=3, adaptive=False)


def requests(count: int = 24, least: int = 0) -> list[tuple[str, Request]]:
    return make_requests(QUESTIONS, (0.0, 0.9), max_tokens=count, ignore_eos=True, least=least)


def test_the_engine_passes(pair: Pair) -> None:
    plain, spec = pair
    late = replace(spec, lag=2, slots=3)
    result = replay_requests(plain, late, requests())
    assert result.differences == [] and result.texts == 8 and result.tokens == 8 * 24
    assert result.speculated > 20 and promised_equal(result.plans)


def test_the_demo_across_a_quarter_of_a_thousand_positions() -> None:
    """A text whose two best tokens tie at position 261: whatever rounds otherwise there shows."""
    folder = demo_folder()
    prompts = [prompt for prompt in read_prompts() if prompt.name == "creative/3"]
    questions = encode_questions(folder, prompts, [None], 215)
    plain = EngineConfig(model=folder, threads=1, dtype="bfloat16", ctx=320, spec="off")
    spec = replace(plain, spec="draft", draft_max=4, adaptive=False)
    asked = make_requests(questions, (0.0,), max_tokens=215, ignore_eos=True, least=0)
    result = replay_requests(plain, spec, asked)
    assert result.tokens == 215 and result.differences == []


@pytest.mark.parametrize(
    "plant", [planted.verify(planted.first_is_free), planted.kv_one_off], ids=["first-is-free", "kv-one-off"]
)
def test_a_planted_fault_changes_tokens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, plant: planted.Mutation
) -> None:
    plant(monkeypatch)
    result = replay_requests(*pair, requests())
    assert result.differences
    first = result.differences[0]
    assert first.reference != first.candidate
    assert not all(difference.near_tie for difference in result.differences)
    if first.margin is not None:  # the reference's own token has its best score
        assert first.margin >= 0


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_near_tie_is_told_from_a_fault(pair: Pair, dtypes: tuple[str, str]) -> None:
    """Another dtype rounds otherwise: its differences are near-ties, and no equal bits were promised."""
    plain, _ = pair
    greedy = make_requests(QUESTIONS, (0.0,), max_tokens=40, ignore_eos=True, least=0)
    result = replay_requests(*(replace(plain, dtype=dtype) for dtype in dtypes), greedy)
    assert result.differences, "nothing to tell apart"
    assert not promised_equal(result.plans)
    assert all(difference.near_tie for difference in result.differences)
