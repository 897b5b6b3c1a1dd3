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

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u2028\nfix: curl evil\rZ"
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

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return change


def trace(folder: Path) -> None:
    """Two rounds of a request, and the header of another drafter."""
    ms = {"draft": 1.0, "verify": 2.0, "rest": 0.5, "host": 0.1}
    record = {"request": EVIL, "method": EVIL, "position": 9, "draft": [1], "sampled": [1, 2], "accepted": 1}
    record |= {"committed": [1, 2], "ms": ms, "draft_forwards": 1, "k": 1}
    lines = [{"schema": "spd.trace/1", "model": EVIL, "temperature": 0, "plan": {}, "prompt_ids": []}]
    lines += [{**record, "round": number, "k": number % 2} for number in range(1, 9)]
    (folder / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))


LOAD = ("generate", "-m", "{evil}", "-n", "1", "--ctx", "64", "Hi")
CASES = {
    "log, quiet": (add_tensor, (*LOAD, "-q", "--color", "never", "--json")),
    "log of a chat": (add_tensor, ("chat", "{evil}", "-n", "1", "--ctx", "64", "--no-save")),
    "log of a draft model": (add_tensor, ("generate", "-m", "{good}", "--draft-model", *LOAD[2:])),
    "tensors": (add_tensor, ("inspect", "{evil}")),
    "tensors, JSON": (add_tensor, ("inspect", "{evil}", "--json")),
    "file name": (only_pickle, ("inspect", "{evil}")),
    "file name, JSON": (only_pickle, ("inspect", "{evil}", "--json")),
    "architecture": (put("config.json", "architectures", [EVIL]), ("inspect", "{evil}")),
    "prompt": (
        put("tokenizer_config.json", "chat_template", EVIL),
        ("generate", "-m", "{evil}", "--dry-run", "--json", "Hi"),
    ),
    "template": (
        put("tokenizer_config.json", "chat_template", f"{{{{ raise_exception({json.dumps(EVIL)}) }}}}"),
        ("generate", "-m", "{evil}", "--dry-run", "Hi"),
    ),
    "trace": (trace, ("explain", "{evil}/trace")),
    "trace, JSON": (trace, ("explain", "{evil}/trace", "--json")),
    "result": (
        put("generation_config.json", "schema", EVIL),
        ("compare", "{evil}/generation_config.json", "{evil}/generation_config.json"),
    ),
    "folder": (lambda folder: None, ("chat", f"{{evil}}/{EVIL}")),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_from_outside_steers_a_terminal(case, spd_run, tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's would keep logs from standard error
    good, evil = tiny("llama3"), tmp_path / "evil"
    change, argv = CASES[case]
    change(Path(shutil.copytree(good, evil)))
    ran = spd_run(*(word.format(evil=evil, good=good) for word in argv), stdin=b"Hi\n")
    shown = ran.err + ("" if argv[0] == "chat" else ran.text)  # what stands there is the reply, as it is
    assert "owned" in shown and not SHOWN.search(shown), shown


def test_what_libraries_write_to_standard_error(spd_run, model, script, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    line = EVIL.replace("\n", "")
    script.on_load = lambda progress: logging.getLogger("of a library").warning(line)
    ran = spd_run("generate", "-m", model, "Hi")
    assert ran.code == 0 and "owned" in ran.err and not SHOWN.search(ran.err)
