"""Captured rounds of models with a head of either kind, by the stand-in for capture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.runtime import Engine
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime import test_runtime_graphs as graphs
from tests.runtime.graph_stand_in import StandIn

watched_engine = graphs.watched_engine


Headed = tuple[Path, dict[str, Any]]
"""A target, and what asks for drafts by its head, which are often right."""


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """A DeepSeek-V3 of a dense layer and one of experts with an MTP layer; a Llama beside an EAGLE-3 head."""
    shape: dict[str, Any] = {"layers": 2, "vocab": 256, "tokenizer": False, "seed": 5}
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mtp":
        target = folder / "target"
        write_tiny_mtp(target, family="deepseek", variant="deepseek_v3", kind="copy", **shape)
        return target, {"spec": "mtp"}
    head = write_tiny_pair(
        folder / "target", folder / "head", kind="copy", aux=(1, 2), draft_vocab=200, target_options=shape
    )
    return folder / "target", {"spec": "eagle3", "draft_model": head}


def test_lengths_that_change(headed: Headed, watched_engine: Callable[..., tuple[Engine, StandIn]]) -> None:
    """Mixed batches that come and go: every pair of k is captured once, and nothing has moved at a replay."""
    target, speculation = headed
    plain, pattern = (
        [run.output for run in graphs.run_batch(graphs.two_slots(target))],
        [3, 0, 1, 1, 0, 3, 2, 0],
    )
    told = []
    for lag, watched in ((0, False), (0, True), (2, True)):
        wishes = {**speculation, "draft_max": 3, "lag": lag}
        shapes: dict[Any, Any] = {}
        if watched:
            engine, captured = watched_engine(target, **wishes)
            shapes = captured.captured
        else:
            engine = graphs.two_slots(target, **wishes)
        lengths = iter(pattern * 40)
        engine._draft_length.choose = lambda *_, lengths=lengths: next(lengths)  # type: ignore[method-assign]
        told.append(graphs.run_batch(engine))
        assert [run.output for run in told[-1]] == plain
        if watched:
            pairs = {(shape.k, shape.next_k) for shape in shapes}
            assert {(3, 0), (0, 1), (1, 1), (3, 2), (2, 0)} <= pairs
            assert len({shape.needs for shape in shapes}) > 2 and captured.replays > 0
    assert graphs.story(told[0]) == graphs.story(told[1])
    assert sum(run.metrics.draft_n_accepted for run in told[0]) > 0


def test_acceptance_is_the_eager_one_at_every_lag(
    headed: Headed, watched_engine: Callable[..., tuple[Engine, StandIn]]
) -> None:
    target, speculation = headed
    for k in (1, 3) if speculation["spec"] == "mtp" else (3,):
        wishes = {**speculation, "draft_max": k}
        eager = graphs.story(graphs.run_batch(graphs.two_slots(target, **wishes)))
        for lag in (0, 1, 2):
            engine, captured = watched_engine(target, lag=lag, **wishes)
            assert graphs.story(graphs.run_batch(engine)) == eager, (k, lag)
            assert captured.replays > len(captured.captured)
