"""The gates of the GPU suite: what of a report is held against which bound, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_suite.gates import GATES, gate_lines


def kernel_table() -> dict[str, dict[str, Any]]:
    """Large products count only, and attention over long contexts."""
    return {
        "A head 100000x4096": {
            "rows": {"1": [10.0, 0.95, None], "8": [10.2, 0.93, None]},
            "8_over_1": [1.02],
        },
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
TESTS = "GPU tests that failed, and files of them that did not end"
PROBES: dict[str, Any] = {
    "kernel_table": {"cases": kernel_table()},
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
