"""Captured rounds without a GPU, by a stand-in for capture: the same texts, and nothing has moved."""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spd
from spd.kernels.dispatch import load_kernels
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.engine import assembly
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.limits import TRASH_PAGE
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.state import RING_DEPTH, RoundState
from tests.helpers import INTERPRETED, Damped, Run, few_programs, make_engine, random_prompts, run_all
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime.graph_stand_in import StandIn, Tape, tensors_in
from tests.runtime.host_watch import HostWatch

Watched, Shelf = Callable[..., tuple[Engine, StandIn]], Callable[..., Path]
Pairs = dict[str, tuple[Path, dict[str, Any]]]


def two_slots(model: Path, **wishes: Any) -> Engine:
    """An engine on the CPU, whatever else is there."""
    return make_engine(model, **{"slots": 2, "device": "cpu", **wishes})


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """An engine whose rounds are captured by the stand-in."""

    def make(model: Path, **wishes: Any) -> tuple[Engine, StandIn]:
        tape = Tape(wishes.get("kernels", "torch"))
        with monkeypatch.context() as patch:
            patch.setattr(assembly, "load_kernels", lambda *args: tape.wrap(load_kernels(*args)))
            engine = two_slots(model, **wishes)
        engine._device.captured = stand_in = StandIn(engine, tape)
        return engine, stand_in

    yield make
    gc.unfreeze()  # which the stand-in has frozen


@pytest.fixture(autouse=True)
def no_host_reads(monkeypatch: pytest.MonkeyPatch) -> HostWatch:
    """Every round of every test here fails at what would make the host wait."""
    watch = HostWatch("torch", "triton")
    watch.install(monkeypatch)
    return watch


damped = Damped(loud=1)


@pytest.fixture(scope="module")
def target(tiny: Shelf) -> Path:
    return tiny("qwen3", residual_gain=damped, seed=5)


@pytest.fixture(scope="module")
def speculated(target: Path, tiny: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Targets, and what drafts for them; none has experts, for torch's ask the host."""
    draft, folder = tiny("qwen3", layers=1, residual_gain=damped, seed=5), tmp_path_factory.mktemp("heads")
    shape: dict[str, Any] = {"layers": 2, "vocab": 256, "tokenizer": False, "seed": 5}
    headed = write_tiny_mtp(folder / "mtp", family="mimo", kind="copy", **shape)
    options: dict[str, Any] = {"aux": (1, 2), "draft_vocab": 200, "target_options": shape}
    head = write_tiny_pair(folder / "eagle3", folder / "head", kind="copy", **options)
    return {
        "off": (target, {"spec": "off"}),
        "ngram": (target, {"spec": "ngram", "ngram_min": 1}),
        "draft": (target, {"spec": "draft", "draft_model": draft}),
        "block": (target, {"spec": "draft", "draft_model": draft, "verify": "block"}),
        "draft+ngram": (target, {"spec": "draft+ngram", "draft_model": draft, "ngram_min": 2}),
        "mtp": (headed, {"spec": "mtp"}),
        "eagle3": (folder / "eagle3", {"spec": "eagle3", "draft_model": head}),
    }


PROMPTS = [*random_prompts(4, 12, 256), *random_prompts(3, 70, 256, seed=1)]
PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 5},
    {"max_tokens": 14},
    {"max_tokens": 9, "temperature": 0.8},
    {"max_tokens": 12, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"max_tokens": 8, "temperature": 1.0, "top_p": 0.8, "top_k": 30, "logit_bias": ((7, 2.0),)},
    {"max_tokens": 12, "min_tokens": 5, "stop_token_ids": tuple(range(0, 256, 16))},
    {"max_tokens": 14, "temperature": 0.7, "presence_penalty": 0.5, "min_p": 0.05},
]
"""Two run at a time, so the needs of a round change whenever one makes room for the next."""


def run_batch(engine: Engine, step: int = 1) -> list[Run]:
    """Each request, or each so many."""
    params = [SamplingParams(**{"seed": i, **options}) for i, options in enumerate(PARAMS)]
    return run_all(engine, PROMPTS[::step], params[::step])


@functools.cache
def plain(model: Path) -> list[Any]:
    """What a model says without speculation, each asked once."""
    return [run.output for run in run_batch(two_slots(model))]


def story(runs: list[Run]) -> list[tuple[object, object, object]]:
    """Everything that a round decided: tokens, drafts and how many were accepted, in order."""
    return [(run.output, run.drafts, [record.sampled for record in run.rounds]) for run in runs]


