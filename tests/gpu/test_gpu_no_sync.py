"""Between two rounds the host waits for nothing but a copy made long ago.

Values in flight are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.formats.demo import demo_folder
from spd.runtime import Request, SamplingParams
from spd.runtime.round import transfer
from tests.gpu.gpu_helpers import Work, demo_prompts, gpu_engine, method_options, run_work, story
from tests.helpers import collect_outputs, replace_transfers

WARM = 12
WATCHED = 80
START = 440
"""Tokens of a prompt that takes its second block of 512 positions while watched, whatever is
accepted."""


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"repetition_penalty": 1.2, "logit_bias": ((9, 1.0),)},
    {"temperature": 0.7, "min_tokens": 5},
]


@pytest.mark.parametrize(
    ("method", "graphs", "logprobs", "lag"),
    [
        *((method, True, None, lag) for method in ("off", "ngram", "draft") for lag in (1, 2)),
        ("draft", True, 2, 1),
        ("ngram", False, None, 1),
        ("draft", False, 2, 1),
    ],
)
def test_steady_rounds_wait_for_nothing(
    method: str, graphs: bool, logprobs: int | None, lag: int
) -> None:
    """Whatever makes the host wait for the device raises; an event's `synchronize` is not counted.

    Requests of unlike needs are in every slot, the first one about to need another block of pages.
    """
    options = {
        "dtype": "bfloat16",
        "slots": 4,
        "graphs": graphs,
        "lag": lag,
        **method_options(method, 3),
    }
    with gpu_engine(demo_folder(), **options) as engine:
        prompts = demo_prompts()
        for i, kind in enumerate(KINDS):
            prompt = prompts[1] if i % 2 else (prompts[3] * 2)[: START + i]
            params = SamplingParams(
                max_tokens=400, ignore_eos=True, seed=i, logprobs=logprobs, **kind
            )
            engine.add(Request(f"r{i}", prompt, params))
        for _ in range(WARM):
            engine.step()
        pages = len(engine.scheduler.running()[0].pages)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            tokens = sum(len(event.token_ids) for _ in range(WATCHED) for event in engine.step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert tokens >= WATCHED, "nothing was generated"
        assert len(engine.scheduler.running()[0].pages) > pages, "no pages were taken meanwhile"


LONG = 60_000_000
"""Cycles that the device sleeps before a transfer: some 30 ms, in which the host runs far ahead."""


def late(values: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Delay transfers to the device by a long sleep."""
    torch.cuda._sleep(LONG)
    return transfer.to_device(values, dtype, device)


def test_every_small_value_behind_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, stop ids and page tables all late, in step and two rounds behind."""
    prompts = demo_prompts()
    work: Work = [
        (
            prompts[i % 5],
            SamplingParams(max_tokens=10, seed=i, temperature=0.8, stop_token_ids=(i, 5)),
        )
        for i in range(6)
    ]
    with gpu_engine(
        demo_folder(), dtype="bfloat16", slots=2, **method_options("ngram", 3)
    ) as engine:
        reference = run_work(engine, work, 0)
        replace_transfers(monkeypatch, late)
        for lag in (0, 2):
            delayed = run_work(engine, work, lag)
            assert collect_outputs(delayed) == collect_outputs(reference) and story(
                delayed
            ) == story(reference)
