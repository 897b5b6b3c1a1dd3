"""Between two rounds the host waits for nothing but a copy that has long been made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request, SamplingParams
from tests.gpu.gpu_helpers import demo_prompts, gpu_engine, method_wishes

WARM, WATCHED = 12, 80
START = 440
"""Tokens of a prompt that takes its second block of 512 positions while watched, whatever is accepted."""


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Whatever makes the host wait for the device raises; an event's `synchronize` is not counted."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def start(engine: Engine, **more: Any) -> None:
    """Requests of unlike needs in every slot, the first one about to need another block of pages."""
    prompts = demo_prompts()
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.2, "logit_bias": ((9, 1.0),)},
        {"temperature": 0.7, "min_tokens": 5},
    ]
    for i in range(engine.plan.shape.slots):
        prompt = (prompts[3] * 2)[: START + i] if i % 2 == 0 else prompts[1]
        params = SamplingParams(**{"max_tokens": 400, "ignore_eos": True, "seed": i, **kinds[i % 4], **more})
        engine.add(Request(f"r{i}", prompt, params))
    for _ in range(WARM):
        engine.step()


@pytest.mark.parametrize(
    ("method", "graphs", "logprobs", "lag"),
    [
        ("off", True, None, 1),
        ("off", True, None, 2),
        ("ngram", True, None, 1),
        ("ngram", True, None, 2),
        ("draft", True, None, 1),
        ("draft", True, None, 2),
        ("draft", True, 2, 1),
        ("ngram", False, None, 1),
        ("draft", False, 2, 1),
    ],
)
def test_steady_rounds_wait_for_nothing(method: str, graphs: bool, logprobs: int | None, lag: int) -> None:
    k = {} if method == "off" else {"draft_max": 3}
    wishes = {"dtype": "bfloat16", "slots": 4, "graphs": graphs, "lag": lag, **k, **method_wishes(method)}
    with gpu_engine(demo_folder(), **wishes) as engine:
        start(engine, logprobs=logprobs)
        pages = len(engine._scheduler.running()[0].pages)
        tokens = 0
        with waiting_is_an_error():
            for _ in range(WATCHED):
                tokens += sum(len(event.token_ids) for event in engine.step())
        assert tokens >= WATCHED, "nothing was generated"
        assert len(engine._scheduler.running()[0].pages) > pages, "no pages were taken meanwhile"


def test_one_that_waits_is_seen() -> None:
    with gpu_engine(demo_folder(), dtype="bfloat16", slots=2, graphs=False, lag=1) as engine:
        start(engine)
        state, honest = engine._device.state, engine._device.runner.forward

        def asking(*args: Any) -> Any:
            state.length.max().item()
            return honest(*args)

        with waiting_is_an_error():
            engine.step()
            engine._device.runner.forward = asking  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="synchroniz"):
                engine.step()


def test_a_pageable_copy_is_seen() -> None:
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.arange(8).to("cuda", non_blocking=False)
