"""The GPU suite rehearsed without a GPU: every probe at tiny shapes; times mean nothing here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_suite import batches, choices, timeline
from benchmarks.gpu_suite import kernel_cases as kernels
from benchmarks.gpu_suite import recurrent_cases as recurrent
from benchmarks.gpu_suite import round_cases as rounds
from benchmarks.gpu_suite import round_times as times
from benchmarks.gpu_suite import sparse_cases as sparse
from benchmarks.gpu_suite.block_weights import TYPES
from benchmarks.gpu_suite.digest import digest
from benchmarks.gpu_suite.digest_speed import EQUAL
from benchmarks.gpu_suite.end_to_end import config_of, run_plain
from benchmarks.gpu_suite.graph_timer import Once
from benchmarks.gpu_suite.kernel_table import cases, run_case
from benchmarks.gpu_suite.shapes import Shape
from benchmarks.gpu_suite.speculation import REFERENCE_LENGTH
from spd.kernels.attention import paged_attention_triton
from spd.kernels.attention.paged_attention import AttentionHeads
from spd.kernels.dispatch import load_kernels
from spd.kernels.interface import OPERATION_NAMES, Kernels
from spd.runtime import Engine

TARGET = Shape("target", 64, 2, 4, 2, 96, vocab=300, head_dim=16)
DRAFT = Shape("draft", 32, 1, 2, 2, 48, vocab=300, tied=True, head_dim=16)
HEADS = AttentionHeads(4, 2, 16)
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
SMALL = times.Load(prompt=20, warm=4, rounds=8)
DELTA = recurrent.DeltaShape("delta", 4, 2, 16)
EXPERTS: dict[str, Any] = {"count": 4, "per_token": 2, "hidden": 48, "inner": 32, "rows": (1, 3)}
CASES: dict[str, kernels.Case] = {
    **{
        kind: partial(kernels.linear_case, kind=kind, n=64, k=48, rows=(1, 8))
        for kind in ("qkv", "out", "gate_up")
    },
    "down": partial(kernels.linear_case, kind="down", n=64, k=48, rows=(1,)),
    "head": partial(kernels.linear_case, kind="head", n=100, k=48, rows=(3,)),
    "verify": partial(rounds.draft_verify_case, slots=2, k=3, vocab=300),
    "noise": partial(rounds.noise_case, vocab=300, rows=(1, 2)),
    "layer": partial(kernels.layer_case, shape=TARGET, rows=(1, 5)),
    "draw": partial(kernels.draw_case, vocab=100, hidden=32, rows=(1, 5)),
    "rows": partial(kernels.row_case, hidden=32, vocab=100, rows=(1, 5)),
    "attention": partial(kernels.attention_case, heads=HEADS, slots=2, context=512, rows=(1, 5)),
    "attention in int8": partial(
        kernels.attention_case,
        heads=replace(HEADS, rounded=True),
        slots=2,
        context=512,
        rows=(1, 5),
    ),
    "rotary and attention": partial(
        kernels.rotary_attention_case, heads=HEADS, slots=2, context=128, rows=(1, 5)
    ),
    "prefill": partial(kernels.prefill_case, heads=HEADS, chunk=64, starts=(0, 512)),
    "sampling": partial(rounds.sampling_case, vocab=300, rows=(1, 3)),
    "rotary": partial(kernels.rotary_case, heads=HEADS, rows=(1, 3)),
    "round": partial(rounds.round_case, slots=2, k=4, width=512, vocab=100),
    "lookup": partial(rounds.lookup_case, slots=1, k=4, widths=(128,), vocab=100),
    "latent": partial(
        sparse.latent_case, heads=2, rank=16, rope_dim=8, slots=2, context=128, rows=(1, 2)
    ),
    **{
        f"experts {kind}": partial(sparse.experts_case, kind=kind, **EXPERTS)
        for kind in ("wide", "int8", "fp8")
    },
    **{
        kind: partial(sparse.eight_bit_case, kind=kind, n=64, k=48, rows=(1, 3))
        for kind in ("int8", "fp8")
    },
    **{
        f"GGUF {kind}": partial(sparse.eight_bit_case, kind=kind, n=64, k=256, rows=(1, 3))
        for kind in TYPES
    },
    "delta_rule": partial(recurrent.delta_case, shape=DELTA, slots=2, lengths=(0, 2)),
    "short_conv": partial(recurrent.conv_case, shape=DELTA, slots=2, lengths=(0, 2)),
    "delta_chunks": partial(recurrent.chunks_case, shape=DELTA, rows=70),
}

NOT_IN_THE_TABLE = {
    "latent_store",
    "head_linear",
    "router_logits",
    "route",
    "head_input",
    "keep_states",
}
"""Of layers whose main kernels are; those that feed an MTP head."""


class Watched:
    """A kernel set that records which of its operations are called."""

    def __init__(self, form: str) -> None:
        self.honest = load_kernels(form)
        self.called = set[str]()

    def __getattr__(self, name: str) -> Any:
        if name in OPERATION_NAMES:
            self.called.add(name)
        return getattr(self.honest, name)


@pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_every_kind_of_case_meets_its_contract_and_no_kernel_is_left_out(form: str) -> None:
    all_cases = cases() | recurrent.recurrent_cases()
    functions = {case.func for case in all_cases.values()}  # type: ignore[attr-defined]
    assert functions == {case.func for case in CASES.values()}  # type: ignore[attr-defined]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    watched = Watched(form)
    for name, case in CASES.items():
        if (form, name) == ("torch", "experts fp8"):
            continue  # torch's experts are wide or int8
        result = run_case(
            case, kernels.Bench(cast(Kernels, watched), Once(device), torch.float32, 1e9)
        )
        assert "error" not in result, (name, result["error"])
        assert "notes" not in result and all(len(row) == 3 for row in result["rows"].values()), name
    assert watched.called == set(OPERATION_NAMES) - NOT_IN_THE_TABLE


@torch.inference_mode()
def test_alternatives_are_measured_one_by_one_and_the_fastest_is_named() -> None:
    """Constants are put back after each; a case that is killed loses one alternative."""
    attend = partial(kernels.attention_case, heads=HEADS, slots=2, context=512, rows=(1,))
    multiply = partial(choices.product_case, kind="int8", n=64, k=48)
    cases = {
        "attention": replace(choices.attention_choices(1, 512, (1,)), case=attend),
        "product": choices.product_choices(multiply, {"stages": (2, 3)}),
    }
    before = paged_attention_triton.LAST_COMBINES
    bench = kernels.Bench(load_kernels("torch"), Once("cpu"), torch.float32, 1e9)
    *partial_reports, report = choices.measure_choices(cases, bench)
    assert len(partial_reports) + 1 == sum(1 + len(c.alternatives) for c in cases.values())
    assert before == paged_attention_triton.LAST_COMBINES
    assert all("rows" in rows for case in report["cases"].values() for rows in case.values())
    times = {"as built": 3.0, "stages 2": 1.0, "stages 3": 2.0}
    for name, us in times.items():
        rows = report["cases"]["product"][name]["rows"]
        assert rows[EQUAL][0] in (0.0, 1.0), "torch's sums may depend on how many rows there are"
        rows[EQUAL][0] = 1.0
        rows["1"][0] = us
    report["cases"]["product"]["stages 2"]["rows"][EQUAL][0] = 0.0
    text = digest({"probes": {"sweep": {"status": "ok", "result": report}}})
    assert "product: 1: 2.0 us stages 3 (as built 3.0)" in text


def test_every_round_is_noted_in_order(tmp_path: Path) -> None:
    def work(engine: Engine) -> tuple[times.Span, times.Recorder, bool]:
        recorder = times.Recorder.of(engine)
        times.start(engine, [(1, 2, 3), (4, 5)], times.GREEDY, 3)
        span = times.run_span(engine, recorder, tokens=9)
        times.stop(engine, 2)
        return span, recorder, engine.has_work

    config = config_of(tmp_path, TARGET, ctx=64, slots=2, lag=2, **CPU)
    span, recorder, left = times.with_engine(config, work)
    assert (span.rounds, span.tokens, len(span.records), left) == (5, 10, 5, False)
    marks = [
        mark for times in recorder.rounds for mark in (times.began, times.committed, times.ended)
    ]
    assert marks == sorted(marks) and {times.k for times in recorder.rounds} == {0}


def test_plain_rounds_of_a_tiny_model_are_measured() -> None:
    *_, report = run_plain([TARGET], SMALL, (20, 40), 1e9, **CPU)
    model = report["models"]["target"]
    assert model["tokens_a_round"] == 1 and model["rounds"] == 8
    # 5 tokens were committed before the 8 that are watched, half of which lie behind on average: the first
    # as the request began to decode, then 4 rounds.
    assert model["context"] == 20 + 5 + 4
    # Two layers of 30,720 weights, a head of 19,200 and an embedding row, each of 2 bytes; 256 a position.
    assert model["floor_us"] == pytest.approx(1e-3 * (2 * (61_440 + 19_200 + 64) + 29 * 256))
    assert set(report["sampling"]) >= {"greedy", "noise", "filtered"}
    assert report["sampling"]["host_reads"]["syncs"] == 0
    assert [report["contexts"][c]["context"] for c in ("20", "40")] == [27, 47]
    assert report["first_token"]["warm_ms"] > 0 and report["first_token"]["prompt"] == 20
    assert "host reads: 0 in 4 rounds" in digest(
        {"probes": {"plain": {"status": "ok", "result": report}}}
    )


def test_kinds_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("TURNS", 6),
        ("FEWEST_TURNS", 6),
        ("SPAN_TOKENS", 3),
        ("WARM_ROUNDS", 2),
        ("PROMPT", 16),
    ):
        monkeypatch.setattr(batches, name, value)
    kinds = ("plain", "fixed", "auto")
    *_, report = batches.run(
        TARGET, DRAFT, [(1, REFERENCE_LENGTH, kinds)], 1e9, **{**CPU, "ctx": 200}
    )
    [case] = report["cases"].values()
    assert len(case["side_by_side"]) == 1 and all(case[kind]["round_us"] for kind in kinds)
    assert case["plain"]["rounds_at_k"] == {"0": 18} and set(case["fixed"]["rounds_at_k"]) == {"4"}
    # A plain round commits one token a slot: expected and counted are the same.
    assert case["plain"]["tokens_a_second"] == pytest.approx(1e6 / case["plain"]["round_us"])
    ratios = {name: ratio for name, ratio in case.items() if "_over_" in name}
    assert set(ratios) == {"auto_over_plain", "fixed_over_plain", "auto_over_fixed"}
    assert all(
        low <= ratio["median"] <= high
        for ratio in ratios.values()
        for low, high in [ratio["interval_95"]]
    )
    assert "nan" not in digest({"probes": {"batches": {"status": "ok", "result": report}}})


@torch.inference_mode()
def test_recurrent_layers_and_overlap_are_measured_with_other_constants() -> None:
    """All alternatives run, and the constants and launch options are as before."""
    cases = {
        "delta": choices.recurrent_choices(DELTA, slots=2, lengths=(0, 1)),
        "layer": choices.overlap_choices(TARGET, (1,)),
    }
    assert "spd.kernels.recurrent.delta_rule_triton" in {
        module.__name__ for module, _, _ in cases["layer"].alternatives["without overlap"]
    }
    before = [
        getattr(module, name)
        for choice in cases.values()
        for changes in choice.alternatives.values()
        for module, name, _ in changes
    ]
    bench = kernels.Bench(load_kernels("torch"), Once("cpu"), torch.float32, 1e9)
    *_, report = choices.measure_choices(cases, bench)
    after = [
        getattr(module, name)
        for choice in cases.values()
        for changes in choice.alternatives.values()
        for module, name, _ in changes
    ]
    assert after == before
    columns = {"state_columns 16", "state_columns 64"}
    parts = {"key_part 16", "key_part 64"}
    assert report["cases"]["delta"].keys() == {"as built"} | columns | parts
    assert all("rows" in rows for case in report["cases"].values() for rows in case.values())
    text = digest({"probes": {"recurrent_ab": {"status": "ok", "result": report}}})
    assert "recurrent_ab: delta: k=0: " in text


def test_gaps_are_those_between_kernels_and_an_early_begin_is_below_zero() -> None:
    launches = [
        timeline.Launch("product", 0.0, 4.0),
        timeline.Launch("attend", 5.0, 7.0),
        timeline.Launch("product", 6.5, 9.5),
    ]
    trace = timeline.summarize_launches(launches, rounds=1)
    assert (trace["launches"], trace["busy_us"], trace["idle_us"]) == (3, 9.0, 1.0)
    assert list(trace["kernels"]) == ["product", "attend"]
    assert trace["kernels"]["product"] == {"launches": 2, "us": 3.5, "gap_us": -0.5}
    assert trace["kernels"]["attend"]["gap_us"] == 1.0


def test_the_rounds_of_a_tiny_model_are_traced() -> None:
    *_, report = timeline.run([TARGET], prompt=20, rounds=2, **CPU)
    trace = report["models"]["target"]
    assert trace["launches"] >= 2
    assert trace["busy_us"] > 0
    text = digest({"probes": {"timeline": {"status": "ok", "result": report}}})
    assert "kernels a round" in text
