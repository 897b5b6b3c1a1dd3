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
from tests.recipes.tiny_dense import FAMILIES, write_dense

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("model") / "org.name-1", "mistral", layers=1)


def spd(*argv: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The program in a process of its own, its output no terminal."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "spd", *(word if isinstance(word, bytes) else str(word) for word in argv)],
        capture_output=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        env={**kept, **environment},
    )


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


@pytest.mark.parametrize("words", [["inspect"], ["generate", "--dry-run", "café"]])
def test_a_locale_without_more_than_ascii(folder: Path, words: list[str]) -> None:
    """Marks and prompts that the locale has no letters for: no traceback, and the words arrive."""
    model = [folder] if words == ["inspect"] else ["-m", folder, "--raw"]
    done = spd(*words, *model, LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr and done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_help_in_a_locale_with_fewer_letters(encoding: str) -> None:
    done = spd("generate", "--help", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and b"--verbose" in done.stdout and b"Traceback" not in done.stderr


def test_arguments_are_utf_8_where_the_locale_says_nothing(folder: Path) -> None:
    beside = folder.parent / "größe.txt"
    beside.write_text("Σ\n")
    asked = ["--raw", "--dry-run", "-m", folder, "-f", beside, "naïve café"]
    done = spd("generate", *asked, "--json", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"].split() == ["Σ", "naïve", "café"]
    refused = spd("generate", "--raw", "--dry-run", "-m", folder, b"caf\xe9", LC_ALL="C")
    assert refused.returncode == 2 and b"not Unicode text" in refused.stderr


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_answers_inspect(spd_run: Callable, tmp_path: Path, family: str) -> None:
    """Its tensors are all found under the names that the family's code wants, and none is left over."""
    ran = spd_run("inspect", write_dense(tmp_path / family, family), "--json")
    assert ran.code == 0, ran
    shown = ran.json
    assert json.loads((tmp_path / family / "config.json").read_text())["architectures"][0] in str(shown)
    assert "missing" not in ran.err and "unexpected" not in ran.err


def test_images_are_refused_by_name(spd_run: Callable, tmp_path: Path) -> None:
    keys = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "vision_config": {"depth": 2}}
    ran = spd_run("inspect", write_dense(tmp_path / "vision", "gemma3", config=keys))
    assert ran.code == 4 and ran.out == b""
    assert "missing: images and sound" in ran.err and "nearest supported: Gemma3ForCausalLM" in ran.err
    assert "Traceback" not in ran.err
