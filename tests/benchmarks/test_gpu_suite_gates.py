"""The gates of the GPU suite: what of a report is held against which bound, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_suite.gates import GATES, gate_lines
from benchmarks.gpu_suite.recurrent_cases import recurrent_cases
from benchmarks.gpu_suite.sparse_cases import sparse_cases

Cases = dict[str, dict[str, Any]]


def filled(cases: Any, sizes: tuple[str, ...], row: list[float | None]) -> Cases:
    """A table in which every case has this row at every size."""
    return {name: {"rows": {size: list(row) for size in sizes}} for name in cases}


def recurrent_table() -> Cases:
    """Of states of few slots, and of many slots in a convolution, slow rows count for nothing."""
    sizes = ("k=0", "k=1", "k=4", "k=8", "norm k=0", "rule", "convolution")
    cases = filled(recurrent_cases(), sizes, [6.0, 0.8, None])
    cases["delta_rule Qwen3.5-27B 4 slots"]["rows"]["k=8"][1] = 0.1
    cases["delta_rule Qwen3.5-27B 64 slots"]["rows"]["k=8"][1] = 0.7
    cases["short_conv Qwen3.5-35B-A3B 16 slots"]["rows"]["k=4"][0] = 9.0
    cases["short_conv Qwen3.5-27B 64 slots"]["rows"]["k=4"][0] = 99.0
    for name in ("delta_chunks Qwen3.5-27B", "delta_chunks Qwen3.5-35B-A3B"):
        cases[name]["rows"]["rule"][1], cases[name]["rows"]["convolution"][1] = 1.9e6, 8e6
    return cases


def kernel_table() -> Cases:
    """Sparse cases, and dense ones: large products count only, and attention over long contexts."""
    cases = filled(sparse_cases(), ("1", "4", "8", "16", "64"), [10.0, 0.81, 17.0])
    cases["mla V3 1 slots 4096"]["rows"]["1"][1] = 0.1  # less is read than a launch takes
    cases["mla V3 16 slots 4096"]["rows"]["1"][1] = 0.5
    rows = {"1": [10.0, 0.95, None], "8": [10.2, 0.93, None]}
    return cases | {
        "A head 100000x4096": {"rows": rows, "8_over_1": [1.02]},
        "A out 4096x4096": {"rows": {"1": [10.0, 0.4, None]}},
        "paged_attention 1 slots 1024": {"rows": {"1": [7.0, 0.1, None]}},
        "paged_attention 16 slots 4096": {"rows": {"1": [7.0, 0.7, None], "plan 1": [1.0, None, None]}},
    }


RATIOS = {
    f"peers_{name}": {"a": {"ratios": {f"spd plain / transformers {peer}": {"median": ratio}}}}
    for name, peer, ratio in (("static", "static compiled", 0.92), ("eager", "eager", 8.7))
}
PAIR = {"4": {"share_of_ceiling": 0.59, "speedup": 2.3}, "1": {"share_of_ceiling": 0.1}}
COUNTS = {"differing_tokens": 0, "differing_counts": 2, "compared_tokens": 162306}
STATES = "states of recurrent layers read and written, k = {}, of the read rate"
CHUNKS = "a prompt's chunks through a recurrent layer's {}, million tokens a second"
TESTS = "GPU tests that failed, and files of them that did not end"
PROBES: dict[str, Any] = {
    "kernel_table": {"cases": kernel_table()},
    "recurrent_table": {"cases": recurrent_table()},
    "sparse_models": {"models": {"MiMo-7B": {"k=1": {"share_of_floor": 0.74}}}},
    "eight_bit_rounds": {"forms": {"fp8": COUNTS}},
    "plain": {
        "models": {"Qwen3-8B": {"share_of_floor": 0.8, "idle_us": [31.0, 40.0]}},
        "sampling": {"host_reads": {"syncs": 1}},
    },
    "draft": {"pairs": {"Qwen3-0.6B > Qwen3-8B": {"k": PAIR}}},
    **RATIOS,
    "spd_demo": COUNTS,
    "gpu_tests": {"failed": [], "passed": 9, "files": 5, "of": 7},
}
ENDS = {
    "latent attention of 16 slots at one query, of the read rate (at least 0.65, goal 0.78)": "0.50, NOT met",
    "128 experts at 8 rows, of the touched bytes": "0.81, met",
    "128 experts at 16 and more rows, of the touched bytes": "0.81, NOT met",
    "int8 products up to 8 rows, of the read rate": "0.81, met",
    "fp8 products against wide ones": "1.70, met",
    "MTP at a 7B shape, k = 1, of the speculative byte ceiling": "0.74, NOT met",
    "MTP at a 7B shape, k = 3, of the speculative byte ceiling": "not measured",
    "tokens that speculation changed (none)": "0, met",
    "tokens compared": "162306, met",
    "requests that accepted otherwise, eager or captured, at any lag": "2, NOT met",
    "products of 64 MB and more, of the read rate": "0.93, met",
    "their time at 8 rows over that at 1 (at most 1.05)": "1.02, met",
    "decode attention, of the read rate": "0.70, NOT met",
    "8B plain at batch 1, of the byte floor": "0.80, met",
    "us between rounds": "31.00, NOT met",
    "host reads in rounds": "1, NOT met",
    "0.6B drafter, k = 4, of the byte ceiling": "0.59, NOT met",
    "EAGLE-size drafter, k = 4, of the byte ceiling": "not measured",
    "8B over eager transformers": "8.70, met",
    "8B over compiled transformers (reported)": "0.92",
    "the demo's requests that accepted otherwise": "2, NOT met",
    "the demo's tokens compared": "162306, met",
    TESTS: "2, NOT met",
    **{STATES.format(k): "0.80, met" for k in (0, 1, 4)},
    STATES.format(8): "0.70, NOT met",
    "short convolutions of up to 16 slots and 5 rows, us": "9.00, NOT met",
    CHUNKS.format("rule"): "1.90, NOT met",
    CHUNKS.format("convolution"): "8.00, met",
}


def test_the_worst_figure_decides_and_gates_of_other_probes_are_silent() -> None:
    lines = gate_lines({name: {"result": result} for name, result in PROBES.items()})
    found = [line.removeprefix("gate: ").rsplit(": ", 1) for line in lines]
    assert len(found) == sum(gate.probe in PROBES for gate in GATES)
    for start, end in ENDS.items():
        assert [said for name, said in found if name.startswith(start)][:1] == [end], start


@pytest.mark.parametrize(("more", "end"), [({}, "0, met"), ({"passed": 0}, "not measured")])
def test_a_lane_of_which_no_test_ran_shows_nothing(more: dict[str, Any], end: str) -> None:
    result = {**PROBES["gpu_tests"], "files": 7, **more}
    assert gate_lines({"gpu_tests": {"result": result}}) == [f"gate: {TESTS} (none): {end}"]
