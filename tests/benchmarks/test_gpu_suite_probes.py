"""The GPU suite's speed probes without a GPU: tiny models on the CPU; their figures mean nothing here."""

from __future__ import annotations

import inspect
import math
import re
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("triton")

from benchmarks.gpu_suite import batches, lane, latency, peers_gpu, warm_up
from benchmarks.gpu_suite.compiled_loop import CompiledLoop
from benchmarks.gpu_suite.digest import digest
from benchmarks.gpu_suite.end_to_end import config_of, run_draft, run_plain
from benchmarks.gpu_suite.gates import gate_lines
from benchmarks.gpu_suite.graph_timer import Once
from benchmarks.gpu_suite.kernel_cases import (
    Bench,
    Case,
    attention_case,
    draw_case,
    layer_case,
    linear_case,
    prefill_case,
    rotary_case,
    row_case,
)
from benchmarks.gpu_suite.kernel_table import cases, eight_over_one, run_case
from benchmarks.gpu_suite.room import needed_bytes, plan_anyway, side_by_side, usable_bytes
from benchmarks.gpu_suite.round_cases import (
    draft_verify_case,
    lookup_case,
    noise_case,
    round_case,
    sampling_case,
)
from benchmarks.gpu_suite.round_times import (
    GREEDY,
    Load,
    Recorder,
    RoundTimes,
    Span,
    describe_span,
    measure_load,
    random_prompt,
    run_span,
    start,
    stop,
    with_engine,
)
from benchmarks.gpu_suite.shapes import Eagle3Shape, Shape
from benchmarks.gpu_suite.sparse_cases import sparse_cases
from benchmarks.gpu_suite.speculation import REFERENCE_LENGTH
from benchmarks.gpu_suite.suite import PROBES
from spd.errors import ResourceError
from spd.kernels.attention.paged_attention import AttentionHeads
from spd.kernels.dispatch import Kernels, load_kernels, operation_stems
from spd.runtime import Engine
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.plan.plan import make_plan

