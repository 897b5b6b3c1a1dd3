"""Strings from outside on their way to a terminal: no escape, no turned direction, no line of their own."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import edit

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u2028\nfix: curl evil\rZ"
TOKENS = "tokenizer_config.json"
SHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|^ *fix: curl", re.MULTILINE
)


def add_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), f"model.{EVIL}": torch.zeros(1)}, path)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / f"{EVIL.replace('/', '')}.bin")


def put(name: str, key: str, value: object) -> Callable[[Path], None]:
    """Set one key of a JSON file."""
    return lambda folder: edit(folder / name, **{key: value})


def trace(folder: Path) -> None:
    """Two rounds of a request, and the header of another drafter."""
    ms = {"draft": 1.0, "verify": 2.0, "rest": 0.5, "host": 0.1}
    record = {"request": EVIL, "method": EVIL, "position": 9, "draft": [1], "sampled": [1, 2], "accepted": 1}
    record |= {"committed": [1, 2], "ms": ms, "draft_forwards": 1, "k": 1}
    lines = [{"schema": "spd.trace/1", "model": EVIL, "temperature": 0, "plan": {}, "prompt_ids": []}]
    lines += [{**record, "round": number, "k": number % 2} for number in range(1, 9)]
    (folder / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))


LOAD, SHORT = "generate -m {evil} -n 1 --ctx 64 Hi", "{evil} -n 1 --ctx 64"
RAISES = f"{{{{ raise_exception({json.dumps(EVIL)}) }}}}"
RESULT = "{evil}/generation_config.json"
CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "log, quiet": (add_tensor, f"{LOAD} -q --color never --json"),
    "log of a chat": (add_tensor, f"chat {SHORT} --no-save"),
    "log of a draft model": (add_tensor, f"generate -m {{good}} --draft-model {SHORT} Hi"),
    "tensors": (add_tensor, "inspect {evil}"),
    "tensors, JSON": (add_tensor, "inspect {evil} --json"),
    "file name": (only_pickle, "inspect {evil}"),
    "file name, JSON": (only_pickle, "inspect {evil} --json"),
    "architecture": (put("config.json", "architectures", [EVIL]), "inspect {evil}"),
    "prompt": (put(TOKENS, "chat_template", EVIL), "generate -m {evil} --dry-run --json Hi"),
    "template": (put(TOKENS, "chat_template", RAISES), "generate -m {evil} --dry-run Hi"),
    "trace": (trace, "explain {evil}/trace"),
    "trace, JSON": (trace, "explain {evil}/trace --json"),
    "result": (put("generation_config.json", "schema", EVIL), f"compare {RESULT} {RESULT}"),
    "folder": (lambda folder: None, "chat {evil}/{odd}"),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_from_outside_steers_a_terminal(case, spd_run, tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's would keep logs from standard error
    places = {"good": tiny("llama3"), "evil": tmp_path / "evil", "odd": EVIL}
    change, typed = CASES[case]
    change(Path(shutil.copytree(places["good"], places["evil"])))
    ran = spd_run(*(word.format(**places) for word in typed.split()), stdin=b"Hi\n")
    shown = ran.err + ran.text * (not typed.startswith("chat"))  # whose output is the reply, as it is
    assert "owned" in shown and not SHOWN.search(shown), shown


def test_what_libraries_write_to_standard_error(ask, script, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    line = EVIL.replace("\n", "")
    script.on_load = lambda progress: logging.getLogger("of a library").warning(line)
    ran = ask()
    assert ran.code == 0 and "owned" in ran.err and not SHOWN.search(ran.err)
