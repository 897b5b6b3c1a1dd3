"""Run the `run:` lines of the workflows on this machine, each job in a fresh copy of the tree.

    python .github/run_here.py [WORKFLOW[:JOB] ...] [--python VERSION ...]

A job runs once for each requested Python of its matrix; the default is the one that runs this script.
Each copy holds the files that git lists, as they are now, and has its own `python3`. A step that `uses:`
an action and a line that needs `sudo` are named and not run, and so is each Python that is not requested
or not installed. The wheel index of torch is left out: pip keeps the settings of this machine. Environment
variables pass through, so that PYTEST_ADDOPTS may shorten a lane; the script prints it. For a release, the
list of changes is dated in the copy. The exit status is 1 if a line failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
IGNORED_VARIABLES = {"PIP_EXTRA_INDEX_URL"}
"""Variables of the workflows that are replaced by the settings of this machine."""


@dataclass(frozen=True)
class Job:
    """One job of a workflow for one Python."""

    workflow: str
    name: str
    python: str
    steps: Sequence[Mapping[str, Any]]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.workflow}:{self.name} on Python {self.python}"


def pythons_of(job: Mapping[str, Any]) -> list[str]:
    """Return the Pythons of a job: those of its matrix, or the one that it sets up."""
    matrix = job.get("strategy", {}).get("matrix", {})
    if "python" in matrix:
        return [str(version) for version in matrix["python"]]
    versions = [step["with"].get("python-version") for step in job["steps"] if "with" in step]
    return [str(version) for version in versions if version]


def read_jobs() -> Iterator[Job]:
    """Yield the jobs of all workflows, for each of their Pythons."""
    for path in sorted(WORKFLOWS.glob("*.yml")):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, job in workflow["jobs"].items():
            variables = {**workflow.get("env", {}), **job.get("env", {})}
            for python in pythons_of(job):
                yield Job(path.stem, name, python, job["steps"], variables)


def find_python(version: str) -> Path | None:
    """Return an interpreter of a version such as 3.11: this one, one on the PATH, or one of pyenv."""
    if version == THIS_PYTHON:
        return Path(sys.executable)
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        return Path(on_path)
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next(versions.glob(f"{version}.*/bin/python3"), None)


def copy_tree(target: Path) -> None:
    """Copy the files that git lists, as they are in the working tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listing.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def date_release(tree: Path) -> None:
    """Date the unreleased version in a copy of the list of changes, as a release does."""
    path = tree / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("(unreleased)", f"({date.today()})"), encoding="utf-8")


def make_environment(job: Job, interpreter: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a job, whose `python3` is the interpreter without its packages."""
    subprocess.run([str(interpreter), "-m", "venv", str(folder)], check=True)
    variables = {
        name: text for name, text in job.environment.items() if name not in IGNORED_VARIABLES
    }
    version = (ROOT / "spd" / "version.py").read_text(encoding="utf-8").split('"')[-2]
    return {
        **os.environ,
        **variables,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_REF_NAME": f"v{version}",
        "CI": "true",
    }


def run_job(job: Job, interpreter: Path) -> bool:
    """Run the lines of a job until one fails; True if none did."""
    with TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        copy_tree(tree)
        if job.workflow == "release":
            date_release(tree)
        environment = make_environment(job, interpreter, Path(folder, "python"))
        for step in job.steps:
            if "uses" in step:
                print(f"  not run (an action): {step['uses']}", flush=True)
                continue
            line = step["run"].strip()
            if "sudo" in line.split():
                print(f"  not run (changes the machine): {line}", flush=True)
                continue
            start = time.monotonic()
            run = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", line],
                cwd=tree,
                env={**environment, **step.get("env", {})},
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            seconds = time.monotonic() - start
            outcome = "ok" if run.returncode == 0 else f"FAILED with status {run.returncode}"
            print(f"  {outcome} ({seconds:.0f} s): {line}", flush=True)
            if run.returncode != 0:
                print(run.stdout[-4000:] + run.stderr[-4000:], flush=True)
                return False
    return True


def main() -> int:
    """Run the chosen jobs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="WORKFLOW[:JOB]")
    parser.add_argument("--python", nargs="+", default=[THIS_PYTHON], metavar="VERSION")
    options = parser.parse_args()
    if "PYTEST_ADDOPTS" in os.environ:
        print(f"PYTEST_ADDOPTS={os.environ['PYTEST_ADDOPTS']}", flush=True)
    status = 0
    for job in read_jobs():
        if options.jobs and not {job.workflow, f"{job.workflow}:{job.name}"} & set(options.jobs):
            print(f"{job}: not run (not asked for)", flush=True)
            continue
        if job.python not in options.python:
            print(f"{job}: not run (this Python is not asked for)", flush=True)
            continue
        interpreter = find_python(job.python)
        if interpreter is None:
            print(f"{job}: not run (this Python is not on this machine)", flush=True)
            continue
        print(job, flush=True)
        if not run_job(job, interpreter):
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
