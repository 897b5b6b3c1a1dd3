"""Probe: the tests that need a GPU, each file in a process of its own, many at once."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.gpu_suite import lane_log
from benchmarks.gpu_suite.together import watch_together

AT_ONCE = 12
SECONDS_BETWEEN = 1.0
"""Between two accounts while no file ends: as much is lost at most where the lane is killed."""
PASSED_STATUSES = (0, 5)
FAILED_STATUSES = (1, 2)
"""Exit statuses of pytest: 5 where no test of a file needs a GPU, 2 where a file cannot be read."""


def test_files(tests: Path = ROOT / "tests") -> list[Path]:
    """Return the files with GPU tests: all of tests/gpu and tests/kernels, and those that name the
    marker.

    Those of tests/gpu, whose rounds take longest, come first.
    """
    places = {"gpu": 0, "kernels": 1}
    paths = [
        path
        for path in sorted(tests.rglob("test_*.py"))
        if path.parent.name in places or "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    return sorted(paths, key=lambda path: places.get(path.parent.name, 2))


def run(files: Sequence[Path] | None = None) -> Iterator[dict[str, Any]]:
    """Run them; yield what passed, failed (by name) and was skipped, after each file and every
    second.

    Also of files that have not ended, whose tests at hand are "running". Raises AssertionError at
    the end where a test failed or a file broke.
    """
    with tempfile.TemporaryDirectory() as place:
        names = [str(path) for path in (test_files() if files is None else files)]
        logs = {name: Path(place) / f"{number}.jsonl" for number, name in enumerate(names)}
        commands = {name: _command(name, log) for name, log in logs.items()}
        statuses: dict[str, int] = {}
        reported = time.monotonic()
        for ended in watch_together(commands, AT_ONCE):
            statuses.update([ended] if ended else [])
            if ended or time.monotonic() - reported > SECONDS_BETWEEN:
                reported = time.monotonic()
                yield _account(logs, statuses)
        account = _account(logs, statuses)
    if account["failed"]:
        raise AssertionError(f"{len(account['failed'])} failed: {', '.join(account['failed'])}")


def _command(file: str, log: Path) -> list[str]:
    """Return the command of one file, without the project's options: one needs a plugin, the last
    -m wins."""
    configuration = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-o", "addopts="]
    options = [
        "--import-mode=importlib",
        "--strict-markers",
        "-o",
        f"cache_dir={log.with_name('cache')}",
    ]
    logging = ["-p", lane_log.__name__, "--lane-log", str(log)]
    selection = ["-m", "gpu and not slow", file]
    return [sys.executable, "-m", "pytest", "-q", *configuration, *options, *logging, *selection]


def _account(logs: Mapping[str, Path], statuses: Mapping[str, int]) -> dict[str, Any]:
    """Return the counts of all files so far; an unfinished file is in `running` with its test."""
    passed = skipped = 0
    reasons: dict[str, list[str]] = {}
    running = []
    for name, log in logs.items():
        short = name.removeprefix(f"{ROOT}/")
        ends = lane_log.read(log)
        passed = passed + ends.passed
        skipped = skipped + ends.skipped
        # A file that cannot be imported is a failure of no test.
        reasons |= {
            f"{short}::{test}" if test else short: lines for test, lines in ends.failed.items()
        }
        at = "" if ends.unfinished is None else f" in {ends.unfinished}"
        if name not in statuses:
            running += [f"{short}{at}"] if log.exists() else []
        elif statuses[name] not in (*PASSED_STATUSES, *(FAILED_STATUSES if ends.failed else ())):
            reasons.setdefault(f"{short} ended with status {statuses[name]}{at}", [])
    return {
        "files": len(statuses),
        "of": len(logs),
        "passed": passed,
        "skipped": skipped,
        "failed": list(reasons),
        "why": reasons,
        "running": running,
    }
