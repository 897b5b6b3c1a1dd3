"""What a stranger's shell meets: modules, locales, colours, and every dense family inspected."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from spd.cli.commands import COMMANDS, build_app
from tests.cli.conftest import ROOT
from tests.recipes.tiny_dense import FAMILIES, write_dense


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("model") / "org.name-1", "mistral", layers=1)


def spd(*argv: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The program in a process of its own, its output no terminal."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    words = (word if isinstance(word, bytes) else str(word) for word in argv)
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "cwd": ROOT}
    return subprocess.run([sys.executable, "-m", "spd", *words], env={**kept, **environment}, **pipes)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_help_are_commands(name: str) -> None:
    """Every example below a command's help is read by the parser as it stands."""
    found = 0
    for line in get_command(build_app((name,))).commands[name].epilog.splitlines():
        if not line.startswith("  "):
            continue
        lexer = shlex.shlex(line.replace('eval "$(', "").replace(')"', ""), None, True, "|<>&")
        lexer.whitespace_split = True
        words = list(lexer)
        while "spd" in words:
            words = words[words.index("spd") + 1 :]
            ends = (i for i, word in enumerate(words) if set(word) <= set("|<>&"))
            command, *argv = words[: next(ends, len(words))]
            get_command(build_app(command)).commands[command].make_context(command, argv)
            found += 1
    assert found


def test_locales_with_fewer_letters(folder) -> None:
    """Marks and prompts that the locale has no letters for: no traceback, and the words arrive, in UTF-8."""
    runs = [spd("inspect", folder, LC_ALL="C")]
    runs.append(spd("generate", "--dry-run", "café", "-m", folder, "--raw", LC_ALL="C"))
    for encoding in ("ascii", "latin-1"):
        how = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
        runs.append(spd("generate", "--help", **how))
        assert b"--verbose" in runs[-1].stdout
    for done in runs:
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
    assert json.loads((tmp_path / family / "config.json").read_text())["architectures"][0] in str(shown)
    assert "missing" not in ran.err and "unexpected" not in ran.err
