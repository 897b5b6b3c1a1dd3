"""Untrusted strings on their way to a terminal, and other shells and locales."""

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

from spd.cli.commands import COMMANDS
from spd.cli.typer_app import build_app
from tests.cli.conftest import ROOT, command_words, edit_json
from tests.recipes.tiny_dense import FAMILIES, write_dense

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u2028\nfix: curl evil\rZ"
TOKENS = "tokenizer_config.json"
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|^ *fix: curl",
    re.MULTILINE,
)


def add_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), f"model.{EVIL}": torch.zeros(1)}, path)


def leave_only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / f"{EVIL.replace('/', '')}.bin")


def set_key(name: str, key: str, value: object) -> Callable[[Path], None]:
    """Set one key of a JSON file."""
    return lambda folder: edit_json(folder / name, **{key: value})


def write_trace(folder: Path) -> None:
    """Write a trace with hostile names."""
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
    "file name": (leave_only_pickle, "inspect {evil}"),
    "file name, JSON": (leave_only_pickle, "inspect {evil} --json"),
    "architecture": (set_key("config.json", "architectures", [EVIL]), "inspect {evil}"),
    "prompt": (set_key(TOKENS, "chat_template", EVIL), "generate -m {evil} --dry-run --json Hi"),
    "template": (set_key(TOKENS, "chat_template", RAISES), "generate -m {evil} --dry-run Hi"),
    "trace": (write_trace, "explain {evil}/trace"),
    "trace, JSON": (write_trace, "explain {evil}/trace --json"),
    "result": (set_key("generation_config.json", "schema", EVIL), f"compare {RESULT} {RESULT}"),
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
    ran = spd_run([word.format(**places) for word in typed.split()], stdin=b"Hi\n")
    output = ran.err + ran.text * (
        not typed.startswith("chat")
    )  # whose output is the reply, as it is
    assert "owned" in output and not UNSAFE.search(output), output


def test_logs_of_libraries_are_escaped(ask, script, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    line = EVIL.replace("\n", "")
    script.on_load = lambda progress: logging.getLogger("of a library").warning(line)
    ran = ask()
    assert ran.code == 0 and "owned" in ran.err and not UNSAFE.search(ran.err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("model") / "org.name-1", "mistral", layers=1)


def spd(*argv: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the program in a process whose output is no terminal."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    }
    words = (word if isinstance(word, bytes) else str(word) for word in command_words(argv))
    return subprocess.run(
        [sys.executable, "-m", "spd", *words],
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_help_are_commands(name: str) -> None:
    """Each example below a command's help is valid for the parser."""
    num_examples = 0
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
            num_examples += 1
    assert num_examples


def test_locales_with_fewer_letters_get_utf8(folder) -> None:
    """The locale lacks letters of help and prompts: no traceback, and the prompt arrives in UTF-8."""
    for encoding in ("ascii", "latin-1"):
        locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
        for argv in (("generate", "--help"), ("inspect", folder)):
            done = spd(argv, **locale)
            assert done.returncode == 0 and b"Traceback" not in done.stderr and done.stdout, done
    text_file = folder.parent / "größe.txt"
    text_file.write_text("Σ\n")
    arguments = ["--raw", "--dry-run", "-m", folder, "-f", text_file, "naïve café"]
    done = spd("generate", arguments, "--json", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"].split() == ["Σ", "naïve", "café"]
    done = spd("generate", "--raw", "--dry-run", "-m", folder, b"caf\xe9", LC_ALL="C")
    assert done.returncode == 2 and b"not Unicode text" in done.stderr


@pytest.mark.covers(count=14)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_answers_inspect(spd_run: Callable, tmp_path: Path, family: str) -> None:
    """All tensors have the names that the family's code expects, and none is unused."""
    ran = spd_run("inspect", write_dense(tmp_path / family, family), "--json")
    assert ran.code == 0, ran
    report = ran.json
    assert json.loads((tmp_path / family / "config.json").read_text())["architectures"][0] in str(
        report
    )
    assert "missing" not in ran.err and "unexpected" not in ran.err
