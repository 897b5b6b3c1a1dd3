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
    ("argv", "words"),
    [
        ("Hi --messages x", "it cannot be joined with a prompt"),
        ("-f x --messages x", "it cannot be joined with a prompt"),
        ("Hi --draft-max 0 --adaptive", "--adaptive fits the number of drafts"),
        ("Hi --think 9 --template-arg enable_thinking=false", "say the same thing twice"),
        ("--jsonl -f x -f y", "--jsonl reads one file of lines"),
        ("--jsonl --messages -", "stdin (-) is named twice"),
        ("--jsonl -f - -s @-", "stdin (-) is named twice"),
        ("--jsonl --grammar -", "stdin (-) is named twice"),
        ("-f - --schema -", "stdin (-) is named twice"),
        ("Hi -f - -f -", "stdin (-) is named twice"),
        ("--jsonl -f model/config.json -o model/../model/config.json", "-o names the file of the lines"),
    ],
)
def test_refused_in_other_words(
    argv: str, words: str, spd_run: Callable, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    refused(spd_run("generate", "-m", model, *argv.split(), stdin=b"x"), 2, words)


@pytest.mark.parametrize("command", ["chat", "bench", "serve"])
def test_a_model_is_named_once(command: str, spd_run: Callable) -> None:
    refused(spd_run(command, "demo", "-m", "demo-hybrid", stdin=b"Hi\n"), 2, "the model is given twice")


def test_refused_in_a_chat(spd_run: Callable, model: Path) -> None:
    argv = ("--draft-max", "0", "--adaptive")
    refused(spd_run("chat", model, *argv, stdin=b"Hi\n"), 2, "--adaptive fits the number of drafts")


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
