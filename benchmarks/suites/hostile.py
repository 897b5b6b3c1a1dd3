"""Hostile inputs: none may hang, answer with a wrong result in silence, or write outside."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.suites.folders import TEMPLATE, write_model
from benchmarks.suites.hostile_folders import (
    Command,
    link_commands,
    pattern_commands,
    taken_outside,
    weight_commands,
)
from benchmarks.suites.hostile_requests import Hostile, all_requests
from benchmarks.suites.report import WRONG, Report
from benchmarks.suites.served import Server, clean_environment, serving

CPU_SECONDS = 10.0
"""CPU seconds within which each input has to end: other work does not count."""
SECONDS = 60.0
"""Seconds of wall time within which each input has to end."""
MOST_MIB = 2048.0
"""Memory that one run of the command line may take: torch alone takes a quarter of it."""
GROWTH_MIB = 512.0
"""Memory by which a server may grow between the first requests and the last one."""
REFUSED = "refused by name"
ANSWERED = "answered"
CUT = "cut by its limit"


# -- the command line --------------------------------------------------------------------------------


class Runner:
    """Runs commands by a worker that has spd loaded."""

    def __init__(self, place: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.suites.hostile_worker", str(SECONDS)]
        self._process = subprocess.Popen(
            command,
            cwd=place,
            env=clean_environment(place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command: Command) -> dict[str, Any]:
        """Return what the worker tells of one run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command.arguments) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._process.stdout.readline())
        return result

    def close(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def command_outcome(command: Command, result: dict[str, Any]) -> tuple[str, str]:
    """Return the outcome of one run, and what is wrong with it."""
    status = result["status"]
    text = result["text"]
    if status is None:
        return WRONG, f"hangs for {SECONDS:.0f} s"
    if result["mib"] > MOST_MIB:
        return WRONG, f"takes {result['mib']:.0f} MiB"
    if status < 0 or "Traceback" in text:
        return WRONG, f"ends with status {status}: {text[-400:]}"
    if command.arguments[0] == "quantize":
        fault = taken_outside(Path(command.arguments[2]))
        if fault:
            return WRONG, fault
    if status == 0:
        return (WRONG, f"exit status 0: {text!r}") if command.must_fail else (ANSWERED, "")
    return (REFUSED, "") if text.strip() else (WRONG, f"status {status} without a word")


def run_commands(report: Report, row: str, commands: Iterable[Command], place: Path) -> None:
    """Count every command."""
    runner = Runner(place)
    try:
        for command in commands:
            outcome, fault = command_outcome(command, runner.run(command))
            report.add(row, outcome, f"{command.name}: {fault}")
    finally:
        runner.close()


# -- the server --------------------------------------------------------------------------------------


def request_outcome(request: Hostile, status: int, answer: Any) -> tuple[str, str]:
    """Return the outcome of one request, and what is wrong with it."""
    display_text = json.dumps(answer)[:400]
    if status == 200:
        if request.refuse:
            return WRONG, f"accepted: {display_text}"
        return _answer_outcome(request, answer, display_text)
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message", "") if isinstance(error, dict) else ""
    if status >= 500 or not message:
        return WRONG, f"status {status}: {display_text}"
    if request.named and request.named not in json.dumps(error):
        return WRONG, f"the refusal does not name {request.named}: {display_text}"
    return REFUSED, ""


def _answer_outcome(request: Hostile, answer: Any, display_text: str) -> tuple[str, str]:
    """Return the outcome of an answer: complete JSON has to satisfy the request's check."""
    if not isinstance(answer, dict):
        return (
            (WRONG, f"an error in the stream: {display_text}")
            if '"error"' in display_text
            else (ANSWERED, "")
        )
    if "choices" not in answer:
        is_fine = request.holds is None or request.holds(answer)
        return (ANSWERED, "") if is_fine else (WRONG, f"not done: {display_text}")
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return CUT, ""
    texts = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or ()]
    if "response_format" in request.body:
        texts.append(choice["message"]["content"])
    try:
        values = [json.loads(text) for text in texts]
    except (TypeError, ValueError):
        return WRONG, f"no JSON: {display_text}"
    is_fine = request.holds is None or all(map(request.holds, values))
    return (ANSWERED, "") if is_fine else (WRONG, f"not what the schema says: {display_text}")


def run_requests(report: Report, server: Server, requests: Iterator[tuple[str, Hostile]]) -> None:
    """Count every request, and check that the server's memory does not grow."""
    began = 0.0
    for number, (row, request) in enumerate(requests):
        at = time.monotonic()
        computed = server.cpu_seconds
        try:
            status, answer = server.post(request.path, request.body, seconds=SECONDS)
        except OSError as error:
            description = f"{type(error).__name__} after {time.monotonic() - at:.1f} s"
            report.add(row, WRONG, f"{request.name}: {description}")
            continue
        outcome, fault = request_outcome(request, status, answer)
        if (seconds := server.cpu_seconds - computed) > CPU_SECONDS:
            outcome = WRONG
            fault = f"computes for {seconds:.1f} s"
        report.add(row, outcome, f"{request.name}: {fault}")
        began = server.resident_mib if number == 50 else began
    grown = server.resident_mib - began
    outcome = WRONG if grown > GROWTH_MIB else ANSWERED
    report.add("memory", outcome, f"the server holds {grown:.0f} MiB more than behind 50 requests")


def run_files() -> Report:
    """Run every command over a hostile folder."""
    report = Report("hostile folders", "made by the suite")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = write_model(place / "model", TEMPLATE, ("<tool_call>", "</tool_call>"))
        rows = {"patterns": pattern_commands, "links": link_commands, "weights": weight_commands}
        for row, commands in rows.items():
            run_commands(report, row, commands(model, place), place)
            print(report.text(), flush=True)
    return report


def run_server() -> Report:
    """Send every hostile request to one server."""
    report = Report("hostile requests", "made by the suite")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = write_model(place / "model", TEMPLATE, ("<tool_call>", "</tool_call>"))
        before = {path.name for path in place.rglob("*")}
        with serving(model, place, ("--ctx", "32768")) as server:
            run_requests(report, server, all_requests())
        new = {path.name for path in place.iterdir()} - before
        new -= {"serve.log", *(path.name for path in place.glob("xdg_*")), "hf_home"}
        report.add("files", WRONG if new else ANSWERED, f"requests wrote {sorted(new)}")
    return report
