"""The gates of the GPU suite: what of a report is held against which bound, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_suite.digest import digest
from benchmarks.gpu_suite.gates import GATES, gate_lines
from benchmarks.gpu_suite.recurrent_cases import recurrent_cases
from benchmarks.gpu_suite.sparse_cases import sparse_cases


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


def test_gates_of_recurrent_layers() -> None:
    """States of many slots only: those of few are read in the time that a launch takes."""
    sizes = ("k=0", "k=1", "k=4", "k=8", "norm k=0", "rule", "convolution")
    cases = {name: {"rows": {size: [6.0, 0.8, None] for size in sizes}} for name in recurrent_cases()}
    for slots, share in ((4, 0.1), (64, 0.7)):
        cases[f"delta_rule Qwen3.5-27B {slots} slots"]["rows"]["k=8"][1] = share
    cases["short_conv Qwen3.5-35B-A3B 16 slots"]["rows"]["k=4"][0] = 9.0
    cases["short_conv Qwen3.5-27B 64 slots"]["rows"]["k=4"][0] = 99.0
    for name in ("delta_chunks Qwen3.5-27B", "delta_chunks Qwen3.5-35B-A3B"):
        cases[name]["rows"]["rule"][1], cases[name]["rows"]["convolution"][1] = 1.9e6, 8e6
    lines = gate_lines({"recurrent_table": {"result": {"columns": "", "cases": cases}}})
    ends = {line.split(" (")[0].removeprefix("gate: "): line.rsplit(": ", 1)[1] for line in lines}
    states = "states of recurrent layers read and written, k = {}, of the read rate"
    chunks = "a prompt's chunks through a recurrent layer's {}, million tokens a second"
    assert ends == {
        **{states.format(k): "0.80, met" for k in (0, 1, 4)},
        states.format(8): "0.70, NOT met",
        "short convolutions of up to 16 slots and 5 rows, us": "9.00, NOT met",
        chunks.format("rule"): "1.90, NOT met",
        chunks.format("convolution"): "8.00, met",
    }


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
