"""`spd doctor`: real runs, and reports of planted faults."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spd.formats.demo
from spd.formats.demo import demo_folder
from spd.kernels.native import build
from spd.runtime import Engine, EngineConfig
from spd.runtime.lab import diagnostics, replay
from spd.runtime.lab.diagnostics import FAILED, NUM_TOKENS, OK, WARNING, Finding, Step
from spd.runtime.lab.prompt_set import encode_prompts, read_prompts, select_prompts
from spd.runtime.lab.replay import Replay
from tests.cli.conftest import ROOT, make_failing
from tests.json_schema import faults

pytestmark = pytest.mark.usefixtures("keep_threads")

QUICK_CHECKS = ["packages", "disk", "cpu", "cuda", "triton", "demo"]
SLOW_CHECKS = ["gpu tiles", "activations", "generation"]


def checks_by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in report["checks"]}


def test_a_real_run_passes_all_checks() -> None:
    """All checks run in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-m", "spd", "doctor", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200
    )
    assert done.returncode == 0 and done.stderr == "", done
    report = json.loads(done.stdout)
    assert faults(report, "doctor") == [] and report["ok"] is True
    checks = checks_by_name(report)
    assert list(checks) == QUICK_CHECKS + SLOW_CHECKS
    for check in checks.values():
        assert (
            check["line"]
            and "\n" not in check["line"]
            and bool(check["fix"]) == (check["status"] != OK)
        )
    if not checks["cuda"]["facts"]["devices"]:
        assert checks["gpu tiles"]["line"] == "not asked: no GPU runs Triton's kernels here"
    ratios = checks["activations"]["facts"]["time_ratios"]
    if "C kernels" in checks["cpu"]["line"]:
        assert {form: set(by_rows) for form, by_rows in ratios.items()} == {
            form: {"1", "8"} for form in ("int8", "int4")
        }
        assert all(0.05 < ratio < 20 for by_rows in ratios.values() for ratio in by_rows.values())
    text = checks["generation"]["facts"]
    assert text["tokens"] == 48 > text["accepted"] > 0 and text["differences"] == []
    assert checks["demo"]["facts"]["model"] == str(demo_folder())


def test_a_quick_run_prints_lines_and_tries_nothing(
    spd_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "check_triton", lambda: Finding(WARNING, "odd", ("mend it",)))
    ran = spd_run("doctor", "--quick")
    assert ran.code == 0 and ran.err == ""
    *lines, last = ran.text.splitlines()
    assert [
        line[10:22].strip() for line in lines if not line.startswith("    fix: ")
    ] == QUICK_CHECKS
    assert "warning   triton        odd\n    fix: mend it\n" in ran.text
    assert last == "no problems · details: spd doctor --json"


def test_a_check_that_raises_is_a_failed_one_and_what_hangs_on_it_is_not_asked(
    spd_run, monkeypatch
) -> None:
    monkeypatch.setattr(
        diagnostics, "check_storage", make_failing(RuntimeError("the numbers are\nnot there"))
    )
    ran = spd_run("doctor", "--quick")
    assert ran.code == 1 and ran.err == ""
    assert "failed    disk          RuntimeError: the numbers are\n    fix: " in ran.text
    assert ran.text.splitlines()[-1].startswith("1 problem ·")
    report = spd_run("--json", "doctor", "--quick").json
    assert report["ok"] is False
    assert [
        name for name, check in checks_by_name(report).items() if check["status"] == FAILED
    ] == ["disk"]
    disk = checks_by_name(report)["disk"]
    assert "def fail" not in disk["line"] and "in fail" in disk["facts"]["traceback"]
    monkeypatch.setattr(spd.formats.demo, "demo_folder", lambda name="demo": Path("/nowhere"))
    ran = spd_run("doctor", "--quick", "--json")
    assert ran.code == 1 and checks_by_name(ran.json)["demo"]["status"] == FAILED
    lacking = Step("x", lambda: Finding(OK, "asked"), ("y",)).run({"y": Finding(FAILED, "")})
    assert lacking.line == "not checked, because y failed"
    assert (
        Step("x", lambda: Finding(OK, "asked"), ("y",)).run({"y": Finding(WARNING, "")}).line
        == "asked"
    )


