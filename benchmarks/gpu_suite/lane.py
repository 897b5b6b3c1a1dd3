"""Probe: the tests that need a GPU, each file in a process of its own, many at once."""

from __future__ import annotations

import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.gpu_suite.together import run_together

AT_ONCE = 12
NONE_COLLECTED = 5
"""The exit status of pytest where no test of a file needs a GPU."""
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def test_files(tests: Path = ROOT / "tests") -> list[Path]:
    """The files that may hold such tests: all of tests/gpu and tests/kernels, and who names the marker.

    Those of tests/gpu, whose rounds take longest, come first.
    """
    places = {"gpu": 0, "kernels": 1}
    found = [
        path
        for path in sorted(tests.rglob("test_*.py"))
        if path.parent.name in places or "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    return sorted(found, key=lambda path: places.get(path.parent.name, 2))


def run(files: Sequence[Path] | None = None) -> Iterator[dict[str, Any]]:
    """Run them; yields after each file what passed, failed (by name) and was skipped, and in which files.

    Raises AssertionError after the last one where a test failed or a file broke.
    """
    with tempfile.TemporaryDirectory() as place:
        reports = {
            str(path): Path(place) / f"{number}.xml"
            for number, path in enumerate(test_files() if files is None else files)
        }
        commands = {name: _command(name, report) for name, report in reports.items()}
        found: dict[str, Any] = {"files": 0, "of": len(commands), "passed": 0, "skipped": 0, "failed": []}
        for name, status in run_together(commands, AT_ONCE):
            found["files"] += 1
            short = name.removeprefix(f"{ROOT}/")
            before = len(found["failed"])
            if reports[name].exists():
                _count(found, short, reports[name])
            if status not in (0, NONE_COLLECTED) and len(found["failed"]) == before:
                found["failed"].append(f"{short} ended with status {status}")
            yield found
    if found["failed"]:
        raise AssertionError(f"{len(found['failed'])} failed: {', '.join(found['failed'])}")


def _command(file: str, report: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        file,
    ]


def _count(found: dict[str, Any], file: str, report: Path) -> None:
    """Add one file's tests to what was found; pytest's own class names depend on where it is started."""
    for case in ElementTree.parse(report).iter("testcase"):
        end = next((ENDS[child.tag] for child in case if child.tag in ENDS), "passed")
        if end == "failed":
            # A file that cannot be imported is reported as a case of no class.
            found["failed"].append(f"{file}::{case.get('name')}" if case.get("classname") else file)
        else:
            found[end] += 1
