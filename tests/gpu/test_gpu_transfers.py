"""Values in flight are not written over: the way they travel is right, and a wrong way is seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spd.formats.demo import demo_folder
from spd.runtime import SamplingParams
from spd.runtime.round import model_runner, transfer
from tests.gpu.gpu_helpers import Work, demo_prompts, gpu_engine, method_wishes, outputs, run_work, story
from tests.helpers import replace_transfers

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
    wishes = {"dtype": "bfloat16", "slots": 4, "draft_max": 4, **method_wishes("draft")}
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
    with gpu_engine(
        demo_folder(), dtype="bfloat16", slots=2, draft_max=3, **method_wishes("ngram")
    ) as engine:
        reference = run_work(engine, work, 0)
        replace_transfers(monkeypatch, late)
        for lag in (0, 2):
            delayed = run_work(engine, work, lag)
            assert outputs(delayed) == outputs(reference) and story(delayed) == story(reference)
