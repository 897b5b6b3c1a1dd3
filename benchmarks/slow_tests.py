"""Runs the slow tests file by file, and keeps how long each file's last run took and what became of it.

    python -m benchmarks.slow_tests [FILE ...] [--processes 2] [--minutes M] [--out FILE]

Without a FILE all files that have slow tests and were not run on this commit, those that were run longest ago
first; none is begun after M minutes. A file may take 20 minutes. Status 1 where a test failed or a file took
longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.environment import ROOT, describe_commit, describe_machine

SCHEMA = "spd.benchmarks.slow_tests/1"
MOST_SECONDS = 20 * 60
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "slow", "--dist", "load")
COUNTS = ("tests", "failures", "errors", "skipped")


def slow_files() -> list[str]:
    """The test files that have slow tests."""
    run = subprocess.run([*PYTEST, "--collect-only"], cwd=ROOT, capture_output=True, text=True)
    return sorted(
        {line.partition(":")[0] for line in run.stdout.splitlines() if line.startswith("tests/")}
    )


def run_file(file: str, processes: int) -> dict[str, Any]:
    """Run the slow tests of a file: counts of pytest's report, seconds, and with what it was run."""
    facts = {"when": datetime.now(timezone.utc).date().isoformat(), **describe_commit()}
    facts["machine"], began = describe_machine(), time.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*PYTEST, "-n", str(processes), f"--junitxml={report}", file]
        try:
            run = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {**facts, "seconds": MOST_SECONDS, "passed": False}
        seconds = round(time.monotonic() - began, 1)
        suite = ElementTree.parse(report).getroot()[0].attrib if report.exists() else {}
    if run.returncode:
        print(f"{file}\n{run.stdout[-4000:]}{run.stderr[-2000:]}", flush=True)
    counts = {name: int(suite.get(name, 0)) for name in COUNTS}
    return {
        **facts,
        **counts,
        "seconds": seconds,
        "passed": run.returncode == 0 and counts["tests"] > 0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_tests", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="of pytest, for each file"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no file later")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/slow_tests.json")
    asked = parser.parse_args(arguments)
    known = json.loads(asked.out.read_text())["files"] if asked.out.exists() else {}
    every, commit, end = (
        slow_files(),
        describe_commit()["commit"],
        time.monotonic() + 60 * asked.minutes,
    )
    kept = {file: known[file] for file in every if file in known}
    old = [file for file in every if file not in kept or kept[file]["commit"] != commit]
    files = asked.files or sorted(old, key=lambda file: kept.get(file, {}).get("when", ""))

    has_failed = False
    for file in files:
        if time.monotonic() > end:
            break
        found = kept[file] = run_file(file, asked.processes)
        asked.out.write_text(
            json.dumps({"schema": SCHEMA, "files": dict(sorted(kept.items()))}, indent=1)
        )
        tests, outcome = found.get("tests", 0), "passed" if found["passed"] else "failed"
        print(f"{file:<52}{tests:>6}{found['seconds']:>8.0f} s  {outcome}", flush=True)
        has_failed |= not found["passed"]
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
