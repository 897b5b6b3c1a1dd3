"""The library's interface: lists of requests in order, and streams of events."""

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spd
import spd.runtime.engine.engine
from spd.errors import UsageError
from spd.runtime import Request, SamplingParams
from tests.helpers import Tiny, make_engine, random_prompts, run_one

PROMPTS = random_prompts(6, 30, 256)
PARAMS = [
    SamplingParams(temperature=0.9, max_tokens=6 + 5 * i, seed=i, logprobs=1) for i in range(6)
]
REQUESTS = [Request(f"r{i}", p, q) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Path:
    return tiny("qwen3", layers=1)


@pytest.fixture(scope="module")
def alone(target: Path) -> list[Any]:
    return [run_one(target, p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]


def test_the_docstring_examples_run() -> None:
    result = doctest.testmod(spd.runtime.engine.engine)
    assert result.attempted > 3 and result.failed == 0
    assert all(getattr(spd, name) is not None for name in spd.__all__)


def test_completions_have_the_order_of_the_requests(target: Path, alone: list[Any]) -> None:
    engine = make_engine(target, slots=3, lag=1)
    completions = engine.generate(iter(REQUESTS[::-1]))
    assert [completion.request_id for completion in completions] == [
        request.id for request in REQUESTS[::-1]
    ]
    for completion, run in zip(completions, alone[::-1], strict=True):
        assert (list(completion.token_ids), completion.text, completion.finish_reason) == run.output
        assert [entry.logprob for entry in completion.logprobs] == run.logprobs
        assert (
            completion.metrics.completion_tokens
            == len(completion.token_ids)
            == len(completion.drafted)
            and completion.error is None
        )
    assert not engine.has_work


def test_one_bad_request_stops_the_list_before_it_runs(target: Path) -> None:
    """Else one of two requests with one id could end before the other is added, and their texts be joined."""
    engine = make_engine(target)
    for last, message in ((Request("x", (), PARAMS[0]), "no tokens"), (REQUESTS[0], "given twice")):
        with pytest.raises(UsageError, match=message):
            engine.generate([*REQUESTS[:5], last])
        assert not engine.has_work
        assert [completion.request_id for completion in engine.generate([REQUESTS[0]])] == ["r0"]


def test_requests_are_taken_as_room_appears(target: Path) -> None:
    engine = make_engine(target, slots=2)
    num_taken = 0
    num_ended = 0

    def requests() -> Iterator[Request]:
        nonlocal num_taken
        for i in range(40):
            num_taken += 1
            yield Request(f"q{i}", PROMPTS[0], SamplingParams(max_tokens=3))

    for event in engine.stream(requests()):
        num_ended += event.finish_reason is not None
        assert num_taken - num_ended <= 2 * 2 + 2
    assert num_ended == num_taken == 40


def test_a_stream_left_early_takes_its_requests_along(target: Path, alone: list[Any]) -> None:
    engine = make_engine(target, slots=2, lag=2)
    available = engine.page_table.num_available
    for event in engine.stream(REQUESTS):
        if event.token_ids:
            break
    for _ in range(3):
        assert engine.step() == []
    assert not engine.has_work and engine.page_table.num_available == available
    assert list(engine.generate([REQUESTS[1]])[0].token_ids) == alone[1].tokens


def test_an_id_may_be_used_again(target: Path, alone: list[Any]) -> None:
    """Events of an aborted request with that id do not belong to the next one."""
    engine = make_engine(target, slots=3, lag=1)
    again = Request(REQUESTS[0].id, PROMPTS[1], SamplingParams(max_tokens=30))
    engine.add(again)
    assert engine.step() is not None
    engine.abort(again.id)  # its end is not heard of before the id is used again
    assert (
        list(engine.generate([REQUESTS[0]])[0].token_ids) == alone[0].tokens and not engine.has_work
    )
