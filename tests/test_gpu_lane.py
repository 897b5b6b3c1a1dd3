"""The tests for a GPU, where there is none: bodies that a CPU can run are run on it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from spd.formats.demo import demo_folder
from spd.runtime import Engine
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.rows import SlotView
from tests.gpu import gpu_helpers, test_gpu_ahead, test_gpu_forms, test_gpu_rounds, test_gpu_texts
from tests.helpers import Patch, make_engine


class Through(CapturedRounds):
    """Stands where graphs do: notes each shape and runs it eagerly."""

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Any:
        self.capture(shape, views)
        return self.round.run(shape.k, views, shape.needs, shape.num_logprobs, shape.next_k)

    def capture(self, shape: RoundShape, views: Sequence[SlotView]) -> None:
        self.round.sampler.make_tables(shape.needs)
        self.captured.setdefault(shape, (None, None))


def engine_on_cpu(model: Path, graphs: bool | None = None, **wishes: Any) -> Engine:
    engine = make_engine(model, **{**wishes, "device": "cpu"})
    shape = dataclasses.replace(engine.plan.shape, kernels="triton", graphs=graphs is not False)
    engine.plan = dataclasses.replace(engine.plan, shape=shape)
    if graphs is not False:
        engine._device.captured = Through(engine._device.round)
    return engine


@pytest.fixture
def rehearsal(monkeypatch: Patch) -> None:
    """Engines of the GPU tests are on the CPU, in the forms that it has."""
    monkeypatch.setattr(gpu_helpers, "make_engine", engine_on_cpu)


def test_rounds_are_rehearsed(rehearsal: None) -> None:
    prompts = gpu_helpers.demo_prompts()
    stop = gpu_helpers.likely_stop(demo_folder(), prompts[2], dtype="bfloat16")
    work = gpu_helpers.every_kind(prompts[:2], stop, max_tokens=7)[:2]
    with gpu_helpers.gpu_engine(demo_folder(), dtype="bfloat16", graphs=False) as engine:
        plain = gpu_helpers.run_work(engine, work, 0)
    test_gpu_rounds.test_alone(work, plain, "draft", 4)
    test_gpu_rounds.test_lengths_that_change(work, plain)


def test_captures_ahead_are_rehearsed(rehearsal: None) -> None:
    test_gpu_ahead.test_first_requests_capture_nothing("draft", test_gpu_ahead.PENALTIES)
    test_gpu_ahead.test_what_adaptive_lengths_try_first_is_captured()


def test_forms_are_rehearsed(rehearsal: None, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(test_gpu_forms, "demo_prompts", lambda: gpu_helpers.demo_prompts()[:1])
    form = test_gpu_forms.make_form("bfloat16", tmp_path)
    short = [(prompt, dataclasses.replace(params, max_tokens=4)) for prompt, params in form.work[:1]]
    with gpu_helpers.gpu_engine(form.folder, graphs=False, **form.wishes("off", 0)) as engine:
        runs = gpu_helpers.run_work(engine, short, 0)
    dataclasses.replace(form, work=short, plain=runs).check("mtp", 3)
    test_gpu_texts.test_a_model_that_drafts_for_itself_is_always_right("bfloat16", 4, 4)
