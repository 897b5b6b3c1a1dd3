"""The workflows, hooks and issue forms refer to what exists, and agree with the pages."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
MADE_BY_A_LINE = (".venv/", "wheel/", "sdist/", "dist/", "newest.txt")
"""Paths that the lines of a workflow make themselves."""
PATH = re.compile(r"^[\w.-]+(/[\w.-]+)*\.(md|py|toml|txt|yml)$|^[\w.-]+(/[\w.-]+)+$")
CHECKS = (
    ".venv/bin/ruff check .",
    ".venv/bin/ruff format --check .",
    ".venv/bin/mypy",
)


def read(path: Path) -> dict[str, Any]:
    """Return a YAML file's mapping; its key `on` is read as true."""
    data: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return data


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each workflow's job with each of its steps."""
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            for step in job["steps"]:
                yield f"{path.stem}:{name}", step


def lines(job: str) -> list[str]:
    """Return the `run:` lines of a job."""
    return [step["run"] for name, step in steps() if name == job and "run" in step]


def readme_command() -> str:
    """Return the README's test command."""
    text = (ROOT / "README.md").read_text("utf-8")
    match = re.search(r"<!-- test -->\n```sh\n(.*)\n```", text)
    assert match is not None
    return match[1]


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def paths_and_modules(line: str) -> Iterator[Path]:
    """Yield the files that a line refers to, those of `python -m` with a package of ours too."""
    words = shlex.split(line)
    for option, word in pairwise(words):
        if option == "-m" and word.split(".")[0] in ("spd", "tests", "benchmarks"):
            yield Path(*word.split(".")).with_suffix(".py")
    for word in words:
        if PATH.match(word) and not word.startswith(MADE_BY_A_LINE):
            yield Path(word)


def test_every_line_refers_to_files_that_are_there() -> None:
    seen = [path for _, step in steps() for path in paths_and_modules(step.get("run", ""))]
    assert len(set(seen)) >= 5, "the test saw next to nothing"
    assert [str(path) for path in seen if not (ROOT / path).exists()] == []


def test_lines_are_plain_and_steps_ask_for_little() -> None:
    """A value of `${{ }}` in a line would be code of whoever named a branch."""
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}, path
        assert "secrets." not in path.read_text("utf-8"), path
        assert all("timeout-minutes" in job for job in workflow["jobs"].values()), path
    for name, step in steps():
        assert "${{" not in step.get("run", ""), name
        assert "uses" not in step or re.search(r"@v[0-9]+$", step["uses"]), step


def test_the_readme_the_workflow_and_ci_run_the_same() -> None:
    command = readme_command()
    install, _, tests = command.rpartition(" && ")
    assert command in lines("checks:tests")
    assert lines("checks:lint") == [install, *CHECKS]
    assert ".venv/bin/pytest" in tests
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    ran = re.findall(r'^run "(.*)"$', script, re.MULTILINE)
    assert ran == ["$install", *CHECKS, "$tests"]


def test_the_pythons_are_those_of_the_package() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "checks.yml")["jobs"]["tests"]["strategy"]
    pythons = matrix["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    classifiers = [name for name in project()["classifiers"] if name.startswith(prefix)]
    assert classifiers == [f"Programming Language :: Python :: {python}" for python in pythons]
    assert project()["requires-python"] == f">={pythons[0]}"


def test_the_newest_requirements_have_no_upper_pin() -> None:
    packaging = pytest.importorskip("packaging.requirements")
    pytest.importorskip("tomllib")
    without_upper_pin = runpy.run_path(str(ROOT / ".github" / "newest.py"))["without_upper_pin"]
    requirements = project()["dependencies"] + project()["optional-dependencies"]["dev"]
    for text in requirements:
        before = packaging.Requirement(text)
        after = packaging.Requirement(without_upper_pin(text))
        assert (after.name, after.marker) == (before.name, before.marker)
        assert {specifier.operator for specifier in after.specifier} == {">="}, text
        assert after.specifier.contains("9999")
    assert without_upper_pin("torch>=2.9,<2.14") == "torch>=2.9"


def test_each_pin_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    block = text.split("\ndependencies = [\n")[1].split("\n]\n")[0]
    assert len(block.splitlines()) == len(project()["dependencies"])
    assert [line for line in block.splitlines() if "# " not in line] == []


def test_hooks_run_the_tools_of_the_environment() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"].split(" --")[0] for hook in repository["hooks"]]
    assert entries == ["ruff check", "ruff format", "mypy"]
    assert all(hook["language"] == "system" for hook in repository["hooks"])


@pytest.mark.parametrize(
    "form", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem
)
def test_an_issue_form_is_one(form: Path) -> None:
    data = read(form)
    assert data["name"] and data["description"]
    fields = data["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field["type"] in ("input", "textarea")
        assert field["attributes"]["label"]
    assert any(field.get("validations", {}).get("required") for field in fields)