QUICK = {"off": 0, "ngram": 3, "draft": 1, "draft+ngram": 3, "mtp": 1}
OTHERS = {"ngram": 1, "draft": 3, "draft+ngram": 1, "mtp": 3, "eagle3": 3}
CASES = [*QUICK.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS.items())]


@pytest.mark.covers(1)
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(("method", "k"), CASES)
def test_replays_are_eager_rounds(speculated: Pairs, watched: Watched, method: str, k: int, lag: int) -> None:
    target, speculation = speculated[method]
    wishes = {**speculation, **({"draft_max": k} if k else {})}
    eager = story(run_batch(two_slots(target, **wishes)))
    assert [tokens for tokens, _, _ in eager] == plain(target)
    engine, captured = watched(target, lag=lag, **wishes)
    runs = run_batch(engine)
    assert story(runs) == eager
    shapes = list(captured.captured)
    needs = {shape.needs for shape in shapes}
    assert captured.counted > 0
    assert captured.replays > len(shapes) and len(needs) > 4 and SamplerClass() in needs
    assert {(shape.k, shape.next_k) for shape in shapes} == ({(0, k), (k, k)} if k else {(0, 0)})
    if k:
        metrics = [run.metrics for run in runs]
        assert 0 < sum(m.draft_n_accepted for m in metrics) < sum(m.draft_n for m in metrics)


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("method", ["mtp", "ngram", "draft", "eagle3"])
def test_lengths_that_change(speculated: Pairs, watched: Watched, method: str) -> None:
    """Each pair of lengths is a program of its own; drafts are brought up between them."""
    pattern, (target, speculation) = [3, 0, 1, 1, 0, 0, 3, 2, 0], speculated[method]
    told = []
    for lag, make in ((0, two_slots), (0, watched), (2, watched)):
        made: Any = make(target, **speculation, draft_max=3, lag=lag)
        engine, captured = made if make is watched else (made, None)
        engine._draft_length.choose = itertools.cycle(pattern).__next__
        told.append(run_batch(engine, 2))
        assert [run.output for run in told[-1]] == plain(target)[::2]
        if captured:
            shapes = list(captured.captured)
            assert set(itertools.pairwise(pattern)) <= {(shape.k, shape.next_k) for shape in shapes}
            assert len({shape.needs for shape in shapes}) > 2 and captured.replays > 0
    assert story(told[0]) == story(told[1])
    assert sum(run.metrics.draft_n_accepted for run in told[0]) > 0


def step_into(engine: Engine, steps: int) -> None:
    """Requests under way in both slots, with rounds not yet read."""
    for i in range(2):
        params = SamplingParams(max_tokens=60, repetition_penalty=1.2, temperature=0.5 * i, ignore_eos=True)
        engine.add(Request(f"r{i}", PROMPTS[4 * i], params))
    for _ in range(steps):
        engine.step()


def snapshot(engine: Engine) -> dict[str, Tensor]:
    return {path: tensor.clone() for path, tensor in tensors_in(engine._device)}


@pytest.mark.parametrize("method", ["ngram", "block", "mtp"])
def test_preparing_a_shape_changes_nothing(speculated: Pairs, watched: Watched, method: str) -> None:
    """Silent slots write to the page that swallows, and to the ring's row that the next round writes."""
    k, (target, wishes) = 3, speculated[method]
    engine, captured = watched(target, lag=2, **wishes, draft_max=k)
    step_into(engine, 5)
    assert len(engine._scheduler.in_flight) == 2
    before, views = snapshot(engine), captured.views
    row = int(engine._device.state.counter) % RING_DEPTH
    unread = [(row - 1) % RING_DEPTH, (row - 2) % RING_DEPTH]
    captured._capture = lambda program: (lambda: None, None)  # as a real capture, it runs nothing
    fresh, count = SamplerClass(True, True, True, False, True), len(views)
    for shape in (RoundShape(k, k - 1, fresh, 2, count), RoundShape(0, k, SamplerClass(), None, count)):
        assert shape not in captured.captured
        CapturedRounds.capture(captured, shape, views)
    assert int(engine._device.state.active.sum()) == 2
    for path, tensor in snapshot(engine).items():
        if path.startswith("parts.rows["):
            continue  # the ring and the times again, row by row
        kept, old = tensor, before[path]
        if path.endswith((".ring", ".times")):
            assert torch.equal(kept[unread], old[unread]), path
            others = [i for i in range(RING_DEPTH) if i != row]
            kept, old = kept[others], old[others]
        elif ".pools[" in path:
            assert not torch.equal(kept[TRASH_PAGE], torch.zeros_like(kept[TRASH_PAGE])), "nothing ran"
            kept, old = kept[TRASH_PAGE + 1 :], old[TRASH_PAGE + 1 :]
        elif ".page_states[" in path:
            kept, old = kept[TRASH_PAGE + 1 :], old[TRASH_PAGE + 1 :]
        elif ".rings[" in path:  # their last row swallows
            kept, old = kept[:, :-1], old[:, :-1]
        assert torch.equal(kept, old), path


