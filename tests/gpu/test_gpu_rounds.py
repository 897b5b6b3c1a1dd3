"""Captured and eager, 0 to 2 rounds behind, alone and in a batch: one text, and one story of
acceptance.

Of the demo, DeepSeek-V3-shaped with an MTP layer, in every form of weights, and of a tiny hybrid.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spd.formats.demo import demo_draft_folder, demo_folder
from spd.runtime import Engine, SamplingParams
from tests.gpu import gpu_helpers as lane
from tests.helpers import (
    DampedLayers,
    Run,
    collect_outputs,
    count_accepted,
    count_drafted,
    random_prompts,
)
from tests.recipes.packed_twin import write_twin
from tests.recipes.tiny import VARIANTS, write_tiny

LOOKED_UP = {"hybrid": ("ngram", "draft"), "float32": ("ngram",)}
"""Methods that need not be right and wrong in the little that a tiny model says."""


@dataclass(frozen=True)
class Model:
    """A model in a form of its weights, some work, and what plain decoding makes of it.

    Plain is eager, in step, one at a time, nothing speculated.
    """

    name: str
    folder: Path
    draft: Path
    options: dict[str, Any]
    work: lane.Work
    plain: list[Run]

    def engine(self, method: str, k: int, **options: Any) -> AbstractContextManager[Engine]:
        """Return an engine with the method, or without speculation."""
        config_options = lane.method_options(method, k, self.draft)
        return lane.gpu_engine(self.folder, **self.options, **config_options, **options)

    def check(self, method: str, k: int, times: int = 1, **options: Any) -> list[Run]:
        """Compare eager and captured runs, at several lags, with the plain text and each other.

        Eager ones take many times as long, so alone they leave out the lag between.
        """
        expected_story: list[dict[str, Any]] | None = None
        for graphs in (False, True):
            with self.engine(method, k, graphs=graphs, **options) as engine:
                assert engine.plan.shape.kernels == "triton" and engine.plan.shape.graphs is graphs
                for lag in (0, 1, 2) if graphs or times > 1 else (0, 2):
                    runs = lane.run_work(engine, self.work * times, lag)
                    assert collect_outputs(runs) == collect_outputs(self.plain * times), (
                        graphs,
                        lag,
                    )
                    for run, other in zip(runs, self.plain * times, strict=True):
                        assert run.logprobs == pytest.approx(other.logprobs, abs=1e-5)
                    expected_story = expected_story or lane.story(runs)
                    assert lane.story(runs) == expected_story, (graphs, lag)
                captured = engine.round_queue.captured
                assert not graphs or (captured is not None and captured.captured)
        if k and method not in LOOKED_UP.get(self.name, ()):
            assert 0 < count_accepted(runs) < count_drafted(runs), "the comparison saw nothing"
        return runs


def make_model(name: str, place: Path) -> Model:
    """Write the demo as it is stored, in int8 or in FP8 blocks, or a tiny model of another kind.

    "cache" is the demo with its cache in eight bits.
    """
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantize": "int8" if name == "int8" else "none",
        "kv": "int8" if name == "cache" else "auto",
    }
    folder = demo_folder()
    draft = demo_draft_folder()
    prompts = lane.demo_prompts()
    if name == "fp8":
        folder = write_twin(folder, place / "twin")
    elif name == "hybrid":  # prompts of no whole chunk, of one and of two
        folder = lane.write_hybrid(place / name, mtp=True)
        draft = lane.write_hybrid(place / "draft", num_hidden_layers=2, full_attention_interval=2)
        prompts = [random_prompts(1, n, 256, seed=n)[0] for n in (5, 75, 300, 600)]
    elif name == "float32":
        options |= {"dtype": "float32", "ctx": 256}
        tiny = {**VARIANTS["qwen3"], "residual_gain": DampedLayers(full_layers=2), "seed": 3}
        folder, draft = (write_tiny(place / f"{n} layers", **{**tiny, "layers": n}) for n in (4, 2))
        prompts = [*random_prompts(2, 20, 256), *random_prompts(2, 75, 256, seed=1)]
    work = lane.every_kind(prompts, lane.likely_stop(folder, prompts[2], **options), 40)
    with lane.gpu_engine(folder, graphs=False, **options) as engine:
        weights = {"fp8": "e4m3", "int8": "int8"}.get(name, options["dtype"])
        assert engine.plan.weights == weights, engine.plan.weights_reason
        return Model(
            name=name,
            folder=folder,
            draft=draft,
            options=options,
            work=work,
            plain=lane.run_work(engine, work, 0),
        )


EVERY = ("ngram", "draft", "mtp", "eagle3", "mtp+ngram")
METHODS = {"bfloat16": EVERY[:4], "int8": EVERY, "fp8": EVERY, "float32": EVERY[:2]}
METHODS["cache"] = ("draft", "mtp", "eagle3")
METHODS["hybrid"] = ("mtp", "ngram", "mtp+ngram")
ALONE = [
    ("bfloat16", "off", 0),
    *((name, method, k) for name, methods in METHODS.items() for method in methods for k in (1, 4)),
    *(("hybrid", method, 8) for method in METHODS["hybrid"]),
]
TOGETHER = [(name, "off", 0) for name in METHODS] + [("hybrid", "draft", 4)]
TOGETHER += [(name, method, 4) for name, methods in METHODS.items() for method in methods]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    place = tmp_path_factory.mktemp("models")
    return {name: make_model(name, place) for name in METHODS}


def test_the_work_sees_something(models: dict[str, Model]) -> None:
    plain = models["bfloat16"].plain
    assert {run.finish_reason for run in plain} >= {"stop", "length"}
    assert len({tuple(run.tokens) for run in plain}) == len(plain)
    assert (
        len({str(collect_outputs(models[name].plain)) for name in ("bfloat16", "int8", "fp8")}) == 3
    )


@pytest.mark.parametrize(("name", "method", "k"), ALONE)
def test_requests_alone_give_the_plain_text(
    models: dict[str, Model], name: str, method: str, k: int
) -> None:
    models[name].check(method, k)


@pytest.mark.parametrize(("name", "method", "k"), TOGETHER)
def test_requests_in_a_batch_give_the_plain_text(
    models: dict[str, Model], name: str, method: str, k: int
) -> None:
    """Sixteen slots: every request twice, beside all the others; acceptance as alone."""
    model = models[name]
    runs = model.check(method, k, times=2, slots=16)
    half = len(model.work)
    with model.engine(method, k) as engine:
        alone = lane.story(lane.run_work(engine, model.work, 1))
    assert lane.story(runs[:half]) == lane.story(runs[half:]) == alone


def test_changing_draft_lengths_give_the_plain_text(models: dict[str, Model]) -> None:
    """Graphs of several lengths in turn, and drafts brought up outside of them."""
    stories = []
    model = models["bfloat16"]
    for graphs, lag in ((False, 0), (True, 0), (True, 2)):
        with model.engine("draft", 4, graphs=graphs) as engine:
            lengths = iter([4, 0, 1, 1, 0, 0, 4, 2, 0] * 100)
            engine.draft_length.choose_k = lengths.__next__  # type: ignore[method-assign]
            runs = lane.run_work(engine, model.work[:2], lag)
        assert collect_outputs(runs) == collect_outputs(model.plain[:2]), (graphs, lag)
        stories.append(lane.story(runs))
    assert stories[0] == stories[1]


def test_a_shared_prefix_changes_no_text() -> None:
    """A page that another request filled holds the values that this request would compute."""
    prompt = lane.demo_prompts()[3]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
    works = [[(p, params)] for p in (prompt, (*prompt, 9, 8, 7), prompt[:500], prompt)]
    for options in ({}, lane.method_options("draft", 4)):
        with lane.gpu_engine(
            demo_folder(), dtype="bfloat16", prefix_sharing=True, **options
        ) as engine:
            shared = [lane.run_work(engine, work, 1)[0] for work in works]
        with lane.gpu_engine(demo_folder(), dtype="bfloat16", **options) as engine:
            fresh = [lane.run_work(engine, work, 1)[0] for work in works]
        assert collect_outputs(shared) == collect_outputs(fresh)
        assert [run.metrics.cached_tokens > 0 for run in shared] == [False, True, True, True]
