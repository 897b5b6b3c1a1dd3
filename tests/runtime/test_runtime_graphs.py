"""Captured rounds without a GPU, by a stand-in for capture: equal texts, and no tensor has moved."""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spd
from spd.kernels.dispatch import load_kernels
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.engine import assembly
from spd.runtime.engine.draft_length import DraftLength
from spd.runtime.engine.request import GrammarSpec
from spd.runtime.plan.plan import _draft_tiers
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.limits import TRASH_PAGE
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.state import RING_DEPTH, RoundState, narrow_to_slots
from tests import helpers
from tests.helpers import (
    INTERPRETER_MARKS,
    DampedLayers,
    Run,
    get_local_queue,
    make_engine,
    random_prompts,
    run_all,
    run_requests,
)
from tests.pairs import Pairs
from tests.runtime.graph_stand_in import StandIn, Tape, tensors_in
from tests.runtime.host_watch import HostWatch

Watched = Callable[..., tuple[Engine, StandIn]]
Shelf = Callable[..., Path]


def two_slots(model: Path, **options: Any) -> Engine:
    """Return an engine on the CPU."""
    return make_engine(model, **{"slots": 2, "device": "cpu", **options})


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Return a function that makes engines whose rounds the stand-in captures."""

    def make(model: Path, **options: Any) -> tuple[Engine, StandIn]:
        tape = Tape(options.get("kernels", "torch"))
        with monkeypatch.context() as patch:
            patch.setattr(assembly, "load_kernels", lambda *args: tape.wrap(load_kernels(*args)))
            engine = two_slots(model, **options)
        stand_in = StandIn(engine, tape)
        get_local_queue(engine).captured = stand_in
        return engine, stand_in

    yield make
    gc.unfreeze()  # which the stand-in has frozen


@pytest.fixture(autouse=True)
def no_host_reads(monkeypatch: pytest.MonkeyPatch) -> HostWatch:
    """Fail every round of every test here that would make the host wait.

    No grammar masks the drafts of a round, which waits for the host and is for CPUs only.
    """
    monkeypatch.setattr("spd.runtime.engine.engine.guide_drafts", lambda *args: None)
    watch = HostWatch("torch", "triton")
    watch.install(monkeypatch)
    return watch


damped = DampedLayers(full_layers=1)


def model_and_options(pairs: Pairs, method: str, k: int = 2) -> tuple[Path, dict[str, Any]]:
    """Return a target, and options for k drafts of a method.

    `block`: a draft model under that rule.
    """
    pair = pairs.get(method.replace("block", "draft"))
    rule_options = {"verify": "block"} if method.startswith("block") else {}
    return pair.model, pair.speculation_options | rule_options | (
        {} if method == "off" else {"draft_max": k}
    )


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
    """Run every request, or every `step`-th one."""
    params = [SamplingParams(**{"seed": i, **options}) for i, options in enumerate(PARAMS)]
    return run_all(engine, PROMPTS[::step], params[::step])


@functools.cache
def plain(model: Path) -> list[Any]:
    """Return a model's outputs without speculation, computed once for each model."""
    return [run.output for run in run_batch(two_slots(model))]


def story(runs: list[Run]) -> list[tuple[object, object, object]]:
    """Return all that the rounds decided, in order: outputs, drafts and samples."""
    return [(run.output, run.drafts, [record.sampled for record in run.rounds]) for run in runs]


QUICK = [("off", 0), ("draft+ngram", 3), ("one", 1)]
OTHERS = [
    ("ngram", 3),
    ("draft", 1),
    ("ngram", 1),
    ("draft", 3),
    ("draft+ngram", 1),
    ("one", 3),
    ("eagle", 3),
]
CASES = [*QUICK, *(pytest.param(method, k, marks=pytest.mark.slow) for method, k in OTHERS)]


