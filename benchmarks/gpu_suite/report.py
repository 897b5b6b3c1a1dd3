"""The report: what it says of machine and sources, where it goes, and what of an earlier one it
keeps."""

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
    """Return a report without probes."""
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
    """Return the versions of torch and triton, where installed, without importing them."""
    installed = {}
    for name in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def gpu_and_driver() -> str | None:
    """Return the first GPU's name and driver version, without using its memory."""
    query = ["nvidia-smi", "--query-gpu=name,nvidia_driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(run.stdout.splitlines()), None)


def digest_of_sources(root: Path = ROOT) -> str:
    """Return digits that change with any source: a commit does not identify a changed working
    tree."""
    digest = hashlib.sha256()
    for folder in ("spd", "benchmarks", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def place_of(report: Answer, out: Path, keep: bool) -> Path:
    """Return a report's file in `out`; add the probes of an earlier one of the same machine and
    sources.

    One of another machine or of other sources is replaced; with `keep` it is left alone, and the
    next name that is free, or whose report can be gone on with, is taken.
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
    """Read a report; empty if the file is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return {}
    return report if isinstance(report, dict) else {}


def answer_after(earlier: Answer | None, new: Answer) -> Answer:
    """Return a probe's new answer; a failed one includes the earlier answer."""
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
    """Return the report as JSON, a line for each of its fields and each probe."""
    probes = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(answer)}" for name, answer in report["probes"].items()
    )
    fields = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in report.items() if k != "probes"]
    return "{\n" + ",\n".join([*fields, f' "probes": {{\n{probes}\n }}']) + "\n}\n"
