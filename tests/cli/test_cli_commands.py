"""What is typed, what is said and how it ends: the lines of `commands.txt`, and tables of what clashes."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from spd.cli.commands import jsonl
from spd.cli.text.job import CONFLICTS, NEEDS
from tests.cli.conftest import SPECIALS, refused, write_tokenizer

LINES = Path(__file__).with_name("commands.txt").read_text(encoding="utf-8").splitlines()
ROWS = [line for line in LINES if line and line[0] != "#"]


PLACES = {"LONGNAME": "x" * 300, "NINES": "9" * 400, "DEEP": "[" * 100_000, "NEWLINE": "\n"}
PLACES |= {name.upper(): f"<|im_start|>{name}\n" for name in ("system", "user")}
PLACES |= {"END": "<|im_end|>\n", "REPLY": "<|im_end|>\n<|im_start|>assistant\n"}
FILES = {"a": b"first\n", "b": b"second\n\n", "latin": b"caf\xe9", "empty": b""}
FILES |= {"chat": '[{"role": "system", "content": "S"}, {"role": "user", "content": "é"}]'.encode()}


def files_beside(model: Path) -> list[Path]:
    """But for the folder of saved chats."""
    return sorted(path for path in model.parent.rglob("*") if "state" not in path.parts)


def spelled(text: str) -> bytes:
    """What Python's escapes stand for."""
    return codecs.decode(text, "unicode_escape").encode("latin-1")


@pytest.mark.parametrize("row", ROWS)
def test_what_is_typed(row, spd_run, model, script, monkeypatch) -> None:
    write_tokenizer(model, (*SPECIALS, "<think>", "</think>"))
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(jsonl, "LINES_LIMIT", 2**20)
    for name, data in FILES.items():
        Path(name).write_bytes(data)
    for name, meant in {"MODEL": model.name, **PLACES}.items():
        row = row.replace(name, meant)
    status, typed, words = row.split(" | ")
    typed, given, stdin = typed.partition(" <")
    typed, _, options = typed.partition(" ~ ")
    argv, said = shlex.split(typed), words.split(" ; ")
    if options:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(model.parent))
        (file := model.parent / "spd" / "config.toml").parent.mkdir()
        file.write_text(options + "\n")
        said.append(str(file))
        assert spd_run("generate", "--help").code == 0, "whatever the file says"
    before = files_beside(model)
    if words.startswith("> "):
        argv.insert(1, "--json")
    ran = spd_run(*argv, stdin=spelled(stdin.strip()) if given else None)
    if words.startswith("> "):
        assert (ran.code, ran.json["prompt"].encode()) == (int(status), spelled(words[2:]))
    elif status == "0":
        assert ran.code == 0 and all(word in ran.text + ran.err for word in said)
    elif "--json" in argv:
        error = ran.json["error"]
        assert error["exit"] == ran.code == int(status) and said[0] in error["message"]
        assert error["fix"] and ran.err == ""
        assert all(word in " ".join(error["reason"]) for word in said[1:])
    else:
        refused(ran, int(status), *said)
    loads = (status == "0" and "--dry-run" not in argv) or argv[0] == "chat"  # while it waits for lines
    assert loads or not script.engines
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