@pytest.mark.covers(1, count=2)
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(("method", "k"), CASES)
def test_replays_are_eager_rounds(
    pairs: Pairs, watched: Watched, method: str, k: int, lag: int
) -> None:
    target, options = model_and_options(pairs, method, k)
    eager = story(run_batch(two_slots(target, **options)))
    assert [tokens for tokens, _, _ in eager] == plain(target)
    engine, captured = watched(target, lag=lag, **options)
    runs = run_batch(engine)
    assert story(runs) == eager
    shapes = list(captured.captured)
    needs = {shape.needs for shape in shapes}
    assert captured.counted > 0
    assert captured.replays > len(shapes) and len(needs) > 4 and SamplingSteps() in needs
    assert {(shape.k, shape.next_k) for shape in shapes} == ({(0, k), (k, k)} if k else {(0, 0)})
    if k:
        metrics = [run.metrics for run in runs]
        assert 0 < sum(m.draft_n_accepted for m in metrics) < sum(m.draft_n for m in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one", "ngram", "draft", "eagle"])
def test_changing_lengths_change_no_text(pairs: Pairs, watched: Watched, method: str) -> None:
    """Each pair of lengths is a separate program; drafters catch up between them."""
    pattern = [3, 0, 1, 1, 0, 0, 3, 2, 0]
    target, options = model_and_options(pairs, method, 3)
    runs_by_engine = []
    for lag, make in ((0, two_slots), (0, watched), (2, watched)):
        engine_or_pair: Any = make(target, **options, lag=lag)
        engine, captured = engine_or_pair if make is watched else (engine_or_pair, None)
        engine.draft_length.choose_k = itertools.cycle(pattern).__next__
        runs_by_engine.append(run_batch(engine, 2))
        assert [run.output for run in runs_by_engine[-1]] == plain(target)[::2]
        if captured:
            shapes = list(captured.captured)
            assert set(itertools.pairwise(pattern)) <= {(shape.k, shape.next_k) for shape in shapes}
            assert len({shape.needs for shape in shapes}) > 1 and captured.replays > 0
    assert story(runs_by_engine[0]) == story(runs_by_engine[1])
    assert (
        sum(run.metrics.draft_n_accepted for run in runs_by_engine[0]) > 0 or method == "ngram"
    ), "texts hardly repeat"


def step_into(engine: Engine, steps: int) -> None:
    """Run both slots for so many steps, with rounds in flight at the end."""
    for i in range(2):
        params = SamplingParams(
            max_tokens=60, repetition_penalty=1.2, temperature=0.5 * i, ignore_eos=True
        )
        engine.add(Request(f"r{i}", PROMPTS[4 * i], params))
    for _ in range(steps):
        engine.step()


@pytest.mark.parametrize("method", ["ngram", "block", "one"])
def test_preparing_a_shape_changes_nothing(pairs: Pairs, watched: Watched, method: str) -> None:
    """Inactive slots write only to the trash page, and to the ring's row that the next round writes."""
    k = 3
    target, options = model_and_options(pairs, method, 3)
    engine, captured = watched(target, lag=2, **options)
    step_into(engine, 5)
    assert len(engine.scheduler.in_flight) == 2
    before = {path: tensor.clone() for path, tensor in tensors_in(engine.round_queue)}
    views = captured.views
    state = get_local_queue(engine).state
    row = int(state.counter) % RING_DEPTH
    unread = [(row - 1) % RING_DEPTH, (row - 2) % RING_DEPTH]
    captured._capture = lambda program: (lambda: None, None)  # as a real capture, it runs nothing
    fresh = SamplingSteps(noise=True, truncation=True, penalties=True, bias=False, min_length=True)
    count = len(views)
    for shape in (
        RoundShape(k=k, next_k=k - 1, needs=fresh, num_logprobs=2, slots=count),
        RoundShape(k=0, next_k=k, needs=SamplingSteps(), num_logprobs=None, slots=count),
    ):
        assert shape not in captured.captured
        CapturedRounds.capture(captured, shape, views)
    assert int(state.active.sum()) == 2
    for path, tensor in tensors_in(engine.round_queue):
        if path.startswith("parts.rows["):
            continue  # the ring and the times again, row by row
        current = tensor
        old = before[path]
        if path.endswith((".ring", ".times")):
            assert torch.equal(current[unread], old[unread]), path
            other_rows = [i for i in range(RING_DEPTH) if i != row]
            current = current[other_rows]
            old = old[other_rows]
        elif ".pools[" in path:
            assert not torch.equal(current[TRASH_PAGE], torch.zeros_like(current[TRASH_PAGE])), (
                "nothing ran"
            )
            current = current[TRASH_PAGE + 1 :]
            old = old[TRASH_PAGE + 1 :]
        elif ".page_states[" in path:
            current = current[TRASH_PAGE + 1 :]
            old = old[TRASH_PAGE + 1 :]
        elif ".rings[" in path:  # their last row swallows
            current = current[:, :-1]
            old = old[:, :-1]
        assert torch.equal(current, old), path


def leak_a_tensor_per_read(engine: Any) -> None:
    """Store a new tensor in a closure at every read of a round."""
    original = engine.read_oldest_round
    tensors = list[Tensor]()

    def read_oldest() -> Any:
        tensors.append(torch.zeros(1))
        return original()

    engine.read_oldest_round = read_oldest


FAULTS: dict[str, Callable[[Any], object]] = {
    "passing": lambda engine: vars(engine.round_queue.state).update(
        length=engine.round_queue.state.length.clone()
    ),
    "has moved": lambda engine: engine.round_queue.sampler.seed.set_(
        engine.round_queue.sampler.seed.clone()
    ),
    r"\[\[200,": lambda engine: vars(engine.round_queue.state).update(max_len=200),
    "more tensors last": leak_a_tensor_per_read,
}
"""Faults by the message that reports them."""


@pytest.mark.parametrize("words", FAULTS)
def test_planted_faults_are_seen(pairs: Pairs, watched: Watched, words: str) -> None:
    engine, captured = watched(pairs.get("off").model, lag=1)
    step_into(engine, 5)
    assert captured.counted > 0
    FAULTS[words](engine)
    with pytest.raises(AssertionError, match=words):
        for _ in range(3):
            engine.step()


@INTERPRETER_MARKS[0]
@pytest.mark.parametrize("method", ["ngram", pytest.param("draft", marks=pytest.mark.slow)])
def test_in_the_form_that_is_captured(
    tiny: Shelf,
    watched: Watched,
    no_host_reads: HostWatch,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's kernels in its interpreter equal torch's.

    The host's bounds stay those of the capture.
    """
    pytest.importorskip("triton")
    helpers.limit_programs(monkeypatch)
    shape: dict[str, Any] = {
        "hidden": 32,
        "intermediate": 32,
        "vocab": 70,
        "tokenizer": False,
        "seed": 5,
    }
    target, draft = (tiny("qwen3", layers=n, residual_gain=damped, **shape) for n in (2, 1))
    prompts = [*random_prompts(1, 9, 70), *random_prompts(1, 7, 70)]
    params = [SamplingParams(max_tokens=5, temperature=t) for t in (0.0, 0.9)]
    options = {"spec": method, "draft_max": 2, "lag": 1, "ctx": 128, "kernels": "triton"}
    options |= {"draft_model": draft} if method == "draft" else {"ngram_min": 1}
    eager = run_all(two_slots(target, **{**options, "kernels": "torch"}), prompts, params)
    engine, captured = watched(target, **options)
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
    "Event.synchronize": lambda state: torch.cuda.Event.synchronize(None),
}


@pytest.mark.parametrize("read", STATE_READS)
def test_what_a_round_asks_is_seen(pairs: Pairs, read: str) -> None:
    """The watch over all rounds here detects every kind of read in the middle of a round."""
    target, options = model_and_options(pairs, "ngram")
    engine = two_slots(target, **options)
    round_ = get_local_queue(engine).round
    original = round_._commit_and_emit
    state = round_.state
    round_._commit_and_emit = lambda **operands: STATE_READS[read](state) or original(**operands)  # type: ignore
    with pytest.raises(
        AssertionError, match=rf"waits for the device: ([A-Za-z.]+\.)?{re.escape(read)}[. ]"
    ):
        run_all(engine, PROMPTS[:1], [SamplingParams(max_tokens=4)])


def test_only_two_files_wait_for_the_device() -> None:
    """By the source, since GPU code does not run here: reading a row, and loading weights."""
    root = Path(spd.__file__).parent
    paths = list[str]()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {getattr(node, part, None) for part in ("attr", "id", "name")}
            if names & {"synchronize", "wait_stream", "cudaDeviceSynchronize"}:
                paths.append(path.relative_to(root).as_posix())
    assert paths == ["runtime/load/weight_reader.py", "runtime/round/local_queue.py"]


# -- rounds captured before any request comes, and of a part of the slots ------------------------------

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
NOISY = SamplingParams(temperature=0.8, seed=3)
PENALTIES = SamplingParams(
    max_tokens=10, repetition_penalty=1.3, logit_bias=((7, 2.0),), temperature=0.7
)


def lengths_of(shapes: Sequence[RoundShape], slots: int) -> set[tuple[int, int]]:
    return {(shape.k, shape.next_k) for shape in shapes if shape.slots == slots}


@pytest.mark.covers(count=2)
@pytest.mark.parametrize(("adaptive", "k"), [(False, 3), (True, 3), (False, 0), (True, 1)])
def test_few_shapes_are_captured_in_order(
    pairs: Pairs, watched: Watched, adaptive: bool, k: int
) -> None:
    target, options = model_and_options(pairs, "one" if k else "off", k)
    engine, captured = watched(target, slots=5, adaptive=adaptive, **options)
    fixed = {(0, k), (k, k)}
    batch_lengths = {0, k}
    single_lengths = {0, k - 1, k}
    alone, together = (
        {*itertools.product(lengths, lengths)} if adaptive else fixed
        for lengths in (single_lengths, batch_lengths)
    )
    count = 2 * (len(alone) + len(together))
    assert engine.capture_ahead([GREEDY, NOISY, GREEDY]) == count == len(captured.order) <= 26
    order = captured.order
    assert list(captured.captured) == order == sorted(order, key=lambda s: -s.slots * (s.k + 1))
    assert {shape.needs for shape in order} == {SamplingSteps(), SamplingSteps(noise=True)}
    assert {shape.slots for shape in order} == {1, 5} and {
        shape.num_logprobs for shape in order
    } == {None}
    assert (lengths_of(order, 1), lengths_of(order, 5)) == (alone, together)
    assert engine.capture_ahead([GREEDY, NOISY]) == 0 == captured.rounds, "all are there"


def test_how_many_and_for_whom_can_be_told(pairs: Pairs, watched: Watched) -> None:
    target, options = model_and_options(pairs, "one")
    engine, captured = watched(target, slots=5, **options)
    assert engine.capture_ahead([GREEDY], concurrency=2) == 2
    assert {shape.slots for shape in captured.order} == {5}
    params = SamplingParams(logprobs=1, temperature=1.0)
    assert [engine.capture_ahead([params], limit=1, concurrency=5) for _ in range(3)] == [1, 1, 0]
    noisy = SamplingSteps(noise=True)
    assert captured.order[2:] == [
        RoundShape(k=2, next_k=2, needs=noisy, num_logprobs=1, slots=5),
        RoundShape(k=0, next_k=2, needs=noisy, num_logprobs=1, slots=5),
    ]
    engine.add(Request("r", (5, 6, 7), GREEDY))
    assert engine.capture_ahead([GREEDY]) == 0, "while anything runs"


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("method", ["off", "ngram", "block", "one"])
def test_first_requests_capture_nothing(pairs: Pairs, watched: Watched, method: str) -> None:
    """A request for every slot at once, and one alone, with all state of a sampler."""
    target, options = model_and_options(pairs, method)
    prompts = random_prompts(2, 20, 256)
    for params, lag in ((GREEDY, 0), (PENALTIES, 2)):
        eager = make_engine(target, slots=2, **options)
        engine, captured = watched(target, slots=2, lag=lag, **options)
        count = engine.capture_ahead([params])
        expected, actual = (
            story(
                run_all(tested_engine, prompts, [params] * 2)
                + run_all(tested_engine, prompts[:1], [params])
            )
            for tested_engine in (eager, engine)
        )
        assert actual == expected and len(captured.order) == count > 0, captured.order[count:]
        assert captured.replays == captured.rounds > 0


@pytest.mark.parametrize("name", ["mtp", "draft", "ngram"])
def test_pairs_are_those_that_come(name: str) -> None:
    """For a request whose drafts are mostly accepted, if a draft costs a tenth of a round."""
    maximum = {"mtp": 3, "draft": 4, "ngram": 8}[name]
    policy = DraftLength(maximum, True, _draft_tiers(maximum, graphs=True))
    pairs_run = set()
    k = 0
    policy.set_requests([])
    for number in range(220):
        next_k = policy.choose_k()
        pairs_run.add((k, next_k))
        policy.observe_cost(k, 1.0 + 0.01 * k, 0.1 * next_k if name != "ngram" else 0.0, next_k)
        policy.observe(k, k, min(k, number % 9 != 0 and k))
        k = next_k
    assert policy.likely_pairs(alone=True) >= pairs_run >= policy.likely_pairs(alone=False)
    assert len(pairs_run) == 7


def failing_after(count: int) -> Callable[[Any], Any]:
    """Return a capture function that runs out of memory after `count` calls."""
    remaining = [count]

    def capture(program: Callable[[], Any]) -> Any:
        remaining[0] -= 1
        if remaining[0] == -1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return program, None

    return capture


def test_where_memory_runs_out_rounds_are_captured_when_they_are_run(pairs: Pairs) -> None:
    """All captures are dropped, so that the needed ones have room."""
    prompts = random_prompts(2, 9, 256)
    target, options = model_and_options(pairs, "ngram")
    plain = [run.output for run in run_all(make_engine(target, slots=2), prompts, [GREEDY] * 2)]
    engine = make_engine(target, slots=2, **options)
    queue = get_local_queue(engine)
    state = queue.state
    captured = CapturedRounds(queue.round, failing_after(2))
    queue.captured = captured
    graph: Any = object()
    captured.pool_graph = graph
    assert engine.capture_ahead([GREEDY]) == 2
    assert captured.captured == {} and captured.pool_graph is None
    assert engine.capture_ahead([GREEDY]) == 0 == engine.capture_ahead([NOISY]), (
        "nor is it tried again"
    )
    assert not state.active.any() and int(state.counter) == 0
    assert [run.output for run in run_all(engine, prompts, [GREEDY] * 2)] == plain
    assert len(captured.captured) == 2
    queue.captured = CapturedRounds(queue.round, failing_after(0))
    queue.is_only_rank = False
    with pytest.raises(torch.OutOfMemoryError):
        engine.capture_ahead([GREEDY])  # other ranks would wait


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
    prompts = [random_prompts(1, 12 + 9 * (i % 3), 256, seed=i)[0] for i in range(len(KINDS))]
    requests_ = [
        Request(f"r{i}", prompts[i], SamplingParams(seed=i, **kind)) for i, kind in enumerate(KINDS)
    ]
    requests_[4] = replace(requests_[4], grammar=GrammarSpec("regex", "[a-z ]{4,9}[.]"))
    return requests_


@pytest.mark.covers(1, count=1)
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("method", ["off", "ngram", "one", "one+ngram", "block+ngram"])
def test_texts_are_those_of_whole_rounds(
    pairs: Pairs, watched: Watched, method: str, lag: int
) -> None:
    target, options = model_and_options(pairs, method)
    options |= {"slots": SLOTS}
    eager = run_requests(make_engine(target, **options), requests())
    engine, captured = watched(target, lag=lag, **options)
    runs = run_requests(engine, requests())
    assert story(runs) == story(eager)
    if not lag:  # what is read later finds, without a GPU's copies, those of a later round
        for run, eager_run in zip(runs, eager, strict=True):
            assert run.logprobs == pytest.approx(eager_run.logprobs, abs=1e-5)
    sizes = {shape.slots for shape in captured.captured}
    assert {1, SLOTS} <= sizes <= {1, 4, SLOTS} and (lag or 4 in sizes)
    assert captured.replays > len(captured.captured)


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("method", ["one+ngram", "block+ngram"])
def test_a_part_is_made_of_the_same_memory_and_of_nothing_wider(pairs: Pairs, method: str) -> None:
    """A proposer with a tensor by slots that is not narrowed fails here."""
    target, options = model_and_options(pairs, method)
    engine = make_engine(target, **options, slots=SLOTS)
    run_requests(engine, requests())  # what is made at first use is there
    full_round = get_local_queue(engine).round
    part = narrow_to_slots(full_round, 4)
    full_tensors, part_tensors = (
        {path: t for path, t in tensors_in(round_) if t.numel()} for round_ in (full_round, part)
    )
    assert part_tensors.keys() == full_tensors.keys() and len(part_tensors) > 30
    cut = {path for path, tensor in full_tensors.items() if tensor.shape[:1] == (SLOTS,)}
    for path, tensor in part_tensors.items():
        assert tensor.data_ptr() == full_tensors[path].data_ptr(), path
        assert tensor.shape == (
            (4, *full_tensors[path].shape[1:]) if path in cut else full_tensors[path].shape
        ), path
    names = {path.rpartition(".")[2] for path in cut}
    assert {"tokens", "draft", "page_table", "seed", "bias", "mask", "generated"} <= names
    assert part.state.slots == 4 and full_round.state.slots == SLOTS