def replace_lengths(engine: Engine, captured: StandIn) -> None:
    engine._device.state.length = engine._device.state.length.clone()


def move_seed(engine: Engine, captured: StandIn) -> None:
    engine._device.sampler.seed.set_(engine._device.sampler.seed.clone())  # type: ignore[call-overload]


def change_host_value(engine: Engine, captured: StandIn) -> None:
    engine._device.state.max_len -= 1


def keep_one_a_reading(engine: Engine, captured: StandIn) -> None:
    """Where the host reads a round, in what no object holds."""
    honest = engine._read_oldest

    def hoarding(kept: list[Tensor] = []) -> None:  # noqa: B006
        kept.append(torch.zeros(1))
        honest()

    engine._read_oldest = hoarding  # type: ignore[method-assign]


Fault = Callable[[Engine, StandIn], None]
FAULTS: dict[Fault, str] = {
    **{replace_lengths: "passing", move_seed: "has moved", change_host_value: "."},
    keep_one_a_reading: "more tensors last",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(target: Path, watched: Watched, fault: Fault) -> None:
    engine, captured = watched(target, lag=1)
    step_into(engine, 5)
    assert captured.counted > 0
    fault(engine, captured)
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        for _ in range(3):
            engine.step()


@INTERPRETED[0]
@pytest.mark.parametrize("method", ["ngram", pytest.param("draft", marks=pytest.mark.slow)])
def test_in_the_form_that_is_captured(
    tiny: Shelf, watched: Watched, no_host_reads: HostWatch, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernels in its interpreter, as torch's: the host's bounds stay those of the capture."""
    pytest.importorskip("triton")
    few_programs(monkeypatch)
    shape: dict[str, Any] = {"hidden": 32, "intermediate": 32, "vocab": 70, "tokenizer": False, "seed": 5}
    target, draft = (tiny("qwen3", layers=n, residual_gain=damped, **shape) for n in (2, 1))
    prompts = [*random_prompts(1, 9, 70), *random_prompts(1, 7, 70)]
    params = [SamplingParams(max_tokens=5, temperature=t) for t in (0.0, 0.9)]
    wishes = {"spec": method, "draft_max": 2, "lag": 1, "ctx": 128, "kernels": "triton"}
    wishes |= {"draft_model": draft} if method == "draft" else {"ngram_min": 1}
    eager = run_all(two_slots(target, **{**wishes, "kernels": "torch"}), prompts, params)
    engine, captured = watched(target, **wishes)
    assert story(run_all(engine, prompts, params)) == story(eager)
    assert captured.replays > 2 and no_host_reads.rounds > captured.replays
    assert sum(run.metrics.draft_n for run in eager) > 0


STATE_READS: dict[str, Callable[[RoundState], object]] = {
    "__bool__": lambda state: bool(state.active.any()),
    "item": lambda state: state.counter.item(),
    "aten.equal": lambda state: torch.equal(state.length, state.min_length),
    "aten.index": lambda state: state.length[state.active],
    "aten.where": lambda state: torch.where(state.active),
    "__index__": lambda state: state.tokens[:, : state.length[0]],
    "torch.cuda.synchronize": lambda state: torch.cuda.synchronize(),
    "Event.synchronize": lambda state: torch.cuda.Event.synchronize(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", STATE_READS)
def test_what_a_round_asks_is_seen(target: Path, what: str) -> None:
    """The watch over all rounds here notices what is asked in the middle of one, be it eager or captured."""
    engine = two_slots(target, spec="ngram", ngram_min=1, draft_max=2)
    honest, state = engine._device.round._commit, engine._device.state

    def curious(*args: Any) -> None:
        STATE_READS[what](state)
        honest(*args)

    engine._device.round._commit = curious  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=rf"waits for the device: ([A-Za-z.]+\.)?{re.escape(what)}[. ]"):
        run_all(engine, PROMPTS[:1], [SamplingParams(max_tokens=4)])


def test_who_waits_for_the_device() -> None:
    """By the source, for what is done on a GPU alone does not run here: a row that is read, and loading."""
    root, found = Path(spd.__file__).parent, list[str]()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {getattr(node, part, None) for part in ("attr", "id", "name")}
            if names & {"synchronize", "wait_stream", "cudaDeviceSynchronize"}:
                found.append(path.relative_to(root).as_posix())
    assert found == ["runtime/load/weight_reader.py", "runtime/round/round_queue.py"]
