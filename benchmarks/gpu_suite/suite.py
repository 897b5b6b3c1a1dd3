"""Runs the probes, each in a process of its own, and writes the report after every one.

Owns the time budget: a probe that fails, hangs or is killed leaves what it had found by then and a
line that says so, and the others still run.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.gpu_suite.report import (
    Answer,
    answer_after,
    new_report,
    place_of,
    report_text,
    write_json,
)


@dataclass(frozen=True)
class Probe:
    """A function, as `load_function` takes it, and the seconds it may take.

    It returns JSON values, or yields what it has so far again and again: the last is then the
    result, also of a probe that is stopped. `is_default`: True if it runs where no probe is named.
    """

    name: str
    function: str
    seconds: float
    is_default: bool = True


PACKAGE = "benchmarks.gpu_suite"
PROBES = (
    Probe("device", f"{PACKAGE}.measure:describe_gpu", 10),
    Probe("warm_up", f"{PACKAGE}.warm_up:run", 90),
    Probe("bandwidth", f"{PACKAGE}.bandwidth:run", 12),
    Probe("spd_demo", f"{PACKAGE}.spd_rounds:run", 55),
    Probe("self_draft", f"{PACKAGE}.spd_rounds:run_self_draft", 28),
    Probe("gpu_tests", f"{PACKAGE}.lane:run", 90),
    Probe("plain", f"{PACKAGE}.end_to_end:run_plain", 40),
    Probe("draft", f"{PACKAGE}.end_to_end:run_draft", 60),
    Probe("eagle3", f"{PACKAGE}.end_to_end:run_eagle3", 60, is_default=False),
    Probe("eight_bit_rounds", f"{PACKAGE}.eight_bit_rounds:run", 240, is_default=False),
    Probe("sparse_models", f"{PACKAGE}.sparse_models:run", 240, is_default=False),
    Probe("kernel_table", f"{PACKAGE}.kernel_table:run", 25),
    Probe("recurrent_table", f"{PACKAGE}.kernel_table:run_recurrent", 25, is_default=False),
    Probe("peers_eager", f"{PACKAGE}.peers_gpu:run_eager", 40),
    Probe("peers_loop", f"{PACKAGE}.peers_gpu:run_loop", 45),
    Probe("batches", f"{PACKAGE}.batches:run", 45),
    Probe("peers_static", f"{PACKAGE}.peers_gpu:run_static", 90, is_default=False),
    Probe("self_draft_long", f"{PACKAGE}.spd_rounds:run_self_draft_long", 180, is_default=False),
    Probe("spd_medium", f"{PACKAGE}.spd_rounds:run_medium", 120, is_default=False),
    Probe("token_tiles", f"{PACKAGE}.kernel_table:run_token_tiles", 90, is_default=False),
    Probe("sweep", f"{PACKAGE}.choices:run_sweep", 90, is_default=False),
    Probe("attention_ab", f"{PACKAGE}.choices:run_attention", 40, is_default=False),
    Probe("recurrent_ab", f"{PACKAGE}.choices:run_recurrent", 20, is_default=False),
    Probe("overlap_ab", f"{PACKAGE}.choices:run_overlap", 20, is_default=False),
    Probe("barrier", f"{PACKAGE}.choices:run_barrier", 20, is_default=False),
    Probe("timeline", f"{PACKAGE}.timeline:run", 30, is_default=False),
    Probe("clocks", f"{PACKAGE}.vendor_tools:run_clocks", 40, is_default=False),
    Probe("ncu", f"{PACKAGE}.vendor_tools:run_ncu", 40, is_default=False),
    Probe("sanitizer", f"{PACKAGE}.vendor_tools:run_sanitizer", 90, is_default=False),
)


def load_function(reference: str) -> Callable[[], Answer | Iterator[Answer]]:
    """Return the function named `module:name`, or `module:name:argument...` with arguments
    bound."""
    module, name, *arguments = reference.split(":")
    return partial(getattr(importlib.import_module(module), name), *arguments)


def rounded(value: Any) -> Any:
    """Return a JSON value with every float rounded to five digits, more than are significant."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def run_here(function: str, result: Path, seconds: float = float("inf")) -> int:
    """Run one probe in this process; the child's side.

    Writes {"result", "whole"} after everything the probe yields, and does not ask for more once
    `seconds` have passed; {"error"} beside the last result where it raises.
    """
    began = time.monotonic()
    answer: Answer = {}

    def store(result_so_far: Answer, is_complete: bool) -> None:
        answer.update(result=rounded(result_so_far), whole=is_complete)
        write_json(result, json.dumps(answer))

    try:
        returned = load_function(function)()
        if isinstance(returned, dict):
            store(returned, True)
        else:
            latest: Answer = {}
            for latest in returned:
                store(latest, False)
                if time.monotonic() - began > seconds:
                    break
            else:
                store(latest, True)
    except Exception:
        answer["error"] = traceback.format_exc()
        write_json(result, json.dumps(answer))
    return 1 if "error" in answer else 0