TARGET = Shape("target", 64, 2, 4, 2, 96, vocab=300, head_dim=16)
DRAFT = Shape("draft", 32, 1, 2, 2, 48, vocab=300, tied=True, head_dim=16)
HEADS = AttentionHeads(4, 2, 16)
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
SMALL = Load(prompt=20, warm=4, rounds=8)
CASES: dict[str, Case] = {
    **{kind: partial(linear_case, kind=kind, n=64, k=48, rows=(1, 8)) for kind in ("qkv", "out", "gate_up")},
    "down": partial(linear_case, kind="down", n=64, k=48, rows=(1,)),
    "head": partial(linear_case, kind="head", n=100, k=48, rows=(3,)),
    "half": partial(linear_case, kind="gate_up", n=64, k=48, rows=(1, 8), dtype=torch.float16),
    "verify": partial(draft_verify_case, slots=2, k=3, vocab=300),
    "noise": partial(noise_case, vocab=300, rows=(1, 2)),
    "layer": partial(layer_case, shape=TARGET, rows=(1, 5)),
    "draw": partial(draw_case, vocab=100, hidden=32, rows=(1, 5)),
    "rows": partial(row_case, hidden=32, vocab=100, rows=(1, 5)),
    "attention": partial(attention_case, heads=HEADS, slots=2, context=512, rows=(1, 5)),
    "prefill": partial(prefill_case, heads=HEADS, chunk=64, starts=(0, 512)),
    "sampling": partial(sampling_case, vocab=300, rows=(1, 3)),
    "rotary": partial(rotary_case, heads=HEADS, rows=(1, 3)),
    "round": partial(round_case, slots=2, k=4, width=512, vocab=100),
    "lookup": partial(lookup_case, slots=1, k=4, widths=(128,), vocab=100),
}


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_every_case_meets_its_contract_in_both_forms(name: str, form: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench = Bench(load_kernels(form), Once(device), torch.float32, 1e9)
    result = run_case(CASES[name], bench)
    assert "error" not in result, result["error"]
    assert all(len(row) == 3 for row in result["rows"].values())


def test_the_table_measures_every_kind_of_case() -> None:
    dense = {name: case for name, case in cases().items() if name not in sparse_cases()}
    functions = {case.func for case in dense.values()}  # type: ignore[attr-defined]
    assert functions == {case.func for case in CASES.values()}  # type: ignore[attr-defined]
    assert len(set(cases())) == len(cases())


NOT_IN_THE_TABLE = {
    "linear",
    "latent_store",
    "head_linear",
    "mla_prefill",
    "router_logits",
    "route",
    "experts",
}
"""Of layers whose main kernels are; and those that feed an MTP head."""
HEAD = {"head_input", "keep_states"}


@torch.inference_mode()
def test_the_table_calls_every_kernel_that_is_not_left_out() -> None:
    called = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            operation = getattr(honest, name)
            if name not in operation_stems():
                return operation
            called.add(name)
            return operation

    honest = load_kernels("torch")
    bench = Bench(cast(Kernels, Watched()), Once("cpu"), torch.float32, 1e9)
    for case in CASES.values():
        assert "error" not in run_case(case, bench)
    sparse = {"mla_attention", "experts_onto"}
    assert called == set(operation_stems()) - NOT_IN_THE_TABLE - HEAD - sparse


@torch.inference_mode()
def test_a_product_of_halves_is_one_of_halves() -> None:
    seen = set()

    class Watching(Once):
        def microseconds(self, calls: Any) -> float:
            seen.update(one.dtype for call in calls for one in call.args if isinstance(one, torch.Tensor))
            return 1.0

    bench = Bench(load_kernels("torch"), Watching("cpu"), torch.float32, 1e9)
    CASES["half"](bench)
    assert seen == {torch.float16, torch.float32}, "with float32 sums of squares"
    seen.clear()
    linear_case(bench, "out", 64, 48, (1,))
    assert seen == {torch.float32}
    [name] = [name for name in cases() if "fp16" in name]
    rows = {"cases": {name: {"rows": {"1": [9.0, 0.5, None]}}}}
    lines = gate_lines({"kernel_table": {"result": rows}})
    assert any("products of 64 MB and more" in line and line.endswith("0.50, NOT met") for line in lines)


def test_shares_ratios_and_faults_of_the_table() -> None:
    class Timed(Once):
        def microseconds(self, calls: Any) -> float:
            return 2.0

    bench = Bench(load_kernels("torch"), Timed("cpu"), torch.float32, 4e9)
    # 4000 bytes in 2 us are 2e9 bytes a second, half of what can be read.
    assert bench.row([lambda: 0], 4000, [lambda: 0]) == [2.0, 0.5, 2.0]
    assert bench.row([lambda: 0], None) == [2.0, None, None]
    assert eight_over_one({"1": [2.0, None, 4.0], "8": [2.2, None, 5.0]})["8_over_1"] == pytest.approx(
        [1.1, 1.25]
    )
    assert eight_over_one({"1": [2.0, None, 4.0]}) == {}

    def broken(bench: Bench) -> Any:
        raise RuntimeError("no such kernel")

    assert run_case(broken, bench) == {"error": "RuntimeError: no such kernel"}

    class Forgetful(Timed):
        def microseconds(self, calls: Any) -> float:
            return float(calls[0]())

    forgetful = replace(bench, timer=Forgetful("cpu"))
    noted = run_case(lambda bench: {"1": bench.row([lambda: 3], None, [lambda: 1 / 0])}, forgetful)
    assert noted == {"rows": {"1": [3.0, None, None]}, "notes": ["ZeroDivisionError: division by zero"]}
    rows = {
        "a": {"rows": {"1": [2.0, None, 4.0], "8": [3.0, 0.5, None]}, "8_over_1": [1.5]},
        "b": {"error": "E"},
    }
    result = {"columns": "us", "cases": rows}
    text = digest({"probes": {"kernel_table": {"status": "cut short", "result": result}}})
    assert "a: 1: 2.0 - 4.0; 8: 3.0 0.50 -; 8/1 1.500" in text and "b: E" in text and "cut short" in text


def test_times_of_a_span_by_hand() -> None:
    def one(began: int, committed: int, ended: int) -> RoundTimes:
        return RoundTimes(4, began, committed, ended, 3000)

    # The first two are left out: one was on its way, one followed an idle device.
    records = [one(0, 1, 2), one(0, 1, 2), one(10_000, 13_000, 14_000), one(16_000, 20_000, 22_000)]
    found = describe_span(Span(4, 40e-6, 24, records), slots=2, lag=1)
    assert found["wall_us"] == pytest.approx(10) and found["tokens_a_round"] == 3
    assert found["period_us"] == [6, 6] and found["idle_us"] == [2, 2]
    assert found["device_us"] == [5, 6] and found["verify_us"] == [3.5, 4] and found["draft_us"] == [1.5, 2]
    assert found["host_waits_us"] == 3


@pytest.mark.parametrize("lag", [0, 2])
def test_every_round_is_noted_in_order(lag: int, tmp_path: Path) -> None:
    def work(engine: Engine) -> tuple[Span, Recorder, bool]:
        recorder = Recorder.of(engine)
        start(engine, [(1, 2, 3), (4, 5)], GREEDY, 3)
        span = run_span(engine, recorder, tokens=9)
        stop(engine, 2)
        return span, recorder, engine.has_work

    config = config_of(tmp_path, TARGET, ctx=64, slots=2, lag=lag, **CPU)
    span, recorder, left = with_engine(config, work)
    assert (span.rounds, span.tokens, len(span.records), left) == (5, 10, 5, False)
    marks = [t for one in recorder.rounds for t in (one.began, one.committed, one.ended)]
    assert marks == sorted(marks) and {one.k for one in recorder.rounds} == {0}


def test_a_load_that_ends_early_is_no_measurement(tmp_path: Path) -> None:
    def work(engine: Engine) -> Any:
        return measure_load(engine, Recorder.of(engine), SMALL, TARGET.vocab)

    with pytest.raises(RuntimeError, match="ended before"):
        with_engine(config_of(tmp_path, TARGET, ctx=28, **CPU), work)


def test_plain_rounds_of_a_tiny_model() -> None:
    *_, report = run_plain([TARGET], SMALL, (20, 40), 1e9, **CPU)
    model = report["models"]["target"]
    assert model["tokens_a_round"] == 1 and model["rounds"] == 8
    # 5 tokens were committed before the 8 that are watched, half of which lie behind on average: the first
    # as the request began to decode, then 4 rounds.
    assert model["context"] == 20 + 5 + 4
    # Two layers of 30,720 weights, a head of 19,200 and an embedding row, each of 2 bytes; 256 a position.
    assert model["floor_us"] == pytest.approx(1e-3 * (2 * (61_440 + 19_200 + 64) + 29 * 256))
    assert model["bytes"] == {
        "target layers": 2 * 61_440,
        "target head": 2 * 19_200,
        "target embedding": 2 * 64,
        "target keys and values": 29 * 256,
    }
    assert set(report["sampling"]) >= {"greedy", "noise", "filtered"}
    assert report["sampling"]["host_reads"]["syncs"] == 0
    assert [report["contexts"][c]["context"] for c in ("20", "40")] == [27, 47]
    text = digest({"probes": {"plain": {"status": "ok", "result": report}}})
    reads = "target layers 0.000, target head 0.000, target embedding 0.000, target keys and values 0.000"
    assert f"target reads 0.000 GB a round: {reads}" in text
    assert report["first_token"]["warm_ms"] > 0 and report["first_token"]["prompt"] == 20
    assert "first token after a prompt of 20: " in text and "ms warm" in text
    assert "target at 29:" in text and "40 at 47:" in text and "host reads: 0 in 4 rounds" in text


def test_drafted_rounds_of_tiny_models() -> None:
    *_, report = run_draft([(TARGET, DRAFT)], SMALL, 1e9, **CPU)
    pair = report["pairs"]["draft > target"]
    assert pair["acceptance"] == "imposed" and set(pair["k"]) == set("1234567")
    four = pair["k"]["4"]
    assert four["length"] == pytest.approx(3.08) and 1 <= four["tokens_a_round"] <= 5
    assert [pair["k"][k]["drafts_a_round"] for k in "1234567"] == [1, 2, 3, 4, 5, 6, 7]
    assert four["speedup"] == pytest.approx(3.08 * pair["plain"]["wall_us"] / four["wall_us"])
    assert len(four["bytes"]) == 8 and four["floor_us"] == pytest.approx(1e-3 * sum(four["bytes"].values()))
    assert four["share_of_ceiling"] == pytest.approx(four["floor_us"] / four["wall_us"])
    text = digest({"probes": {"draft": {"status": "ok", "result": report}}})
    assert text.count("a round: target layers") == 1 and "draft > target k=4 reads" in text
    assert "draft > target k=4:" in text and "imposed 3.08" in text


def test_drafted_rounds_with_a_tiny_eagle3_head() -> None:
    """A random head beside random weights: its rounds run, and imposed lengths are those of a draft model."""
    head = Eagle3Shape("head", 64, 1, 4, 2, 96, vocab=300, head_dim=16, family="llama", draft_vocab=100)
    *_, report = run_draft([(replace(TARGET, layers=4), head)], SMALL, 1e9, **CPU)
    pair = report["pairs"]["head > target"]
    assert "error" not in pair and pair["acceptance"] == "imposed"
    assert [pair["k"][k]["drafts_a_round"] for k in "1234567"] == [1, 2, 3, 4, 5, 6, 7]
    four = pair["k"]["4"]
    assert four["bytes"]["draft target's streams"] == 2 * 64 * 3 * 64
    assert 1 <= four["tokens_a_round"] <= 5 and four["verify_over_plain"] > 0
    text = digest({"probes": {"eagle3": {"status": "ok", "result": report}}})
    assert "head > target k=4:" in text and "imposed 3.08" in text


def test_a_first_pair_is_read_at_once_beside_later() -> None:
    """Acceptance is the same whenever it is read; the later pairs are not run twice."""
    reports = run_draft([(TARGET, DRAFT), (replace(TARGET, name="other"), DRAFT)], SMALL, 1e9, **CPU, lag=1)
    *_, report = reports
    first, second = (pair["gaps"] for pair in report["pairs"].values())
    assert list(first) == ["async", "sync"] and list(second) == ["async"]
    assert (first["async"]["lag"], first["sync"]["lag"]) == (1, 0)
    for one in (*first.values(), *second.values()):
        assert 0 < one["itl_ms"][0] <= one["itl_ms"][1] and one["tpot_ms"] > 0
    for name in ("rounds", "acceptance_rate", "acceptance_length"):
        assert first["async"][name] == first["sync"][name] > 0
    text = digest({"probes": {"draft": {"status": "ok", "result": report}}})
    assert "draft > target k=4 async (lag 1): acceptance 0." in text and "k=4 sync (lag 0): acc" in text


def test_the_first_token_is_timed_cold_and_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [40, 43, 43]
    monkeypatch.setattr(latency, "compiled_kernels", lambda: found.pop(0))
    config = config_of(tmp_path, TARGET, ctx=64, **CPU)
    one = with_engine(config, lambda engine: latency.first_tokens(slow_at_first(engine), 20, TARGET.vocab))
    assert one["prompt"] == 20 and one["load_ms"] > 0 and one["kernels_compiled"] == 3
    assert one["cold_ms"] > 200 > one["warm_ms"] > 0


def slow_at_first(engine: Engine) -> Engine:
    """The engine with a first step that takes as long as capturing would."""
    step, waits = engine.step, [0.2]

    def slowly() -> Any:
        time.sleep(waits.pop() if waits else 0)
        return step()

    engine.step = slowly  # type: ignore[method-assign]
    return engine


def test_gaps_between_tokens_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = RequestMetrics(completion_tokens=8, first_tokens=2, predicted_ms=30.0)
    metrics.count_rounds(4, 1, 1, times=4)
    seconds = [0.0, 0.01, 0.015, 0.035]
    monkeypatch.setattr(latency, "run_alone", lambda engine, prompt, tokens: (metrics, seconds))
    found = latency.token_gaps(SimpleNamespace(plan=SimpleNamespace(lag=1)), 5, 8, 300)  # type: ignore[arg-type]
    assert found["itl_ms"] == pytest.approx([10, 20]) and found["tpot_ms"] == 5
    assert (found["acceptance_rate"], found["acceptance_length"], found["rounds"]) == (0.25, 2, 4)


def test_a_pair_that_cannot_be_loaded_is_a_line() -> None:
    other = Shape("broken", 64, 2, 3, 2, 96, vocab=300, head_dim=16)
    *_, report = run_draft([(other, DRAFT)], SMALL, 1e9, **CPU)
    text = digest({"probes": {"draft": {"status": "ok", "result": report}}})
    assert (
        "draft > broken: CheckpointError" in text
        and "CheckpointError" in report["pairs"]["draft > broken"]["error"]
    )


def test_kinds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TURNS", 6), ("FEWEST_TURNS", 6), ("SPAN_TOKENS", 3), ("WARM", 2)):
        monkeypatch.setattr(batches, name, value)
    monkeypatch.setattr(batches, "PROMPT", 16)
    chosen = [(2, REFERENCE_LENGTH, ("plain", "fixed", "auto")), (1, 1.2, ("plain", "auto"))]
    *_, report = batches.run(TARGET, DRAFT, chosen, 1e9, **{**CPU, "ctx": 200})
    case = report["cases"][f"2 slots, length {REFERENCE_LENGTH}"]
    assert case["plain"]["rounds_at_k"] == {"0": 18} and set(case["fixed"]["rounds_at_k"]) == {"4"}
    ratio = case["fixed_over_plain"]
    assert ratio["turns"] == 6 and ratio["interval_95"][0] <= ratio["median"] <= ratio["interval_95"][1]
    assert "auto_over_plain" in case and "auto_over_fixed" in case
    # A plain round commits one token a slot: expected and counted are the same.
    plain = case["plain"]
    assert plain["tokens_a_second"] == pytest.approx(2e6 / plain["round_us"])
    text = digest({"probes": {"batches": {"status": "ok", "result": report}}})
    assert "1 slots, length 1.2: plain" in text and "auto_over_plain" in text


def test_engines_stand_side_by_side_where_they_fit() -> None:
    needs = {"plain": 3, "fixed": 4, "auto": 5}
    assert side_by_side(needs, 12) == [("plain", "fixed", "auto")]
    assert side_by_side(needs, 11) == side_by_side(needs, 8) == [("plain", "fixed"), ("plain", "auto")]
    assert side_by_side(needs, 7) == side_by_side(needs, 1) == [("plain",), ("fixed",), ("auto",)]


def test_what_an_engine_needs_is_what_its_plan_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = batches.config_of_kind(tmp_path, TARGET, DRAFT, "fixed", 3, 3.08, **{**CPU, "ctx": 900})
    assert config.cache_pages == 3 * 16
    needed = needed_bytes(plan_anyway(config))
    monkeypatch.setattr("spd.runtime.plan.machine.free_memory", lambda device: math.ceil(needed / 0.9))
    assert usable_bytes(config, "cpu") == needed and make_plan(config).shape.num_pages >= 48
    monkeypatch.setattr("spd.runtime.plan.machine.free_memory", lambda device: int(needed / 0.9) - 1)
    assert needed_bytes(plan_anyway(config)) == needed
    with pytest.raises(ResourceError):
        make_plan(config)


@pytest.mark.parametrize(("room", "groups"), [(2.5, 2), (1.5, 3), (0.5, 0)])
def test_kinds_without_room_for_all_still_have_ratios(
    room: float, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TURNS", 6), ("FEWEST_TURNS", 6), ("SPAN_TOKENS", 3), ("WARM", 2), ("PROMPT", 16)):
        monkeypatch.setattr(batches, name, value)
    config = batches.config_of_kind(tmp_path, TARGET, DRAFT, "fixed", 1, 3.08, **{**CPU, "ctx": 200})
    free = int(room * needed_bytes(plan_anyway(config)) / config.memory_fraction)
    monkeypatch.setattr("spd.runtime.plan.machine.free_memory", lambda device: free)
    chosen = [(1, REFERENCE_LENGTH, ("plain", "fixed", "auto"))]
    *_, report = batches.run(TARGET, DRAFT, chosen, 1e9, **{**CPU, "ctx": 200})
    [case] = report["cases"].values()
    text = digest({"probes": {"batches": {"status": "ok", "result": report}}})
    if not groups:
        assert "does not fit" in case["error"] or "memory" in case["error"]
        return
    assert len(case["side_by_side"]) == groups and all(case[kind]["round_us"] for kind in chosen[0][2])
    intervals = {name: one["interval_95"] for name, one in case.items() if "_over_" in name}
    within = {"auto_over_plain", "fixed_over_plain"} if groups == 2 else set()
    assert {name for name, interval in intervals.items() if interval} == within and len(intervals) == 3
    assert "no room for all at once: plain" in text and "nan" not in text


@pytest.mark.parametrize("slots", [1, 12])
def test_all_decode_before_a_span_begins(slots: int, tmp_path: Path) -> None:
    """Also where prompts are written in many steps, while shapes are being captured."""
    config = batches.config_of_kind(tmp_path, TARGET, DRAFT, "auto", slots, 3.08, **{**CPU, "ctx": 900})
    runner = batches.build(config, "auto", TARGET.vocab, 3.08)
    assert len(runner.engine._scheduler.decoding()) == slots
    load = Load(slots, 130, 2, 3)
    found = with_engine(
        config_of(tmp_path, TARGET, **{**CPU, "slots": slots, "ctx": load.context(0)}),
        lambda engine: measure_load(engine, Recorder.of(engine), load, TARGET.vocab),
    )
    assert found["tokens_a_round"] == 1 and found["rounds"] == 3


def test_a_script_of_lengths_stands_in_for_the_engines_own_choice() -> None:
    asked = set(re.findall(r"self\._draft_length\.(\w+)", inspect.getsource(Engine)))
    assert {"choose", "attend"} <= asked <= set(dir(batches.ScriptedLengths))


def test_requests_that_end_too_soon_are_no_load(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="ended before all of them had begun"),
        closing(Engine(config_of(tmp_path, TARGET, **{**CPU, "slots": 2, "ctx": 130}))) as engine,
    ):
        start(engine, [(1,) * 128, *[(2, 3)] * 3], GREEDY, 1)


def test_every_pair_of_lengths_is_captured_once() -> None:
    for values in ([0], [0, 4], [0, 1, 2, 4, 7]):
        found = batches.every_pair(values)
        pairs = list(pairwise(found))
        assert len(pairs) == len(values) ** 2 == len(set(pairs))


def test_a_runner_counts_what_rounds_commit_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [RoundTimes(k, 0, 0, 0, 0) for k in (0, 4)]
    monkeypatch.setattr(batches, "run_span", lambda *given, **named: Span(2, 0.5, 99, records))
    runner = batches.Runner(None, Recorder(), slots=3, rate=1.0)
    runner.turn()
    # Rounds of 1 and of 5 tokens for each of 3 slots in half a second.
    assert runner.rates == [36.0]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_compiled_loop_is_the_same_model_as_transformers(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = replace(TARGET, layers=10 if compiled else 2)  # more than Dynamo would compile each for itself
    model = peers_gpu.random_transformer(shape, "cpu", torch.float32)
    counters.clear()
    loop = CompiledLoop(shape, 64, "cpu", torch.float32, compiled)
    named = model.state_dict()
    with torch.no_grad():
        loop.model.embedding.copy_(named["model.embed_tokens.weight"])
        loop.model.head.copy_(named["lm_head.weight"])
        for index, block in enumerate(loop.model.layers):
            prefix = f"model.layers.{index}."
            for ours, theirs in (
                ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("out", ("self_attn.o_proj",)),
                ("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
                ("down", ("mlp.down_proj",)),
            ):
                parts = [named[f"{prefix}{name}.weight"] for name in theirs]
                getattr(block, ours).copy_(torch.cat(parts))
    monkeypatch.setattr(peers_gpu, "PROMPT", 11)
    prompt = list(random_prompt(11, TARGET.vocab, 0))
    found = loop.generate(prompt, 20)
    ids = torch.tensor([prompt])
    wanted = model.generate(ids, do_sample=False, max_new_tokens=20)[0, 11:].tolist()
    assert found == wanted and len(set(found)) > 5
    assert counters["stats"]["unique_graphs"] == (3 if compiled else 0), "one layer is compiled for all"


def _contender(seconds: float, clock: list[float]) -> Callable[[int], None]:
    def generate(tokens: int) -> None:
        clock[0] += 1.0 + seconds * tokens

    return generate


def test_contenders_are_timed_without_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.gpu_suite.peers_gpu.time.perf_counter", lambda: clock[0])

    def broken(tokens: int) -> None:
        raise RuntimeError("cannot")

    contenders = {"peer": _contender(0.02, clock), "broken": broken, "spd plain": _contender(0.005, clock)}
    first, *_, result = peers_gpu.interleave(contenders, turns=3, seconds=1e9)
    assert [len(first["tokens_a_second"][name]["values"]) for name in ("peer", "spd plain")] == [1, 1]
    speeds = result["tokens_a_second"]
    assert speeds["peer"]["median"] == pytest.approx(50) and speeds["spd plain"]["median"] == pytest.approx(
        200
    )
    assert list(result["ratios"]) == ["spd plain / peer"]
    assert result["ratios"]["spd plain / peer"]["median"] == pytest.approx(4)
    assert result["errors"] == {"broken": "RuntimeError: cannot"}
    text = digest({"probes": {"peers_loop": {"status": "ok", "result": {"a": result}}}})
    assert "spd plain / peer = 4.00" in text and "broken: RuntimeError" in text


def test_compiled_peers_come_one_by_one_and_each_turn_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding against the quickly compiled one first; drafts last; what cannot be built is a line."""
    for name, value in (("PROMPT", 8), ("FEW", 2), ("MANY", 7), ("TURNS", 2), ("POSITIONS", 64)):
        monkeypatch.setattr(peers_gpu, name, value)
    loops: list[weakref.ref[Any]] = []

    def build() -> Any:
        assert all(loop() is None for loop in loops), "the one before still takes its memory"
        contender = peers_gpu.loop_contender(TARGET, "cpu", compiled=False)
        loops.append(weakref.ref(contender))
        return contender

    def broken() -> Any:
        raise RuntimeError("does not compile")

    builders = {"compiled loop": build, "other": broken, "tuned compiled loop": build}
    reports = [
        {name: {**one} for name, one in report.items()}
        for report in peers_gpu.run_compiled(builders, TARGET, DRAFT, **CPU)
    ]
    assert list(reports[0]) == ["compiled loop"] and len(reports) == 2 + 1 + 2 + 2
    assert list(reports[0]["compiled loop"]["ratios"]) == ["spd plain / compiled loop"]
    last = reports[-1]
    assert list(last) == [*builders, "tuned compiled loop, drafts"]
    assert list(last["tuned compiled loop, drafts"]["ratios"]) == ["spd length 3.08 / tuned compiled loop"]
    assert last["other"] == {"errors": {"other": "RuntimeError: does not compile"}}
    text = digest({"probes": {"peers_loop": {"status": "cut short", "result": last}}})
    assert "other: RuntimeError: does not compile" in text
    ratios = [last[name]["ratios"][f"spd plain / {name}"]["median"] for name in builders if name != "other"]
    assert f"gate: 8B over a compiled loop (at least 1.25): {min(ratios):.2f}, " in text
    assert text.endswith("gate: 8B over compiled transformers (reported): not measured")


def test_eager_peers_on_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    for name, value in (("PROMPT", 8), ("FEW", 2), ("MANY", 7), ("TURNS", 1), ("POSITIONS", 64)):
        monkeypatch.setattr(peers_gpu, name, value)
    *_, report = peers_gpu.run_eager(TARGET, DRAFT, **CPU)
    assert report["eager"]["errors"] == report["assisted"]["errors"] == {}
    assert list(report["eager"]["ratios"]) == ["spd plain / transformers eager"]
    assert list(report["assisted"]["ratios"]) == ["spd all accepted / transformers assisted"]
    text = digest({"probes": {"peers_eager": {"status": "ok", "result": report}}})
    assert text.count("tokens/s:") == 2
    assert "gate: 8B over compiled transformers (reported): not measured" in text


def test_assisted_generation_accepts_every_draft() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    target = peers_gpu.random_transformer(TARGET, "cpu", torch.float32)
    assistant = peers_gpu.random_transformer(DRAFT, "cpu", torch.float32)
    rounds = []
    target.register_forward_hook(lambda *given: rounds.append(1))
    peers_gpu.assisted_contender(target, assistant)(20)
    # The first forward also reads the prompt: 4 rounds of K + 1 tokens.
    assert len(rounds) == 20 // (peers_gpu.K + 1)


GPU_TESTS = """
import pytest
@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2, 3])
def test_right(number): assert number < {below}
@pytest.mark.gpu
@pytest.mark.skip
def test_left_out(): pass
def test_of_no_gpu(): assert False
"""


def test_the_gpu_lane_counts_and_names_what_failed(tmp_path: Path) -> None:
    files = [tmp_path / f"test_{name}.py" for name in ("good", "bad", "broken", "other")]
    texts = [
        GPU_TESTS.format(below=9),
        GPU_TESTS.format(below=3),
        "import nothing_at_all",
        "def test_it(): 1 / 0",
    ]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    found: dict[str, Any] = {}
    with pytest.raises(AssertionError, match="failed: "):
        for found in lane.run(files):  # noqa: B007
            pass
    assert (found["passed"], found["skipped"], found["files"], found["of"]) == (5, 2, 4, 4)
    assert [Path(name).name for name in sorted(found["failed"])] == [
        "test_bad.py::test_right[3]",
        "test_broken.py",
    ]
    text = digest({"probes": {"gpu_tests": {"status": "failed", "error": ["E"], "result": found}}})
    assert "5 passed, 2 failed, 2 skipped, 4 of 4 files" in text and "test_right[3]" in text
    assert text.endswith("(none): 2, NOT met")
    whys = {Path(name).name: lines for name, lines in found["why"].items()}
    assert "assert 3 < 3" in str(whys["test_bad.py::test_right[3]"])
    assert "nothing_at_all" in str(whys["test_broken.py"])
    *_, found = lane.run(files[:1])
    assert found["failed"] == [] and found["passed"] == 3 and found["running"] == []


LONG_FILE = """
import os, time
import pytest
pytestmark = pytest.mark.gpu
def test_first(): pass
@pytest.mark.slow
def test_of_many_tokens(): assert False
def test_second(): pass
def test_that_does_not_end(): {body}
"""


def test_a_killed_file_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it runs; slow tests are left out, and a machine may lack what runs tests side by side."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:xdist")
    long, dying = tmp_path / "test_long.py", tmp_path / "test_dying.py"
    long.write_text(LONG_FILE.format(body="time.sleep(600)"))
    dying.write_text(LONG_FILE.format(body="os.kill(os.getpid(), 9)"))
    reports = lane.run([long, dying])
    found = next(one for one in reports if one["passed"] == 4 and one["files"] == 1)
    reports.close()
    assert [Path(name).name for name in found["running"]] == ["test_long.py in test_that_does_not_end"]
    assert [Path(name).name for name in found["failed"]] == [
        "test_dying.py ended with status -9 in test_that_does_not_end"
    ]


def test_the_gpu_lane_knows_its_files() -> None:
    names = [path.name for path in lane.test_files()]
    assert "test_gpu_texts.py" in names[:8] and "test_kernels_skinny_linear.py" in names
    assert "test_runtime_weight_reader.py" in names and "test_runtime_scheduler.py" not in names


def test_warming_up_names_what_failed() -> None:
    here = "tests.benchmarks.fake_probes"
    tasks = {"works": f"{here}:work", "fails": f"{here}:fail", "dies": f"{here}:die"}
    *_, found = warm_up.run(tasks, 60)
    assert set(found) == set(tasks)
    assert found["fails"]["error"] == "ValueError: on purpose"
    assert found["dies"]["error"] == "ended with status -9"
    assert found["works"]["errors"] == {"answer": 42}
    text = digest({"probes": {"warm_up": {"status": "ok", "result": found}}})
    assert "3 tasks in" in text and "fails: ValueError: on purpose" in text


def test_warming_up_ends_by_itself() -> None:
    """Otherwise a compiler that is slow would be a probe that failed."""
    here = "tests.benchmarks.fake_probes"
    began = time.monotonic()
    *_, found = warm_up.run({"works": f"{here}:work", "hangs": f"{here}:hang"}, 8)
    assert time.monotonic() - began < 60 and set(found) == {"works", "hangs"}
    assert found["hangs"] == {"seconds": 8, "error": "did not end in time"}
    [probe] = [probe for probe in PROBES if probe.name == "warm_up"]
    assert 0.9 * probe.seconds - 3 > warm_up.LIMIT
