"""A pytest plugin: how every test ends, a line of a file each, written before the next test begins.

A run that is killed leaves what it had found, and which test it was in: a report that is written at
the end would be lost with it. `pytest -p benchmarks.gpu_suite.lane_log --lane-log FILE`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LAST_LINES = 15
"""Of what pytest says about a failure."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the file that lines are appended to."""
    parser.addoption(
        "--lane-log", type=Path, metavar="FILE", help="append a JSON line as each test ends"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer if a file is named."""
    if config.getoption("--lane-log"):
        config.pluginmanager.register(Writer(config.getoption("--lane-log")))


class Writer:
    """Writes {"test", "end"} lines: "begun", then "passed", "skipped" or "failed".

    "" is the file itself.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def write(self, nodeid: str, end: str, **fields: Any) -> None:
        """Append a line and close the file, so that the line outlives this process."""
        line = json.dumps({"test": nodeid.partition("::")[2], "end": end, **fields})
        with self.file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test begins."""
        self.write(nodeid, "begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the end of a test's body, or of a setup or teardown that did not pass."""
        if report.when == "call" or not report.passed:
            self.write(report.nodeid, report.outcome, **_why(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write the end of a file that could not be collected, or is skipped."""
        if not report.passed:
            self.write("", report.outcome, **_why(report))


def _why(report: pytest.TestReport | pytest.CollectReport) -> dict[str, Any]:
    return {"why": report.longreprtext.splitlines()[-LAST_LINES:]} if report.failed else {}


@dataclass
class Found:
    """What a file's lines say; a test has the last end that was written for it."""

    passed: int = 0
    skipped: int = 0
    failed: dict[str, list[str]] = field(default_factory=dict)
    """Tests, "" for the file itself, and the last lines about each."""
    unfinished: str | None = None
    """The test that began and did not end, if any."""


def read(file: Path) -> Found:
    """Read the lines that a run has written so far, the last of which may be half a line."""
    ends: dict[str, dict[str, Any]] = {}
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        ends[line["test"]] = line
    counts = Counter(line["end"] for line in ends.values())
    failed = {test: line["why"] for test, line in ends.items() if line["end"] == "failed"}
    begun = [test for test, line in ends.items() if line["end"] == "begun"]
    return Found(counts["passed"], counts["skipped"], failed, begun[-1] if begun else None)
