"""Every combination in the tables is refused in its own words, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spd.cli.text.job import CONFLICTS, NEEDS
from tests.cli.conftest import refused

VALUES = {"prompt": ["Hi"], "template_arg": ["--template-arg", "a=1"], "think": ["--think", "off"]}
VALUES |= {"schema": ["--schema", "{}"], "prompt_ids": ["--prompt-ids", "1"], "logprobs": ["--logprobs", "0"]}
VALUES |= {n: [f"--{n}", "x"] for n in ("system", "messages", "file", "grammar", "trace", "output")}
VALUES |= {"concurrency": ["--concurrency", "4"]}


def typed(name: str) -> list[str]:
    return VALUES.get(name, [f"--{name.replace('_', '-')}"])


PAIRS = [(name, other, why) for name, others, why in CONFLICTS for other in others]


@pytest.mark.parametrize(("name", "other", "why"), PAIRS, ids=[f"{n}-{o}" for n, o, _ in PAIRS])
def test_refused_together(name: str, other: str, why: str, spd_run: Callable, model: Path) -> None:
    ran = spd_run("generate", "-m", model, *typed(name), *typed(other))
    if "json" in (name, other):
        shown = ran.json["error"]
        assert ran.code == 2 and why in shown["message"]
    else:
        refused(
            ran,
            2,
            why,
            "leave one of them out",
            *(f"--{n.replace('_', '-')}" for n in (name, other) if n != "prompt"),
        )


@pytest.mark.parametrize(("name", "others", "why", "fix"), NEEDS)
def test_refused_alone(
    name: str, others: list[str], why: str, fix: str, spd_run: Callable, model: Path
) -> None:
    rest = [] if others != ["output"] else ["--jsonl"]
    refused(spd_run("generate", "-m", model, *typed(name), *rest), 2, why, fix)


@pytest.mark.parametrize(
    "argv",
    [
        "--prompt-ids 1 --raw",
        "Hi --draft-max 0",
        "Hi --spec off --no-adaptive",
        "Hi --json --logprobs 2",
        "Hi -s x --template-arg a=1",
    ],
)
def test_allowed(argv: str, spd_run: Callable, model: Path, script: object) -> None:
    assert spd_run("generate", "-m", model, *argv.split()).code == 0
