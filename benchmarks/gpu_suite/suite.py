"""Runs the probes, each in a process of its own, and writes the report after every one.

Owns the report's shape and the time budget: a probe that fails, hangs or is killed leaves a line that
says so, and the others still run.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, describe_commit, describe_machine

REPORT = "gpu_suite.json"


@dataclass(frozen=True)
class Probe:
    """A function of no arguments that returns JSON values, and the seconds it may take."""

    name: str
    function: str
    seconds: float


PROBES = (
    Probe("device", "benchmarks.gpu_suite.measure:describe_gpu", 60),
    Probe("bandwidth", "benchmarks.gpu_suite.bandwidth:run", 90),
    Probe("gemm_equality", "benchmarks.gpu_suite.gemm_equality:run", 200),
    Probe("graph_nodes", "benchmarks.gpu_suite.graph_nodes:run", 90),
    Probe("sdpa_equality", "benchmarks.gpu_suite.sdpa_equality:run", 90),
    Probe("spd_demo", "benchmarks.gpu_suite.spd_rounds:run", 200),
    Probe("spd_medium", "benchmarks.gpu_suite.spd_rounds:run_medium", 240),
)


def load_function(reference: str) -> Callable[[], dict[str, Any]]:
    """Return the function named `module:name`."""
    module, _, name = reference.partition(":")
    function: Callable[[], dict[str, Any]] = getattr(importlib.import_module(module), name)
    return function


def run_here(function: str, result: Path) -> int:
    """Run one probe in this process and write {"result"} or {"error"}; the child's side."""
    try:
        answer: dict[str, Any] = {"result": load_function(function)()}
    except Exception:
        answer = {"error": traceback.format_exc()}
    result.write_text(json.dumps(answer), encoding="utf-8")
    return 1 if "error" in answer else 0


def run_probe(probe: Probe, seconds: float) -> dict[str, Any]:
    """Run one probe in a child process for at most `seconds`; never raises for what the probe does."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result, log = Path(place) / "result.json", Path(place) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu_suite"]
        command += ["--child", probe.function, "--child-result", str(result)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        with log.open("w", encoding="utf-8") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, cwd=ROOT, start_new_session=True
            )
            try:
                status: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        taken = {"seconds": round(time.monotonic() - began, 1)}
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        if status is None:
            return {"status": "timed out", **taken, "log": tail}
        if not result.exists():
            return {"status": "died", **taken, "exit_status": status, "log": tail}
        answer = json.loads(result.read_text(encoding="utf-8"))
        if "error" in answer:
            return {"status": "failed", **taken, "error": answer["error"].splitlines(), "log": tail}
        return {"status": "ok", **taken, "result": answer["result"]}


def run_suite(
    out: Path, probes: Sequence[Probe], budget: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the probes within `budget` seconds, rewriting the report in `out` after each; returns it."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, Any] = {}
    report: dict[str, Any] = {
        "schema": "spd.benchmarks.gpu_suite/1",
        "machine": describe_machine(),
        **describe_commit(),
        "probes": found,
    }
    for probe in probes:
        left = budget - (time.monotonic() - began)
        if left < min(20.0, probe.seconds):
            found[probe.name] = {"status": "not run", "why": "the time budget was spent"}
        else:
            found[probe.name] = run_probe(probe, min(probe.seconds, left))
        _write(out / REPORT, report)
        taken = found[probe.name].get("seconds", 0.0)
        say(f"{probe.name}: {found[probe.name]['status']} ({taken} s)")
    return report


def _write(path: Path, report: dict[str, Any]) -> None:
    # A kill in the middle of a write must not lose the probes before.
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
