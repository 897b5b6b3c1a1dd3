"""The files in completions/ are what the program prints, and real shells can use them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spd.cli.app import COMMANDS
from spd.cli.completions import script

ROOT = Path(__file__).resolve().parents[1]
FILES = {"bash": "spd.bash", "zsh": "_spd", "fish": "spd.fish"}


@pytest.mark.parametrize("shell", FILES)
def test_the_files_are_current(shell: str) -> None:
    """To write them anew: `spd completions bash > completions/spd.bash`, and so on."""
    command = [sys.executable, "-m", "spd", "completions", shell]
    printed = subprocess.run(command, capture_output=True, cwd=ROOT, check=True).stdout
    assert printed == (ROOT / "completions" / FILES[shell]).read_bytes()


@pytest.mark.parametrize("shell", FILES)
def test_the_files_parse(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    check = [shell, "--no-execute" if shell == "fish" else "-n", str(ROOT / "completions" / FILES[shell])]
    subprocess.run(check, check=True)


def test_powershell_has_a_script_too() -> None:
    assert "Register-ArgumentCompleter -Native -CommandName spd" in script("powershell")


@pytest.fixture
def bash_complete(tmp_path: Path):
    """Asks a real bash what TAB offers after these words."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    binary = tmp_path / "bin" / "spd"
    binary.parent.mkdir()
    binary.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m spd \"$@\"\n")
    binary.chmod(0o755)
    for name in ("models--Qwen--Qwen3-0.6B", "models--gpt2"):
        (tmp_path / "hub" / name / "snapshots" / "abc").mkdir(parents=True)
    environment = os.environ | {
        "PATH": f"{binary.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
    }

    def complete(*words: str) -> list[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        code = (
            f"source '{ROOT}/completions/spd.bash'; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1};"
            "_spd_completion spd; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
        )
        assert done.stderr == ""
        return done.stdout.split()

    return complete


def test_bash_offers_what_fits(bash_complete) -> None:
    assert bash_complete("spd", "") == list(COMMANDS)
    assert bash_complete("spd", "generate", "--draft-") == [
        "--draft-model",
        "--draft-max",
        "--draft-ctx",
        "--draft-tp",
    ]
    assert bash_complete("spd", "generate", "--spec", "") == [
        "auto",
        "off",
        "mtp",
        "draft",
        "ngram",
        "eagle3",
    ]
    assert bash_complete("spd", "generate", "--spec", "=", "d") == ["draft"]


def test_bash_offers_models(bash_complete) -> None:
    assert bash_complete("spd", "generate", "-m", "") == ["Qwen/Qwen3-0.6B", "demo", "gpt2"]
    assert bash_complete("spd", "generate", "-m", "Qwen/Qwen3-0") == ["Qwen/Qwen3-0.6B"]
    assert bash_complete("spd", "inspect", "--draft", "de") == ["demo"]


def test_bash_leaves_files_to_the_shell(bash_complete) -> None:
    assert bash_complete("spd", "generate", "-f", "") == []


def test_the_installer_of_the_library_is_not_offered(bash_complete) -> None:
    assert bash_complete("spd", "--") == ["--version", "--help"]
