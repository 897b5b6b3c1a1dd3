"""The suite's probes of experts, latent attention and eight bits, at tiny shapes on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_suite import eight_bit_rounds, sparse_models
from benchmarks.gpu_suite import sparse_cases as sparse_cases_module
from benchmarks.gpu_suite.digest import digest
from benchmarks.gpu_suite.gates import GATES, gate_lines
from benchmarks.gpu_suite.graph_timer import ROTATED_BYTES, GraphTimer, Once
from benchmarks.gpu_suite.kernel_cases import Bench, Case
from benchmarks.gpu_suite.kernel_table import cases, run_case
from benchmarks.gpu_suite.room import needed_bytes, plan_anyway
from benchmarks.gpu_suite.round_settings import Setting
from benchmarks.gpu_suite.round_times import Load
from benchmarks.gpu_suite.sparse_cases import (
    SIZES,
    eight_bit_case,
    experts_case,
    latent_case,
    other_experts,
    sparse_cases,
)
from benchmarks.gpu_suite.sparse_models import MODELS, Published, write_hollow
from benchmarks.gpu_suite.spd_rounds import RUNS, demo_prompts, jobs_of, limit_of
from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.model_config import read_model_config
from spd.kernels.dispatch import load_kernels
from spd.runtime import EngineConfig
from spd.runtime.models import family_layout
from spd.runtime.models.mtp_weights import check_source
from spd.runtime.models.weights import check_weights
from spd.runtime.plan.memory import tensor_bytes

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
EXPERTS = {"count": 4, "per_token": 2, "hidden": 48, "inner": 32, "rows": (1, 3)}
CASES: dict[str, Case] = {
    "latent": partial(latent_case, heads=2, rank=16, turned=8, slots=2, context=128, rows=(1, 2)),
    **{f"experts {kind}": partial(experts_case, kind=kind, **EXPERTS) for kind in ("wide", "int8", "fp8")},
    **{kind: partial(eight_bit_case, kind=kind, n=64, k=48, rows=(1, 3)) for kind in ("int8", "fp8")},
}


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_every_case_meets_its_contract_in_both_forms(name: str, form: str) -> None:
    if form == "torch" and name == "experts fp8":
        pytest.skip("torch's experts are wide or int8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = run_case(CASES[name], Bench(load_kernels(form), Once(device), torch.float32, 1e9))
    assert "error" not in result, result["error"]
    assert "notes" not in result and all(len(row) == 3 for row in result["rows"].values())


def test_the_table_has_every_kind_of_case() -> None:
    functions = {case.func for case in sparse_cases().values()}  # type: ignore[attr-defined]
    assert functions == {case.func for case in CASES.values()}  # type: ignore[attr-defined]
    assert set(sparse_cases()) < set(cases())


@torch.inference_mode()
def test_bytes_are_those_of_the_experts_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(Once):
        def microseconds(self, calls: Any) -> float:
            return 1.0

    bench = Bench(load_kernels("torch"), Timed("cpu"), torch.float32, 1e6)
    one = 3 * 32 * 48 * 4
    rows = experts_case(bench, 4, 2, 48, 32, "wide", (1,))
    assert rows["1"][1] == pytest.approx(2 * one)
    assert experts_case(bench, 4, 4, 48, 32, "wide", (2,))["2"][1] == pytest.approx(4 * one)
    assert latent_case(bench, 2, 16, 8, 2, 128, (1,))["1"][1] == pytest.approx(2 * 128 * 24 * 4)
    assert bench.notes == []
    monkeypatch.setattr(sparse_cases_module, "CACHE_BYTES", 0)
    rows = latent_case(bench, 2, 16, 8, 2, 300, (1, 4))
    for width in (1, 4):
        partials = 2 * 3 * width * 2 * 16 * 4  # three chunks for each of two slots, and two heads
        assert rows[str(width)][1] == pytest.approx(2 * 300 * 24 * 4 + 2 * partials)
    assert len(bench.notes) == 2


@pytest.mark.parametrize("model", [*SIZES, "DeepSeek-V3 fp8"])
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_experts_come_again_when_the_cache_has_lost_them(model: str, rows: int) -> None:
    """Otherwise the few that one row goes to would be read from the cache."""
    case: Any = sparse_cases()[f"experts {model}"]
    sizes, width = case.keywords, 1 if "fp8" in model else 2
    count, each = sizes["count"], 3 * sizes["hidden"] * sizes["inner"] * width
    ids = torch.rand(rows, count).argsort(-1)[:, : sizes["per_token"]]
    touched = len(ids.unique())
    copies = GraphTimer.copies(cast(GraphTimer, None), touched * each)
    turns = other_experts(ids, count, copies)
    chosen = [set(one.flatten().tolist()) for one in turns]
    assert sum(map(len, chosen)) == len(set.union(*chosen)) == len(turns) * touched, "all are others"
    assert len(turns) * touched * each >= ROTATED_BYTES
    for one in turns:
        assert one.shape == ids.shape and all(len(set(row)) == len(row) for row in one.tolist())


@torch.inference_mode()
def test_every_choice_of_experts_is_timed() -> None:
    class Rotating(Once):
        def copies(self, nbytes: int) -> int:
            return 3

        def microseconds(self, calls: Any) -> float:
            turns.append([set(call.args[1].flatten().tolist()) for call in calls])
            return super().microseconds(calls)

    turns: list[list[set[int]]] = []
    experts_case(
        Bench(load_kernels("torch"), Rotating("cpu"), torch.float32, 1e9), 8, 2, 48, 32, "wide", (1, 8)
    )
    assert len(set.union(*turns[0])) == 6 and len(turns[0]) == 3
    assert 1 <= len(turns[1]) <= 2, "no more than there are experts for"


def test_partial_results_of_latent_attention_count_where_the_cache_cannot_hold_them() -> None:
    v3 = sparse_cases_module.partial_bytes(16 * 128, 4096, 512)
    assert v3 == 2 * 134_217_728 > 16 * 4096 * 576 * 2, "more than the latents themselves"
    assert sparse_cases_module.partial_bytes(128, 32768, 512) == 0
    assert sparse_cases_module.partial_bytes(16 * 128, 32768, 512) == 2 * 88 * 16 * 128 * 512 * 4
    assert sparse_cases_module.partial_bytes(16 * 16, 32768, 512) == 0, "V2-Lite's 46 MB stay in the cache"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_published_shapes_are_complete_and_take_no_disk(model: Published, tmp_path: Path) -> None:
    folder = write_hollow(model, tmp_path)
    config = read_model_config(folder)
    with Checkpoint.open(folder) as checkpoint:
        assert check_weights(checkpoint, config, family_layout(config)) == []
        assert checkpoint.total_bytes > 5e9
        source = ModelFolder(folder).mtp_source()
        assert (source is not None) == (model.modules > 0)
        if source is not None:
            check_source(source, checkpoint)
    file = (folder / "model.safetensors").stat()
    assert file.st_blocks * 512 < 64 * 2**20 < file.st_size


SMALL = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 300},
    **{"num_key_value_heads": 4, "torch_dtype": "float32", "max_position_embeddings": 512},
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("model", [sparse_models.MIMO, sparse_models.V2_LITE], ids=lambda m: m.name)
def test_rounds_of_a_tiny_one(model: Published, tmp_path: Path) -> None:
    small = {**SMALL, "num_hidden_layers": 2, "head_dim": 16}
    config = {key: small.get(key, value) for key, value in model.config.items()}
    tiny = replace(model, name="tiny", config=config)
    *_, report = sparse_models.run([tiny], Load(prompt=20, warm=4, rounds=8), 1e9, **CPU)
    found = report["models"]["tiny"]
    assert set(found) == {"k=0", "k=1", "k=3"}
    for k, row in found.items():
        assert "error" not in row, row
        assert row["floor_us"] > 0 and row["share_of_floor"] > 0 and row["weights"] == "float32", k
    assert found["k=0"]["tokens_a_round"] == 1 < found["k=3"]["tokens_a_round"]
    if model is sparse_models.V2_LITE:
        assert found["k=0"]["touched_experts"] == 2 and 2 <= found["k=3"]["touched_experts"] <= 8
        assert found["k=3"]["floor_us"] > found["k=1"]["floor_us"] > found["k=0"]["floor_us"]
        # By hand: everything but the embedding table and six of eight experts, then the latents so far.
        parsed = read_model_config(write_hollow(tiny, tmp_path))
        unread = 300 * 64 + 6 * 3 * 64 * 32
        latents = 2 * (32 + 8) * found["k=0"]["context"]
        exact = tensor_bytes(parsed, "float32") + 4 * (latents - unread)
        assert found["k=0"]["floor_us"] == pytest.approx(1e-3 * exact)
        parts = {"target head": 4 * 300 * 64, "target keys and values": 4 * latents}
        rest = exact - sum(parts.values())
        assert found["k=0"]["bytes"] == pytest.approx({"target layers": rest, **parts})
        assert found["k=3"]["bytes"]["drafts"] == pytest.approx(3 * found["k=1"]["bytes"]["drafts"])
    else:
        assert found["k=0"]["touched_experts"] == 0


def test_a_model_is_measured_in_as_many_layers_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**SMALL, "num_hidden_layers": 5, "head_dim": 16}
    config = {key: small.get(key, value) for key, value in sparse_models.V2_LITE.config.items()}
    tiny, load = replace(sparse_models.V2_LITE, name="tiny", config=config), Load(prompt=20, warm=2, rounds=4)

    def need(layers: int) -> float:
        folder = write_hollow(tiny.shortened(layers), tmp_path)
        wishes = sparse_models.wishes_at(folder, load, 3)
        return needed_bytes(plan_anyway(EngineConfig(**{**wishes, **CPU})))

    monkeypatch.setattr("spd.runtime.plan.machine.free_memory", lambda device: int((need(3) + 1000) / 0.9))
    *_, report = sparse_models.run([tiny], load, 1e9, **CPU)
    rows = report["models"]["tiny"]
    assert {(row["layers"], row["of"]) for row in rows.values()} == {(3, 5)}
    assert all("error" not in row for row in rows.values())
    text = digest({"probes": {"sparse_models": {"status": "ok", "result": report}}})
    assert "tiny in 3 layers k=3: " in text
    monkeypatch.setattr("spd.runtime.plan.machine.free_memory", lambda device: 10_000)
    *_, report = sparse_models.run([tiny], load, 1e9, **CPU)
    assert {row["layers"] for row in report["models"]["tiny"].values()} == {2}, "one of each kind, at least"
    assert all("ResourceError" in row["error"] for row in report["models"]["tiny"].values())


def test_what_was_never_measured_comes_first() -> None:
    assert next(iter(eight_bit_rounds.FORMS)) == "fp8" and MODELS[0] is sparse_models.V3
    assert MODELS[1] is sparse_models.MIMO, "whose rounds have gates"


def test_the_demo_in_every_form_of_its_weights() -> None:
    settings = (Setting("mtp", 3), Setting("mtp", 3, lag=2, slots=2), Setting("off", slots=2))
    prompts = [[5, 6, 7, 8, 5, 6, 7], [300, 12, 9]]
    given: dict[str, Any] = {
        "prompts": prompts,
        "tokens": 8,
        "runs": ("greedy", "noise"),
        "settings": settings,
    }
    *_, report = eight_bit_rounds.run(**given, **CPU, ctx=512)
    assert set(report["forms"]) == {"bfloat16", "int8", "fp8"}
    for form, found in report["forms"].items():
        assert found["differing_tokens"] == found["differing_counts"] == 0, form
        assert found["compared_tokens"] == 3 * 2 * (8 + 5) and len(found["settings"]) == 3
        assert all("error" not in row for row in found["settings"].values())
    text = digest({"probes": {"eight_bit_rounds": {"status": "ok", "result": report}}})
    assert "fp8: 0 of 78 tokens changed" in text


def test_each_form_compares_a_hundred_thousand_tokens() -> None:
    """As many as the full settings ask for, the shorter texts of some requests counted."""
    prompts = len(demo_prompts())
    jobs = [job for run in RUNS for job in jobs_of(run, prompts)]
    each = sum(limit_of(job, eight_bit_rounds.TOKENS) for job in jobs)
    full = [setting for setting in eight_bit_rounds.SETTINGS if setting.requests is None]
    assert len(full) * each >= 100_000


def test_what_a_person_reads_first() -> None:
    row = {
        "wall_us": 200.0,
        "share_of_floor": 0.5,
        "floor_us": 100.0,
        "weights": "fp8",
        "touched_experts": 8.0,
    }
    report = {"read_bytes_per_second": 4e12, "models": {"V3": {"k=0": row, "k=3": {"error": "E: no"}}}}
    text = digest({"probes": {"sparse_models": {"status": "ok", "result": report}}})
    assert "V3 k=0: 200 us, 0.50 of the byte floor, weights fp8" in text and "V3 k=3: E: no" in text


def kernel_result(share: float, rival: float) -> dict[str, Any]:
    """A kernel table in which every row of every sparse case has this share, and this time of the rival."""
    sizes = ("1", "4", "8", "16", "64")
    return {
        "columns": "",
        "cases": {name: {"rows": {size: [10.0, share, rival] for size in sizes}} for name in sparse_cases()},
    }


def test_gates_are_said_with_what_was_found() -> None:
    forms = {"differing_tokens": 0, "compared_tokens": 150_000, "differing_counts": 2, "settings": {}}
    row = {"wall_us": 900.0, "share_of_floor": 0.74, "weights": "bfloat16", "touched_experts": 0.0}
    probes = {
        "kernel_table": {"status": "ok", "result": kernel_result(0.81, 17.0)},
        "sparse_models": {"status": "ok", "result": {"models": {"MiMo-7B": {"k=1": row}}}},
        "eight_bit_rounds": {"status": "ok", "result": {"forms": {"fp8": forms}}},
    }
    gates = {
        line.split(" (")[0].removeprefix("gate: "): line
        for line in digest({"probes": probes}).splitlines()
        if line.startswith("gate: ")
    }
    assert len(gates) == sum(gate.probe in probes for gate in GATES)
    ends = {
        "latent attention of 16 slots at one query, of the read rate": "0.81, met",
        "128 experts at 8 rows, of the touched bytes": "0.81, met",
        "128 experts at 16 and more rows, of the touched bytes": "0.81, NOT met",
        "int8 products up to 8 rows, of the read rate": "0.81, met",
        "fp8 products against wide ones": "1.70, met",
        "MTP at a 7B shape, k = 1, of the speculative byte ceiling": "0.74, NOT met",
        "MTP at a 7B shape, k = 3, of the speculative byte ceiling": "not measured",
        "tokens that speculation changed": "0, met",
        "tokens compared": "150000, met",
        "requests that accepted otherwise, eager or captured, at any lag": "2, NOT met",
    }
    for name, end in ends.items():
        assert gates[name].endswith(f": {end}"), gates[name]


def test_the_lowest_figure_decides_and_gates_of_other_probes_are_silent() -> None:
    result = kernel_result(0.9, 20.0)
    result["cases"]["mla V3 1 slots 4096"]["rows"]["1"][1] = 0.1  # less is read than a launch takes
    result["cases"]["mla V3 16 slots 4096"]["rows"]["1"][1] = 0.5
    lines = digest({"probes": {"kernel_table": {"status": "ok", "result": result}}}).splitlines()
    gates = [line for line in lines if line.startswith("gate: ")]
    assert len(gates) == sum(gate.probe == "kernel_table" for gate in GATES)
    [missed] = [line for line in gates if "NOT met" in line]
    name = "latent attention of 16 slots at one query, of the read rate"
    assert missed == f"gate: {name} (at least 0.65, goal 0.78): 0.50, NOT met"


STATIC = "spd plain / transformers static compiled"
GPU_TESTS = "GPU tests that failed, and files of them that did not end"


def test_gates_of_dense_models_stand_beside_what_was_measured() -> None:
    """Large products only; ceilings at four drafts; what may be at most, and what must be none."""
    rows = {"1": [10.0, 0.95, None], "8": [10.2, 0.93, None]}
    small = {"1": [10.0, 0.4, None]}
    table = {
        "columns": "us",
        "cases": {
            "A head 100000x4096": {"rows": rows, "8_over_1": [1.02]},
            "A out 4096x4096": {"rows": small},
            "paged_attention 1 slots 1024": {"rows": {"1": [7.0, 0.1, None]}},
            "paged_attention 16 slots 4096": {"rows": {"1": [7.0, 0.7, None], "plan 1": [1.0, None, None]}},
        },
    }
    plain = {"models": {"Qwen3-8B": {"share_of_floor": 0.8, "idle_us": [31.0, 40.0]}}, "sampling": {}}
    plain["sampling"] = {"host_reads": {"syncs": 1, "lines": []}}
    pair = {"k": {"4": {"share_of_ceiling": 0.59, "speedup": 2.3}, "1": {"share_of_ceiling": 0.1}}}
    probes = {
        "kernel_table": {"result": table},
        "plain": {"result": plain},
        "draft": {"result": {"pairs": {"Qwen3-0.6B > Qwen3-8B": pair}}},
        "peers_static": {"result": {"static": {"ratios": {STATIC: {"median": 0.92}}}}},
        "peers_eager": {"result": {"eager": {"ratios": {"spd plain / transformers eager": {"median": 8.7}}}}},
        "spd_demo": {"result": {"differing_tokens": 0, "differing_counts": 2, "compared_tokens": 162306}},
        "gpu_tests": {"result": {"failed": [], "passed": 9, "files": 5, "of": 7}},
    }
    found = dict(line.removeprefix("gate: ").rsplit(": ", 1) for line in gate_lines(probes))
    ends = {name.split(" (")[0]: end for name, end in found.items()}
    assert ends["products of 64 MB and more, of the read rate"] == "0.93, met"
    assert ends["their time at 8 rows over that at 1"] == "1.02, met"
    assert ends["decode attention, of the read rate"] == "0.70, NOT met"
    assert ends["8B plain at batch 1, of the byte floor"] == "0.80, met"
    assert ends["us between rounds"] == "31.00, NOT met"
    assert ends["host reads in rounds"] == "1, NOT met"
    assert ends["0.6B drafter, k = 4, of the byte ceiling"] == "0.59, NOT met"
    assert ends["EAGLE-size drafter, k = 4, of the byte ceiling"] == "not measured"
    assert ends["8B over eager transformers"] == "8.70, met"
    assert ends["8B over compiled transformers"] == "0.92", "no goal, so neither met nor missed"
    assert ends["the demo's requests that accepted otherwise"] == "2, NOT met"
    assert ends["the demo's tokens compared"] == "162306, met" and ends[GPU_TESTS] == "2, NOT met", (
        "a lane cut short"
    )
    probes["gpu_tests"]["result"] |= {"files": 7}
    assert any(line.endswith("did not end (none): 0, met") for line in gate_lines(probes))
    probes["gpu_tests"]["result"] |= {"passed": 0}
    assert any(line.endswith("did not end (none): not measured") for line in gate_lines(probes))