@pytest.mark.parametrize(
    ("drafts", "kernels", "verdict"),
    [
        (False, False, "the same text"),
        (False, True, "not the text of torch's"),
        (True, False, "not the same text"),
    ],
)
def test_other_text_is_a_failure(monkeypatch, drafts, kernels, verdict) -> None:
    """Neither drafts nor another kernel set may change the text."""

    def forged(reference: EngineConfig, candidate: EngineConfig, requests: Any) -> Replay:
        other = kernels if reference.kernels == "torch" else drafts
        difference: Any = {"prompt": "a"}
        return Replay(({}, {"kernels": "native"}), 8, 4, [difference] * other, None)

    monkeypatch.setattr(replay, "replay_requests", forged)
    finding = diagnostics.check_texts()
    assert finding.line.endswith(verdict) and (finding.status == OK) == (verdict == "the same text")
    assert len(finding.facts["differences"]) == (finding.status == FAILED)


def test_the_reply_that_kernels_are_compared_by_has_no_near_tie() -> None:
    """Rounding in bfloat16 has flipped margins of 0.25, which is no fault of a kernel set."""
    questions = encode_prompts(
        demo_folder(), select_prompts(read_prompts(), ["reasoning"], 1), [None], NUM_TOKENS
    )
    request = questions[0].request("r", 0, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = replace(request, params=replace(request.params, logprobs=2))
    engine = Engine(EngineConfig(model=demo_folder(), spec="off", ctx=512, threads=1))
    events = engine.stream([request])
    tops = [entry.top for event in events for entry in event.logprobs]
    assert len(tops) == NUM_TOKENS and min(first[1] - second[1] for first, second in tops) > 0.25


def test_the_instructions_are_named_and_what_better_ones_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: ("gcc",))
    for instruction_set in ("AVX2", "AVX512", "AVX512-VNNI", "AVX512-BF16", "AMX", "NEON", None):
        monkeypatch.setattr(
            build,
            "instructions",
            lambda dtype="bfloat16", instruction_set=instruction_set: instruction_set,
        )
        line = diagnostics.check_processor().line
        assert (f"C kernels for {instruction_set}" in line) == (instruction_set is not None)
        assert ("AVX512-BF16 or AMX would" in line) == (
            instruction_set in ("AVX2", "AVX512", "AVX512-VNNI")
        )


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.8.1", WARNING), ("2.9", OK), ("2.13.0+cpu", OK), ("2.14", WARNING), (None, FAILED)],
)
def test_a_torch_outside_the_required_range_is_reported(
    version: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The required range is that of the package's metadata."""
    real = importlib.metadata.version
    raise_not_found = make_failing(importlib.metadata.PackageNotFoundError("torch"))
    fake_version = lambda name: real(name) if name != "torch" else version or raise_not_found()  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "version", fake_version)
    finding = diagnostics.check_package_versions()
    assert finding.status == status
    assert finding.fix == (() if status == OK else ("pip install 'torch<2.14,>=2.9'",))


def test_caches_that_cannot_be_written_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover a compiler's cache that cannot be written, a missing one, and the hub's."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    finding = diagnostics.check_triton()
    assert finding.status == WARNING and "cannot be written" in finding.line
    assert "TRITON_CACHE_DIR" in finding.fix[0]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert diagnostics.check_triton().status == OK and not (tmp_path / "new").exists()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert diagnostics.check_storage().facts["models"] == []
    (tmp_path / "hub" / "models--a--b" / "snapshots" / "c").mkdir(parents=True)
    assert diagnostics.check_storage().facts["models"] == ["a/b"]
    other = tmp_path / "hub-of-llama.cpp" / "tiny.gguf"
    other.parent.mkdir()
    other.write_bytes(b"GGUF")
    monkeypatch.setenv("LLAMA_CACHE", str(other.parent))
    assert "1 models downloaded, 1 of llama.cpp" in diagnostics.check_storage().line
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    assert diagnostics.check_storage().status == WARNING
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    assert diagnostics.check_storage().status == FAILED
