"""The tests for a GPU, where there is none: their names exist, and bodies that a CPU can run are run on it.

They are skipped here, so that a renamed attribute would only be seen on a device.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.rows import SlotView
from tests.gpu import gpu_forms, gpu_helpers, test_gpu_ahead, test_gpu_rounds, test_gpu_texts
from tests.helpers import Run, make_engine

FOLDER = Path(gpu_helpers.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if path.name != "conftest.py")
UNKNOWN = object()


class Through(CapturedRounds):
    """Stands where graphs do: notes each shape and runs it eagerly."""

    def run(self, shape: RoundShape, views: Sequence[SlotView]) -> Any:
        """See `CapturedRounds.run`."""
        self.capture(shape, views)
        return self.round.run(shape.k, views, shape.needs, shape.num_logprobs, shape.next_k)

    def capture(self, shape: RoundShape, views: Sequence[SlotView]) -> None:
        """See `CapturedRounds.capture`."""
        self.round.sampler.make_tables(shape.needs)
        self.captured.setdefault(shape, (None, None))


def engine_on_cpu(model: Path, graphs: bool | None = None, **wishes: Any) -> Engine:
    """What a GPU test takes for an engine on its device."""
    engine = make_engine(model, **{**wishes, "device": "cpu"})
    shape = dataclasses.replace(engine.plan.shape, kernels="triton", graphs=graphs is not False)
    engine.plan = dataclasses.replace(engine.plan, shape=shape)
    if graphs is not False:
        engine._device.captured = Through(engine._device.round)
    return engine


@pytest.fixture(scope="module")
def things() -> Iterator[dict[str, Any]]:
    """What the tests' variables hold, by the names that they use for them."""
    engine = engine_on_cpu(demo_folder(), spec="draft", draft_model=demo_folder(), draft_max=2)
    engine.add(Request("r", (5, 6, 7), SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)))
    events = [event for _ in range(4) for event in engine.step()]
    parts = engine._device
    yield {
        "engine": engine,
        "state": parts.state,
        "captured": parts.captured,
        "run": Run(metrics=engine.metrics("r")),
        "record": RoundRecord("r", 0, 0, "draft", [], [], 0, [], {}, 0, 0),
        "event": events[0],
        "m": engine.metrics("r"),
        "metrics": engine.metrics("r"),
    }
    engine.close()


def value_of(node: ast.expr, names: Mapping[str, Any], missing: list[str]) -> Any:
    """What an expression is, UNKNOWN where that cannot be told; attributes that it lacks are `missing`."""
    if isinstance(node, ast.Name):
        return names.get(node.id, UNKNOWN)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        held = value_of(node.value, names, missing)
        return UNKNOWN if held is UNKNOWN else held[node.slice.value]
    if isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute):
        # A list of what runs changes nothing; other calls are not made.
        held = value_of(node.func, names, missing)
        return held() if held is not UNKNOWN and node.func.attr == "running" else UNKNOWN
    if not isinstance(node, ast.Attribute):
        return UNKNOWN
    held = value_of(node.value, names, missing)
    if held is not UNKNOWN and not hasattr(held, node.attr):
        missing.append(ast.unparse(node))
    return UNKNOWN if held is UNKNOWN else getattr(held, node.attr, UNKNOWN)


def missing_names(tree: ast.Module, names: Mapping[str, Any]) -> tuple[list[str], int]:
    """Attributes that do not exist, of what is read and of what is patched; and how many were looked at."""
    missing: list[str] = []
    looked = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            looked += value_of(node, names, missing) is not UNKNOWN
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "setattr"
        ):
            held, name = value_of(node.args[0], names, missing), node.args[1]
            assert isinstance(name, ast.Constant)
            if held is not UNKNOWN and not hasattr(held, name.value):
                missing.append(f"{ast.unparse(node.args[0])}.{name.value}")
    return sorted(set(missing)), looked


def names_of(module: Any, things: Mapping[str, Any]) -> dict[str, Any]:
    """What a module imports and defines over what variables hold; its fixtures are asked for by variables."""
    own = {name: held for name, held in vars(module).items() if isinstance(held, ModuleType | type)}
    return {**things, **own}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_name_exists(path: Path, things: dict[str, Any]) -> None:
    module = importlib.import_module(f"tests.gpu.{path.stem}")
    missing, _ = missing_names(ast.parse(path.read_text(encoding="utf-8")), names_of(module, things))
    assert missing == []


def test_names_are_looked_at(things: dict[str, Any]) -> None:
    """Private ones of the engine, too, which move most."""
    texts = [path.read_text(encoding="utf-8") for path in FILES]
    trees = [ast.parse(text) for text in texts]
    assert sum(missing_names(tree, things)[1] for tree in trees) > 40
    private = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr != "_sleep"
    }
    assert private == {"_device", "_scheduler", "_draft_length"}


@pytest.mark.parametrize(
    "text",
    [
        "engine._device.nothing.length",
        "engine._scheduler.running()[0].sheets",
        "patch.setattr(engine._device, 'nothing', 1)",
        "run.metrics.accepted_by_place",
        "[one.x for one in captured.taken]",
    ],
)
def test_a_name_that_is_gone_is_found(text: str, things: dict[str, Any]) -> None:
    missing, _ = missing_names(ast.parse(text), things)
    assert len(missing) == 1


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the GPU tests are on the CPU, in the forms that it has."""
    monkeypatch.setattr(gpu_helpers, "make_engine", engine_on_cpu)


@pytest.fixture
def work(rehearsal: None) -> gpu_helpers.Work:
    prompts = gpu_helpers.demo_prompts()
    stop = gpu_helpers.likely_stop(demo_folder(), prompts[2], dtype="bfloat16")
    return gpu_helpers.every_kind(prompts[:3], stop, max_tokens=8)


@pytest.fixture
def plain(work: gpu_helpers.Work) -> list[Run]:
    with gpu_helpers.gpu_engine(demo_folder(), dtype="bfloat16", graphs=False) as engine:
        return gpu_helpers.run_work(engine, work, 0)


def test_rounds_are_rehearsed(work: gpu_helpers.Work, plain: list[Run]) -> None:
    test_gpu_rounds.test_alone(work, plain, "draft", 4)
    test_gpu_rounds.test_lengths_that_change(work, plain)
    test_gpu_rounds.test_neighbours_do_not_change_acceptance(work[:4])


def test_captures_ahead_are_rehearsed(rehearsal: None) -> None:
    test_gpu_ahead.test_first_requests_capture_nothing("draft", test_gpu_ahead.PENALTIES)
    test_gpu_ahead.test_what_adaptive_lengths_try_first_is_captured()


def test_forms_are_rehearsed(rehearsal: None, tmp_path: Path) -> None:
    form = gpu_forms.make_form("int8", tmp_path)
    short = [(prompt, dataclasses.replace(params, max_tokens=16)) for prompt, params in form.work[:2]]
    with gpu_helpers.gpu_engine(form.folder, graphs=False, **gpu_forms.form_wishes("int8")) as engine:
        runs = gpu_helpers.run_work(engine, short, 0)
    for method, count in (("mtp", 2), ("eagle3", 2)):
        dataclasses.replace(form, work=short[:count], plain=runs[:count]).check(method, 3)


def test_a_model_that_drafts_for_itself_is_rehearsed(rehearsal: None) -> None:
    test_gpu_texts.test_a_model_that_drafts_for_itself_is_always_right("bfloat16", 4, 4)
