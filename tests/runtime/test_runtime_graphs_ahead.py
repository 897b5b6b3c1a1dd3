"""Rounds captured before any request comes: which, in what order, and that no text shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime import Request, SamplingParams
from spd.runtime.engine.draft_length import DraftLength
from spd.runtime.engine.request import GrammarText
from spd.runtime.plan.plan import _draft_tiers
from spd.runtime.ranks.crew import ORDERS
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.round_queue import RoundQueue
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.state import narrowed
from tests.helpers import make_engine, random_prompts, run_all, run_requests
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime import test_runtime_graphs as graphs
from tests.runtime.graph_stand_in import tensors_in
from tests.runtime.test_runtime_graphs import Watched, story

watched, no_host_reads = graphs.watched, graphs.no_host_reads

GREEDY, NOISY = SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(temperature=0.8, seed=3)
PENALTIES = SamplingParams(max_tokens=10, repetition_penalty=1.3, logit_bias=((7, 2.0),), temperature=0.7)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead") / "target"
    return write_tiny_mtp(folder, kind="copy", layers=2, tie=False)


def wishes_of(method: str, target: Path, k: int = 2) -> dict[str, Any]:
    """Wishes for a method that drafts so many tokens; `block` is a draft model's under that rule."""
    if method == "off":
        return {"spec": "off"}
    model: dict[str, Any] = {"draft_model": target, "verify": "block"} if method.startswith("block") else {}
    return {"spec": method.replace("block", "draft"), "draft_max": k, "ngram_min": 1, **model}


def pairs(shapes: Sequence[RoundShape], slots: int) -> set[tuple[int, int]]:
    return {(shape.k, shape.next_k) for shape in shapes if shape.slots == slots}


@pytest.mark.parametrize(("adaptive", "k"), [(False, 3), (True, 3), (False, 0), (True, 1)])
def test_few_shapes_are_captured_in_order(target: Path, watched: Watched, adaptive: bool, k: int) -> None:
    wishes = wishes_of("mtp" if k else "off", target, k)
    engine, captured = watched(target, slots=5, adaptive=adaptive, **wishes)
    fixed, few, more = {(0, k), (k, k)}, {0, k}, {0, k - 1, k}
    alone, together = ({*product(each, each)} if adaptive else fixed for each in (more, few))
    count = 2 * (len(alone) + len(together))
    assert engine.capture_ahead([GREEDY, NOISY, GREEDY]) == count == len(captured.order) <= 26
    order = captured.order
    assert list(captured.captured) == order == sorted(order, key=lambda s: -s.slots * (s.k + 1))
    assert {shape.needs for shape in order} == {SamplerClass(), SamplerClass(noise=True)}
    assert {shape.slots for shape in order} == {1, 5} and {shape.num_logprobs for shape in order} == {None}
    assert (pairs(order, 1), pairs(order, 5)) == (alone, together)
    assert engine.capture_ahead([GREEDY, NOISY]) == 0 == captured.rounds, "all are there"


def test_how_many_and_for_whom_can_be_told(target: Path, watched: Watched) -> None:
    engine, captured = watched(target, slots=5, **wishes_of("mtp", target, 2))
    assert engine.capture_ahead([GREEDY], together=2) == 2
    assert {shape.slots for shape in captured.order} == {5}
    wanted = SamplingParams(logprobs=1, temperature=1.0)
    assert [engine.capture_ahead([wanted], most=1, together=5) for _ in range(3)] == [1, 1, 0]
    noisy = SamplerClass(noise=True)
    assert captured.order[2:] == [RoundShape(2, 2, noisy, 1, 5), RoundShape(0, 2, noisy, 1, 5)]
    engine.add(Request("r", (5, 6, 7), GREEDY))
    assert engine.capture_ahead([GREEDY]) == 0, "while anything runs"


@pytest.mark.parametrize("method", ["off", "ngram", "block", "mtp"])
def test_first_requests_capture_nothing(target: Path, watched: Watched, method: str) -> None:
    """As many requests as there are slots at once, and one alone; with everything that a sampler keeps."""
    wishes = wishes_of(method, target)
    prompts = random_prompts(2, 20, 256)
    for params, lag in ((GREEDY, 0), (PENALTIES, 2)):
        eager = make_engine(target, slots=2, **wishes)
        engine, captured = watched(target, slots=2, lag=lag, **wishes)
        count = engine.capture_ahead([params])
        told, found = (
            story(run_all(one, prompts, [params] * 2) + run_all(one, prompts[:1], [params]))
            for one in (eager, engine)
        )
        assert found == told and len(captured.order) == count > 0, captured.order[count:]
        assert captured.replays == captured.rounds > 0


@pytest.mark.parametrize("name", ["mtp", "draft", "ngram"])
def test_pairs_are_those_that_come(name: str) -> None:
    """A request whose drafts are mostly accepted, by a clock on which a draft costs a tenth of a round."""
    maximum = {"mtp": 3, "draft": 4, "ngram": 8}[name]
    policy, came, k = DraftLength(maximum, True, _draft_tiers(maximum, graphs=True)), set(), 0
    policy.attend([])
    for number in range(220):
        next_k = policy.choose()
        came.add((k, next_k))
        policy.observe_cost(k, 1.0 + 0.01 * k, 0.1 * next_k if name != "ngram" else 0.0, next_k)
        policy.observe(k, k, min(k, number % 9 != 0 and k))
        k = next_k
    assert policy.usual_pairs(alone=True) >= came >= policy.usual_pairs(alone=False)
    assert len(came) == 7


