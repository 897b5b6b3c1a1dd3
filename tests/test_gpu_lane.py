"""The tests for a GPU on a machine without one: bodies that a CPU can run are run on it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from spd.runtime import Engine
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.rows import SlotView
from tests.gpu import gpu_helpers, test_gpu_ahead, test_gpu_rounds, test_gpu_texts
from tests.helpers import Patch, get_local_queue, make_engine


class Through(CapturedRounds):
    """A stand-in for graphs: records each shape and runs it eagerly."""

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Any:
        self.capture(shape, views)
        return self.round.run(
            shape.k, views, shape.needs, shape.num_logprobs, shape.next_k, shape.chained
        )

    def capture(self, shape: RoundShape, views: Sequence[SlotView]) -> None:
        self.captured.setdefault(shape, (None, None))


def engine_on_cpu(model: Path, graphs: bool | None = None, **options: Any) -> Engine:
    engine = make_engine(model, **{**options, "device": "cpu"})
    shape = dataclasses.replace(engine.plan.shape, kernels="triton", graphs=graphs is not False)
    engine.plan = dataclasses.replace(engine.plan, shape=shape)
    if graphs is not False:
        queue = get_local_queue(engine)
        queue.captured = Through(queue.round)
    return engine


@pytest.fixture
def rehearsal(monkeypatch: Patch) -> None:
    """Put the engines of the GPU tests on the CPU, in the forms that it has."""
    monkeypatch.setattr(gpu_helpers, "make_engine", engine_on_cpu)


def test_rounds_are_rehearsed(rehearsal: None, tmp_path: Path, monkeypatch: Patch) -> None:
    def short(prompts: Sequence[tuple[int, ...]], stop: int, max_tokens: int) -> gpu_helpers.Work:
        return every_kind(prompts[:2], stop, max_tokens // 4)[:2]

    every_kind = gpu_helpers.every_kind
    monkeypatch.setattr(gpu_helpers, "every_kind", short)
    for name, method, k in (("bfloat16", "draft", 4), ("hybrid", "mtp", 3), ("float32", "off", 0)):
        models = {name: test_gpu_rounds.make_model(name, tmp_path)}
        test_gpu_rounds.test_requests_alone_give_the_plain_text(models, name, method, k)
        if name == "bfloat16":
            test_gpu_rounds.test_changing_draft_lengths_give_the_plain_text(models)


def test_captures_ahead_are_rehearsed(rehearsal: None) -> None:
    test_gpu_ahead.test_first_requests_capture_nothing("draft", test_gpu_ahead.PENALTIES)
    test_gpu_ahead.test_what_adaptive_lengths_try_first_is_captured()


def test_a_model_that_drafts_for_itself_is_rehearsed(rehearsal: None) -> None:
    test_gpu_texts.test_a_model_that_drafts_for_itself_is_always_right("bfloat16", 4, 4)
