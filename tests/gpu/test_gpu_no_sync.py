"""Between two rounds the host waits for nothing but a copy made long ago; values in flight are left alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.round import model_runner, transfer
from tests.gpu.gpu_helpers import Work, demo_prompts, gpu_engine, method_wishes, run_work, story
from tests.helpers import outputs, replace_transfers

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
        *((method, True, None, lag) for method in ("off", "ngram", "draft") for lag in (1, 2)),
        *(("draft", True, 2, 1), ("ngram", False, None, 1), ("draft", False, 2, 1)),
    ],
)
def test_steady_rounds_wait_for_nothing(method: str, graphs: bool, logprobs: int | None, lag: int) -> None:
    wishes = {"dtype": "bfloat16", "slots": 4, "graphs": graphs, "lag": lag, **method_wishes(method, 3)}
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


LONG = 60_000_000
"""Cycles that the device sleeps before a transfer: some 30 ms, in which the host runs far ahead."""


class OneBuffer:
    """A way to the device through a single pinned buffer, which never waits for what is in flight."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(4096, dtype=torch.long).pin_memory()

    def __call__(self, values: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
        torch.cuda._sleep(LONG)
        part = self.buffer[: len(values)]
        part.copy_(torch.tensor(values, dtype=dtype))
        return part.to(device, non_blocking=True)


def late(values: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """The real way, behind as long a sleep."""
    torch.cuda._sleep(LONG)
    return transfer.to_device(values, dtype, device)


def test_a_reused_buffer_is_seen_and_the_real_way_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page tables only: their wrong values are still pages, so that no kernel leaves its memory."""
    prompts = [prompt[:60] for prompt in demo_prompts()]
    work: Work = [
        (prompts[i % 5], SamplingParams(max_tokens=24, temperature=0.5 * (i % 2), seed=i, ignore_eos=True))
        for i in range(4)
    ]
    wishes = {"dtype": "bfloat16", "slots": 4, **method_wishes("draft", 4)}
    with gpu_engine(demo_folder(), **wishes) as engine:
        run_work(engine, work, 1)  # all is compiled and captured: the host has no other reason to be slow
        reference = run_work(engine, work, 1)
        monkeypatch.setattr(model_runner, "to_device", late)
        delayed = run_work(engine, work, 1)
        assert outputs(delayed) == outputs(reference) and story(delayed) == story(reference)
        monkeypatch.setattr(model_runner, "to_device", OneBuffer())
        wrong = run_work(engine, work, 1)
        assert outputs(wrong) != outputs(reference) or story(wrong) != story(reference)
    with gpu_engine(demo_folder(), **wishes) as engine:
        monkeypatch.undo()
        assert outputs(run_work(engine, work, 1)) == outputs(reference)


def test_every_small_value_behind_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, stop ids and page tables all late, in step and two rounds behind."""
    prompts = demo_prompts()
    work: Work = [
        (prompts[i % 5], SamplingParams(max_tokens=10, seed=i, temperature=0.8, stop_token_ids=(i, 5)))
        for i in range(6)
    ]
    with gpu_engine(demo_folder(), dtype="bfloat16", slots=2, **method_wishes("ngram", 3)) as engine:
        reference = run_work(engine, work, 0)
        replace_transfers(monkeypatch, late)
        for lag in (0, 2):
            delayed = run_work(engine, work, lag)
            assert outputs(delayed) == outputs(reference) and story(delayed) == story(reference)
