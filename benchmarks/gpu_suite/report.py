"""The report: what it says of machine and sources, where it goes, and what of an earlier one it keeps."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, describe_commit, describe_machine

REPORT = "gpu_suite.json"
Answer = dict[str, Any]


def new_report() -> Answer:
    """A report of no probe yet."""
    return {
        "schema": "spd.benchmarks.gpu_suite/2",
        "machine": describe_machine(),
        "versions": versions(),
        "gpu": gpu_and_driver(),
        **describe_commit(),
        "sources": digest_of_sources(),
        "probes": {},
    }


def versions() -> dict[str, str]:
    """Of what makes the kernels, where it is installed, without importing it."""
    found = {}
    for name in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def gpu_and_driver() -> str | None:
    """Name of the first GPU and version of its driver, asked without taking any of its memory."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(run.stdout.splitlines()), None)


def digest_of_sources(root: Path = ROOT) -> str:
    """A few digits that change with any source: a commit says nothing of a working tree that was changed."""
    found = hashlib.sha256()
    for room in ("spd", "benchmarks", "tests"):
        for path in sorted((root / room).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                found.update(path.read_bytes())
    return found.hexdigest()[:12]


def place_of(report: Answer, out: Path, keep: bool) -> Path:
    """The file in `out` for a report, which takes over the probes of one of the same machine and sources.

    One of another machine or of other sources is replaced; with `keep` it is left alone, and the next
    name that is free, or whose report can be gone on with, is taken.
    """
    for path in _names(out):
        if not path.exists():
            return path
        earlier = _read(path)
        if all(earlier.get(name) == value for name, value in report.items() if name != "probes"):
            report["probes"].update(earlier["probes"])
            return path
        if not keep:
            return path
    raise AssertionError("the names do not end")


def _names(out: Path) -> Iterator[Path]:
    yield out / REPORT
    yield from (out / REPORT.replace(".", f".{number}.") for number in count(2))


def _read(path: Path) -> Mapping[str, Any]:
    """Nothing of a file that is no report."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def answer_after(earlier: Answer | None, new: Answer) -> Answer:
    """A probe's new answer; one that did not end well has beside it what was found before."""
    if earlier is None or new["status"] == "ok":
        return new
    best = earlier.get("earlier", earlier)
    return {**new, "earlier": best} if "result" in best else new


def write_json(path: Path, text: str) -> None:
    """Replace the file at once: a kill in the middle of a write must not lose what was there."""
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def report_text(report: Answer) -> str:
    """The report as JSON, a line for each of its fields and each probe."""
    probes = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in report["probes"].items()
    )
    fields = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in report.items() if k != "probes"]
    return "{\n" + ",\n".join([*fields, f' "probes": {{\n{probes}\n }}']) + "\n}\n"
