"""What is refused in the words of `refusals.txt` or of the tables, before anything is loaded or written."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from spd.cli.text.job import CONFLICTS, NEEDS
from tests.cli.conftest import SPECIALS, refused, write_tokenizer

LINES = Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8").splitlines()
ROWS = [line for line in LINES if line and line[0] != "#"]


def files_beside(model: Path) -> list[Path]:
    """But for the folder of saved chats."""
    return sorted(path for path in model.parent.rglob("*") if "state" not in path.parts)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row, spd_run, model, script, monkeypatch) -> None:
    write_tokenizer(model, (*SPECIALS, "<think>", "</think>"))
    monkeypatch.chdir(model.parent)
    before = files_beside(model)
    long = {"LONGNAME": "x" * 300, "NINES": "9" * 400, "DEEP": "[" * 100_000}
    for name, meant in {"MODEL": model.name, **long}.items():
        row = row.replace(name, meant)
    status, typed, words = row.split(" | ")
    typed, given, stdin = typed.partition(" <")
    data = codecs.decode(stdin.strip(), "unicode_escape").encode("latin-1") if given else None
    ran = spd_run(*shlex.split(typed), stdin=data)
    said = words.split(" ; ")
    if "--json" in typed.split():
        error = ran.json["error"]
        assert error["exit"] == ran.code == int(status) and said[0] in error["message"]
        assert all(word in " ".join(error["reason"]) for word in said[1:])
    else:
        refused(ran, int(status), *said)
    assert not script.engines or typed.startswith("chat"), "a chat loads while it waits for lines"
    assert files_beside(model) == before


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
def test_refused_alone(name, others, why, fix, spd_run, model) -> None:
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
