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

from spd.cli.commands import COMMAND_TABLE, COMMANDS, build_app
from tests.json_schema import faults
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
    for line in COMMAND_TABLE[name][2:]:
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


UNRUN = {
    "bench": "takes minutes, and has tests of its own",
    "verify": "takes minutes, and has tests of its own",
    "convert-mtp": "its sources have hundreds of gigabytes",
    "pull": "needs the hub",
    "rm": "needs the hub",
    "compare": "needs results of spd bench",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in UNRUN])
def test_the_examples_of_help_run(name: str, tmp_path: Path) -> None:
    """In a folder with the files that they name; models of the hub are stood for by tiny ones."""
    binary = tmp_path / "bin" / "spd"
    binary.parent.mkdir()
    binary.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m spd \"$@\"\n")
    binary.chmod(0o755)
    tiny = write_dense(tmp_path / "tiny", "mistral", layers=1)
    for file in ("notes.md", "long.txt", "messages.txt"):
        (tmp_path / file).write_text("What is a list?\n")
    for place in (".zfunc", ".config/fish/completions"):
        (tmp_path / place).mkdir(parents=True)
    kept = {"PATH": f"{binary.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for number, line in enumerate(COMMAND_TABLE[name][2:]):
        for hub_name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"):
            line = line.replace(hub_name, str(tiny))
        if name == "chat" and "<" not in line:
            line += " < messages.txt"
        if "explain plain.jsonl" in line:
            line = line.replace("plain.jsonl draft.jsonl", "run.jsonl run.jsonl")
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line.replace("| jq .", "| cat #")],
            capture_output=True,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            env=kept,
        )
        assert done.returncode == 0, (number, line, done.stderr)


@pytest.mark.parametrize("more", [["-n", 1], ["-n", 40], ["--no-adaptive", "--draft-max", 2]])
def test_counts_agree_with_each_other(spd_run: Callable, more: list[object]) -> None:
    """A round brings one token and its accepted drafts; the last may be cut by an end or a limit."""
    quick = ("--threads", 1, "--ctx", 256, "--temperature", 0, "--json")
    shown = spd_run("generate", *quick, *more, "What does os.path.join do?").json
    assert faults(shown, "generate") == [] and faults(shown | {"seed": "7"}, "generate") != []
    timings, told = shown["timings"], shown["metrics"]["speculative_decoding"]
    assert timings["predicted_n"] == shown["usage"]["completion_tokens"] == len(shown["token_ids"])
    rounds = sum(told["acceptance_histogram"])
    assert rounds <= timings["predicted_n"] - timings["draft_n_accepted"] + 1 <= rounds + 1
    assert timings["draft_n_accepted"] <= min(timings["draft_n"], timings["draft_n_accepted_raw"])
    accepted = sum(i * n for i, n in enumerate(told["acceptance_histogram"]))
    assert accepted == timings["draft_n_accepted_raw"]


@pytest.mark.parametrize("words", [["inspect"], ["generate", "--dry-run", "café"]])
def test_a_locale_without_more_than_ascii(folder: Path, words: list[str]) -> None:
    """Marks and prompts that the locale has no letters for: no traceback, and the words arrive."""
    model = [folder] if words == ["inspect"] else ["-m", folder, "--raw"]
    done = spd(*words, *model, LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr and done.stdout


@pytest.mark.parametrize("columns", ["40", "80"])
def test_help_in_a_locale_without_more_than_ascii(columns: str) -> None:
    """It is printed with signs that it has."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = spd("bench", "--help", COLUMNS=columns, **ascii_only)
    assert done.returncode == 0 and done.stdout.isascii(), done.stderr
    assert b"--verbose" in done.stdout and b"Traceback" not in done.stderr


@pytest.mark.parametrize("more", [{}, {"PYTHONUTF8": "0"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_arguments_are_utf_8_whatever_the_locale(folder: Path, more: dict[str, str]) -> None:
    """Letters that the locale lacks arrive in every text; paths are left as the system gave them."""
    beside = folder.parent / "größe.txt"
    beside.write_text("Σ\n")
    asked = ["--raw", "--dry-run", "-m", folder, "-f", beside, "naïve café"]
    done = spd("generate", *asked, "--json", LC_ALL="C", **more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"].split() == ["Σ", "naïve", "café"]
    refused = spd("generate", "--raw", "--dry-run", "-m", folder, b"caf\xe9", LC_ALL="C", **more)
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
    keys = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    ran = spd_run("inspect", write_dense(tmp_path / "vision", "gemma3", config=keys))
    assert ran.code == 4 and ran.out == b""
    assert "images are not supported" in ran.err and "Gemma3ForCausalLM" in ran.err
    assert "Traceback" not in ran.err