def child_command(function: str, result: Path, seconds: float) -> list[str]:
    """Return the command that runs one probe in another process."""
    command = [sys.executable, "-m", PACKAGE, "--child", function, "--child-result", str(result)]
    return [*command, "--child-seconds", str(seconds)]


def environment() -> dict[str, str]:
    """Return a child's environment: this process's, with the checkout before installed packages."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def run_probe(probe: Probe, seconds: float) -> Answer:
    """Run one probe in a child process for at most `seconds`; never raises for what the probe
    does."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "result.json"
        log = Path(place) / "log"
        # The child stops between two cases, a little before it would be killed in the middle of
        # one.
        command = child_command(probe.function, result, 0.9 * seconds - 3)
        with log.open("w", encoding="utf-8") as output:
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=environment(),
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                status: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        duration = {"seconds": round(time.monotonic() - began, 1)}
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        answer: Answer = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        result_field = {"result": answer["result"]} if "result" in answer else {}
        if status is None:
            return {"status": "timed out", **duration, "log": tail, **result_field}
        if "error" in answer:
            return {
                "status": "failed",
                **duration,
                "error": answer["error"].splitlines(),
                "log": tail,
                **result_field,
            }
        if status != 0 or not result_field:
            return {
                "status": "died",
                **duration,
                "exit_status": status,
                "log": tail,
                **result_field,
            }
        return {"status": "ok" if answer["whole"] else "cut short", **duration, **result_field}


def seconds_of(probes: Sequence[Probe], index: int, left: float, share: bool) -> float:
    """Return a probe's time limit of the seconds left; with `share` all that later ones do not
    need."""
    default_seconds = probes[index].seconds
    later = sum(probe.seconds for probe in probes[index + 1 :])
    return min(left, max(default_seconds, left - later) if share else default_seconds)


def run_suite(
    out: Path,
    probes: Sequence[Probe],
    budget: float,
    log: Callable[[str], None],
    *,
    share: bool = False,
    keep: bool = False,
) -> Answer:
    """Run the probes within `budget` seconds, rewriting the report in `out` after each; returns it.

    Of `share` see `seconds_of`, of `keep` and what an earlier report leaves `report.place_of`.
    """
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    report = new_report()
    place = place_of(report, out, keep)
    answers = report["probes"]
    log(f"report: {place}")
    for index, probe in enumerate(probes):
        left = budget - (time.monotonic() - began)
        if left < min(20.0, probe.seconds):
            answer: Answer = {"status": "not run", "why": "the time budget was spent"}
        else:
            answer = run_probe(probe, seconds_of(probes, index, left, share))
        answers[probe.name] = answer_after(answers.get(probe.name), answer)
        write_json(place, report_text(report))
        log(f"{probe.name}: {answer['status']} ({answer.get('seconds', 0.0)} s)")
    return report