def failing_after(count: int) -> Callable[[Any], Any]:
    """A capture that runs out of memory after so many."""
    left = [count]

    def capture(program: Callable[[], Any]) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return program, None

    return capture


def test_where_memory_runs_out_rounds_are_captured_when_they_are_run(target: Path) -> None:
    """All are let go: those that are needed find the room that the others took."""
    prompts, wishes = random_prompts(2, 9, 256), wishes_of("ngram", target, 2)
    plain = [run.output for run in run_all(make_engine(target, slots=2), prompts, [GREEDY] * 2)]
    engine = make_engine(target, slots=2, **wishes)
    state, queue = engine._device.state, engine._device
    queue.captured = captured = CapturedRounds(queue.round, failing_after(2))
    captured.pool = object()
    assert engine.capture_ahead([GREEDY]) == 2
    assert captured.captured == {} and captured.pool is None
    assert engine.capture_ahead([GREEDY]) == 0 == engine.capture_ahead([NOISY]), "nor is it tried again"
    assert not state.active.any() and int(state.counter) == 0
    assert [run.output for run in run_all(engine, prompts, [GREEDY] * 2)] == plain
    assert len(captured.captured) == 2
    queue.captured, queue.alone = CapturedRounds(queue.round, failing_after(0)), False
    with pytest.raises(torch.OutOfMemoryError):
        engine.capture_ahead([GREEDY])  # other ranks would wait


def test_every_rank_is_asked_for_everything_that_is_done() -> None:
    """What rank 0 captures the others capture, in its order; what a sequence needs is made of such orders."""
    assert {name for name in vars(RoundQueue) if not name.startswith("_")} - {"close"} == set(ORDERS)


SLOTS = 7
KINDS: list[dict[str, Any]] = [
    {"max_tokens": 60, "ignore_eos": True},
    {"max_tokens": 6, "temperature": 0.8, "logprobs": 2},
    {"max_tokens": 10, "repetition_penalty": 1.3, "logit_bias": ((7, 2.0),)},
    {"max_tokens": 20, "temperature": 0.9, "top_p": 0.8, "ignore_eos": True},
    {"max_tokens": 9},  # with a grammar
    {"max_tokens": 13, "temperature": 0.7, "min_tokens": 4},
    {"max_tokens": 8, "presence_penalty": 0.4},
    {"max_tokens": 5},
    {"max_tokens": 11, "temperature": 1.0},
]
"""More than there are slots; the first is the longest, then one among the first four."""


def requests() -> list[Request]:
    given = [random_prompts(1, 12 + 9 * (i % 3), 256, seed=i)[0] for i in range(len(KINDS))]
    made = [Request(f"r{i}", given[i], SamplingParams(seed=i, **kind)) for i, kind in enumerate(KINDS)]
    made[4] = replace(made[4], grammar=GrammarText("regex", "[a-z ]{4,9}[.]"))
    return made


@pytest.mark.covers(1)
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("method", ["off", "ngram", "mtp", "mtp+ngram", "block+ngram"])
def test_texts_are_those_of_whole_rounds(target: Path, watched: Watched, method: str, lag: int) -> None:
    wishes = {**wishes_of(method, target), "slots": SLOTS}
    whole = run_requests(make_engine(target, **wishes), requests())
    engine, captured = watched(target, lag=lag, **wishes)
    runs = run_requests(engine, requests())
    assert story(runs) == story(whole)
    if not lag:  # what is read later finds, without a GPU's copies, those of a later round
        for run, one in zip(runs, whole, strict=True):
            assert run.logprobs == pytest.approx(one.logprobs, abs=1e-5)
    assert {shape.slots for shape in captured.captured} == {1, 4, SLOTS}
    assert captured.replays > len(captured.captured)


@pytest.mark.parametrize("method", ["mtp+ngram", "block+ngram"])
def test_a_part_is_made_of_the_same_memory_and_of_nothing_wider(target: Path, method: str) -> None:
    """A proposer that keeps another tensor by slots, and does not narrow it, is found here."""
    engine = make_engine(target, **wishes_of(method, target), slots=SLOTS)
    run_requests(engine, requests())  # what is made at first use is there
    whole, part = engine._device.round, narrowed(engine._device.round, 4)
    kept, held = ({path: t for path, t in tensors_in(each) if t.numel()} for each in (whole, part))
    assert held.keys() == kept.keys() and len(held) > 30
    cut = {path for path, tensor in kept.items() if tensor.shape[:1] == (SLOTS,)}
    for path, tensor in held.items():
        assert tensor.data_ptr() == kept[path].data_ptr(), path
        assert tensor.shape == ((4, *kept[path].shape[1:]) if path in cut else kept[path].shape), path
    names = {path.rpartition(".")[2] for path in cut}
    assert {"tokens", "draft", "page_table", "seed", "bias", "mask", "generated"} <= names
    assert part.state.slots == 4 and whole.state.slots == SLOTS
