"""Runs the slow tests file by file and prints how long each file took and what became of it.

    python -m benchmarks.slow_tests [FILE ...] [--processes 2] [--minutes M]

Without a FILE it runs all files that have slow tests, and begins none after M minutes. A file may take
20 minutes. The exit status is 1 where a test failed or a file took longer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.environment import ROOT

FILE_SECONDS = 20 * 60
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "slow", "--dist", "load")


@dataclass(frozen=True)
class FileResult:
    """The outcome of the slow tests of one file."""

    tests: int
    skipped: int
    seconds: float
    passed: bool

    def line(self, file: str) -> str:
        """Return the row of the printed table."""
        outcome = "passed" if self.passed else "failed"
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{file:<52}{self.tests:>6}{self.seconds:>8.0f} s  {outcome}{skipped}"


def slow_files() -> list[str]:
    """Return the test files that have slow tests."""
    run = subprocess.run([*PYTEST, "--collect-only"], cwd=ROOT, capture_output=True, text=True)
    files = {line.partition(":")[0] for line in run.stdout.splitlines()}
    return sorted(file for file in files if file.startswith("tests/"))


def read_counts(report: Path) -> Mapping[str, str]:
    """Return the attributes of the first suite in pytest's XML report, none where it is missing."""
    if not report.exists():
        return {}
    return ElementTree.parse(report).getroot()[0].attrib


def run_file(file: str, processes: int) -> FileResult:
    """Run the slow tests of a file; print pytest's output where they fail."""
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*PYTEST, "-n", str(processes), f"--junitxml={report}", file]
        try:
            run = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=FILE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return FileResult(tests=0, skipped=0, seconds=FILE_SECONDS, passed=False)
        counts = read_counts(report)
    if run.returncode:
        print(f"{file}\n{run.stdout[-4000:]}{run.stderr[-2000:]}", flush=True)
    tests = int(counts.get("tests", 0))
    return FileResult(
        tests=tests,
        skipped=int(counts.get("skipped", 0)),
        seconds=time.monotonic() - start,
        passed=run.returncode == 0 and tests > 0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the files of the command line, or all; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_tests", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="of pytest, for each file"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no file later")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    status = 0
    for file in options.files or slow_files():
        if time.monotonic() > end:
            print(f"{file:<52} not begun", flush=True)
            continue
        result = run_file(file, options.processes)
        print(result.line(file), flush=True)
        if not result.passed:
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
