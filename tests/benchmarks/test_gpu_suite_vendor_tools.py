"""Probes that run NVIDIA's tools, with scripts in their place whose output is read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_suite import vendor_tools
from benchmarks.gpu_suite.digest import digest

NOTHING = "no-such-tool"
NCU_OUTPUT = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","attend_chunk_kernel","Duration","ns","8,120"
"0","attend_chunk_kernel","DRAM Throughput","%","61.5"
"0","attend_chunk_kernel","Elapsed Cycles","cycle","14,000"
"1","linear_kernel","Duration","us","4.5"
"""


def script(path: Path, text: str) -> str:
    """Write a Python program that can be run; return its path."""
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_a_tool_that_is_missing_is_named() -> None:
    answers = {
        "clocks": vendor_tools.run_clocks(sampler=(NOTHING,)),
        "ncu": vendor_tools.run_ncu(tool=(NOTHING,)),
    }
    [answers["sanitizer"]] = vendor_tools.run_sanitizer(tool=NOTHING)
    for name, answer in answers.items():
        text = digest({"probes": {name: {"status": "ok", "result": answer}}})
        assert f"{name}: {NOTHING} is not installed" in text


def test_clocks_are_sampled_while_the_load_runs(tmp_path: Path) -> None:
    samples = "1980, 3201, 610.5, 61\\n1755, 3201, 690.1, 64\\n1900, 3201, [N/A], 64\\n1900, 3201, 650, 63"
    sampler = script(
        tmp_path / "smi", f"import time\nprint('{samples}', flush=True)\ntime.sleep(60)"
    )
    load = (sys.executable, "-c", "import time; time.sleep(1)")
    answer = vendor_tools.run_clocks(sampler=(sampler,), load=load)
    assert answer["samples"] == 3
    assert answer["clocks.sm"] == [1755, 1900, 1980]
    text = digest({"probes": {"clocks": {"status": "ok", "result": answer}}})
    assert "clocks.sm 1755 1900 1980" in text


def test_no_sample_is_no_error() -> None:
    assert vendor_tools.summarize_clocks([]) == {"samples": 0}


def test_counters_are_read_by_launch_in_microseconds(tmp_path: Path) -> None:
    tool = script(tmp_path / "ncu", f"print('''{NCU_OUTPUT}''')")
    answer = vendor_tools.run_ncu(tool=(tool,), layer=())
    assert answer["launches"] == [
        {"kernel": "attend_chunk_kernel", "us": pytest.approx(8.12), "dram_percent": 61.5},
        {"kernel": "linear_kernel", "us": 4.5},
    ]
    text = digest({"probes": {"ncu": {"status": "ok", "result": answer}}})
    assert "attend_chunk_kernel: us 8.1, dram_percent 61.5" in text


def test_errors_are_counted_and_a_tool_that_dies_has_no_count(tmp_path: Path) -> None:
    tool = script(
        tmp_path / "sanitizer",
        "import sys\n"
        "if 'racecheck' in sys.argv:\n    sys.exit(9)\n"
        "print('========= ERROR SUMMARY: 2 errors')",
    )
    *partial_answers, answer = vendor_tools.run_sanitizer(tool=tool)
    assert len(partial_answers) == 5, "an answer after each run"
    assert answer["tools"]["memcheck attention"]["errors"] == 2
    assert answer["tools"]["racecheck recurrent"] == {"status": 9, "errors": None, "lines": []}
    text = digest({"probes": {"sanitizer": {"status": "ok", "result": answer}}})
    assert "racecheck split: - errors, pytest ended with 9" in text
