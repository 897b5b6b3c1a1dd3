"""Strings from outside on their way to a terminal, and what a stranger's shell meets."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.main import get_group

from spd.cli.commands import COMMANDS, build_app
from tests.cli.conftest import ROOT, edit
from tests.recipes.tiny_dense import FAMILIES, write_dense

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u2028\nfix: curl evil\rZ"
TOKENS = "tokenizer_config.json"
SHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|^ *fix: curl",
    re.MULTILINE,
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
    record = {
        "request": EVIL,
        "method": EVIL,
        "position": 9,
        "draft": [1],
        "sampled": [1, 2],
        "accepted": 1,
    }
    record |= {"committed": [1, 2], "ms": ms, "draft_forwards": 1, "k": 1}
    lines = [{"schema": "spd.trace/1", "model": EVIL, "temperature": 0, "plan": {}}]
    lines += [{**record, "round": number, "k": number % 2} for number in range(1, 9)]
    (folder / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))


LOAD = "generate -m {evil} -n 1 --ctx 64 Hi"
SHORT = "{evil} -n 1 --ctx 64"
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
    monkeypatch.setattr(
        logging.getLogger(), "handlers", []
    )  # pytest's would keep logs from standard error
    places = {"good": tiny("llama3"), "evil": tmp_path / "evil", "odd": EVIL}
    change, typed = CASES[case]
    change(Path(shutil.copytree(places["good"], places["evil"])))
    ran = spd_run(*(word.format(**places) for word in typed.split()), stdin=b"Hi\n")
    shown = ran.err + ran.text * (
        not typed.startswith("chat")
    )  # whose output is the reply, as it is
    assert "owned" in shown and not SHOWN.search(shown), shown


def test_what_libraries_write_to_standard_error(ask, script, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    line = EVIL.replace("\n", "")
    script.on_load = lambda progress: logging.getLogger("of a library").warning(line)
    ran = ask()
    assert ran.code == 0 and "owned" in ran.err and not SHOWN.search(ran.err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("model") / "org.name-1", "mistral", layers=1)


def spd(*argv: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The program in a process of its own, its output no terminal."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    }
    words = (word if isinstance(word, bytes) else str(word) for word in argv)
    return subprocess.run(
        [sys.executable, "-m", "spd", *words],
        env={**kept, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_help_are_commands(name: str) -> None:
    """Every example below a command's help is read by the parser as it stands."""
    found = 0
    for line in get_group(build_app((name,))).commands[name].epilog.splitlines():
        if not line.startswith("  "):
            continue
        lexer = shlex.shlex(line.replace('eval "$(', "").replace(')"', ""), None, True, "|<>&")
        lexer.whitespace_split = True
        words = list(lexer)
        while "spd" in words:
            words = words[words.index("spd") + 1 :]
            ends = (i for i, word in enumerate(words) if set(word) <= set("|<>&"))
            command, *argv = words[: next(ends, len(words))]
            get_group(build_app((command,))).commands[command].make_context(command, argv)
            found += 1
    assert found


def test_locales_with_fewer_letters(folder) -> None:
    """Marks and prompts that the locale has no letters for: no traceback, and the words arrive, in UTF-8."""
    for encoding in ("ascii", "latin-1"):
        how = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
        for argv in (("generate", "--help"), ("inspect", folder)):
            done = spd(*argv, **how)
            assert done.returncode == 0 and b"Traceback" not in done.stderr and done.stdout, done
    beside = folder.parent / "größe.txt"
    beside.write_text("Σ\n")
    asked = ["--raw", "--dry-run", "-m", folder, "-f", beside, "naïve café"]
    done = spd("generate", *asked, "--json", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"].split() == ["Σ", "naïve", "café"]
    done = spd("generate", "--raw", "--dry-run", "-m", folder, b"caf\xe9", LC_ALL="C")
    assert done.returncode == 2 and b"not Unicode text" in done.stderr


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_answers_inspect(spd_run: Callable, tmp_path: Path, family: str) -> None:
    """Its tensors are all found under the names that the family's code wants, and none is left over."""
    ran = spd_run("inspect", write_dense(tmp_path / family, family), "--json")
    assert ran.code == 0, ran
    shown = ran.json
    assert json.loads((tmp_path / family / "config.json").read_text())["architectures"][0] in str(
        shown
    )
    assert "missing" not in ran.err and "unexpected" not in ran.err
