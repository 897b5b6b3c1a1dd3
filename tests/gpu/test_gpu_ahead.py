"""Rounds captured before the first request: it captures nothing, and its text is that of eager
rounds."""

from __future__ import annotations

import pytest

from spd.formats.demo import demo_folder
from spd.runtime import SamplingParams
from tests.gpu.gpu_helpers import demo_prompts, gpu_engine, method_options, run_work, story
from tests.helpers import collect_outputs

PENALTIES = SamplingParams(
    max_tokens=24,
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.2,
    logit_bias=((9, 1.0),),
    seed=2,
)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("params", [GREEDY, PENALTIES], ids=["greedy", "penalties"])
@pytest.mark.parametrize("method", ["off", "ngram", "draft"])
def test_first_requests_capture_nothing(method: str, params: SamplingParams) -> None:
    """Four at once, then one alone; tables that only some requests need are there when it is
    captured."""
    options = {"dtype": "bfloat16", "slots": 4, "lag": 1, **method_options(method, 3)}
    work = [(prompt, params) for prompt in demo_prompts()[:4]]
    with gpu_engine(demo_folder(), graphs=False, **options) as engine:
        stories = [run_work(engine, some) for some in (work, work[:1])]
    with gpu_engine(demo_folder(), **options) as engine:
        captured = engine.round_queue.captured
        assert captured is not None
        count = engine.capture_ahead([params])
        shapes = set(captured.captured)
        assert count == len(shapes) == (2 if method == "off" else 4)
        for some, eager in zip((work, work[:1]), stories, strict=True):
            runs = run_work(engine, some)
            assert collect_outputs(runs) == collect_outputs(eager) and story(runs) == story(eager)
        assert set(captured.captured) == shapes, "something was captured in the midst of requests"


def test_what_adaptive_lengths_try_first_is_captured() -> None:
    """A short request alone ends before any length is judged: it runs captured lengths only."""
    options = {**method_options("draft", 3, demo_folder()), "adaptive": True}
    with gpu_engine(demo_folder(), dtype="bfloat16", lag=1, **options) as engine:
        captured = engine.round_queue.captured
        assert captured is not None and engine.capture_ahead([GREEDY]) == 9
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        assert run_work(engine, [(demo_prompts()[1], params)])[0].metrics.draft_n > 0
        assert len(captured.captured) == 9
