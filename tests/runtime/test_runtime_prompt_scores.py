"""Scores of a prompt's tokens equal those of one full pass, however the prompt is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spd.errors import UsageError
from spd.formats.demo import demo_folder
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.engine.request import Completion, Event, Request

TEXT = "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n" * 12


def scored(engine: Engine, request: Request) -> tuple[Completion, list[Event]]:
    """Return a request's completion, and its events with scores."""
    completion = Completion(request_id=request.id)
    scored_events: list[Event] = []
    for event in engine.stream([request]):
        completion.add(event)
        if event.prompt_logprobs:
            scored_events.append(event)
    return completion, scored_events


def full_pass_logprobs(engine: Engine, ids: tuple[int, ...]) -> torch.Tensor:
    """Return log-probabilities [n - 1, V], computed by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engine.config.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


@pytest.fixture(scope="module", params=["off", "mtp"])
def engine(request: pytest.FixtureRequest) -> Engine:
    options: dict[str, Any] = {"slots": 2, "ctx": 2048, "threads": 1, "dtype": "float32"}
    return Engine(EngineConfig(model=demo_folder(), spec=request.param, **options))


def test_scores_are_those_of_a_whole_pass_and_the_text_stays(engine: Engine) -> None:
    """Also where the prompt is cached, longer than a chunk, or a single token."""
    ids = tuple(engine.tokenizer.encode(TEXT))
    params = SamplingParams(max_tokens=12)
    (plain,) = engine.generate([Request("plain", ids, params)])
    expected = full_pass_logprobs(engine, ids)
    for name in ("first", "cached"):
        done, (event,) = scored(engine, Request(name, ids, params, prompt_logprobs=3))
        assert done.token_ids == plain.token_ids and done.text == plain.text
        scores = event.prompt_logprobs
        assert [score.token_id for score in scores] == list(ids[1:])
        logprobs = torch.tensor([score.logprob for score in scores])
        expected_logprobs = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert torch.allclose(logprobs, expected_logprobs, atol=2e-3)
        best = [score.top[0][0] for score in scores]
        assert all(len(score.top) == 3 for score in scores)
        assert (torch.tensor(best) == expected.argmax(-1)).float().mean() > 0.99
    done, scored_events = scored(engine, Request("one", ids[:1], params, prompt_logprobs=0))
    assert not scored_events and len(done.token_ids) == 12
    (again,) = engine.generate([Request("again", ids, params)])
    assert again.token_ids == plain.token_ids


def test_prompts_that_share_a_pass_are_scored_apart(engine: Engine) -> None:
    """One request with scores and one without, both shorter than a chunk."""
    long, short = (tuple(engine.tokenizer.encode(TEXT[at:])[:30]) for at in (0, 9))
    params = SamplingParams(max_tokens=3)
    alone, (expected,) = scored(engine, Request("alone", long, params, prompt_logprobs=2))
    scores: dict[str, int] = {}
    for event in engine.stream(
        [Request("a", short, params), Request("b", long, params, prompt_logprobs=2)]
    ):
        scores[event.request_id] = scores.get(event.request_id, 0) + len(event.prompt_logprobs)
        if event.prompt_logprobs:
            for score, other in zip(event.prompt_logprobs, expected.prompt_logprobs, strict=True):
                assert score.token_id == other.token_id
                assert score.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert scores == {"a": 0, "b": len(long) - 1}
    assert alone.finish_reason == "length"


def test_too_many_are_refused() -> None:
    with pytest.raises(UsageError, match="prompt_logprobs 21"):
        Request("x", (1,), SamplingParams(), prompt_logprobs=21)
