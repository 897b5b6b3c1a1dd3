"""The files in completions/ are the program's output, and real shells can use them."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spd.cli.commands import COMMANDS
from spd.cli.options import spec_names

ROOT = Path(__file__).resolve().parents[1]
FILES = {"bash": "spd.bash", "zsh": "_spd", "fish": "spd.fish"}
OFFERED: dict[str, list[str]] = {
    "": list(COMMANDS),
    "--": ["--version", "--help"],  # and not the library's installer
    "generate --draft-": ["--draft-model", "--draft-max", "--draft-tp"],
    "generate --spec ": spec_names(""),
    "generate --spec = d": ["draft", "draft+ngram"],
    "generate -m ": ["Qwen/Qwen3-0.6B", "demo", "demo-hybrid", "gpt2", "tiny:1b", "my.gguf"],
    "generate -m Qwen/Qwen3-0": ["Qwen/Qwen3-0.6B"],
    "inspect --draft de": ["demo", "demo-hybrid"],
    "generate -m m": ["models/", "my.gguf"],
    "generate -m models/": ["models/large.GGUF", "models/sub/"],
    "generate -m models/l": ["models/large.GGUF"],
    "generate -m ./my": ["./my.gguf"],
    "inspect nothing/": [],
    "generate -f ": [],  # which the shell completes
}


@pytest.mark.parametrize("shell", FILES)
def test_the_files_are_current(shell: str) -> None:
    """To write them anew: `spd completions bash > completions/spd.bash`, and so on."""
    command = [sys.executable, "-m", "spd", "completions", shell]
    printed = subprocess.run(command, capture_output=True, cwd=ROOT, check=True).stdout
    assert printed == (ROOT / "completions" / FILES[shell]).read_bytes()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with this `spd`, cached models, one of Ollama, and GGUF files."""
    binary = tmp_path / "bin" / "spd"
    binary.parent.mkdir()
    binary.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m spd \"$@\"\n")
    binary.chmod(0o755)
    for name in ("models--Qwen--Qwen3-0.6B", "models--gpt2"):
        (tmp_path / "hub" / name / "snapshots" / "abc").mkdir(parents=True)
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "1b"
    for file in (manifest, tmp_path / "my.gguf", tmp_path / "models" / "large.GGUF"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "models" / "sub").mkdir()
    (tmp_path / "models" / ".hidden.gguf").touch()
    private_folders = {
        "OLLAMA_MODELS": str(tmp_path / "ollama"),
        "PATH": f"{binary.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
    }
    return {
        **os.environ,
        **private_folders,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HOME": str(tmp_path),
    }


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def printed(shell: str, code: str, environment: dict[str, str]) -> list[str]:
    command = [shell, "-c", f"source '{ROOT}/completions/{FILES[shell]}'; {code}"]
    home = environment["HOME"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=home, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("line", OFFERED)
def test_bash_offers_what_fits(environment: dict[str, str], line: str) -> None:
    words = ["spd", *line.split(" ")]
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _spd_completion spd; printf '%s\\n' "
    )
    assert (
        "\n".join(printed("bash", code + '"${COMPREPLY[@]}"', environment)).split() == OFFERED[line]
    )


@needs("fish")
def test_fish_offers_what_fits(environment: dict[str, str]) -> None:
    for line, expected in {
        "spd ": sorted(COMMANDS),
        "spd generate -m Qwen/Qwen3-0": ["Qwen/Qwen3-0.6B"],
        "spd generate --draft-": ["--draft-max", "--draft-model", "--draft-tp"],
    }.items():
        assert [
            s.split("\t")[0] for s in printed("fish", f"complete -C '{line}'", environment)
        ] == expected


@needs("zsh")
def test_zsh_offers_what_fits(environment: dict[str, str], tmp_path: Path) -> None:
    """As a person types: a terminal, TAB, and the screen after it."""
    start = "$fpath); autoload -Uz compinit && compinit -u; PS1='READY> '\n"
    (tmp_path / ".zshrc").write_text(f"fpath=('{ROOT}/completions' {start}")
    pid, terminal = pty.fork()
    if not pid:
        os.execvpe("zsh", ["zsh", "-i"], environment | {"ZDOTDIR": str(tmp_path)})
    try:

        def read_screen(keys: str, end_mark: str) -> str:
            os.write(terminal, keys.encode())
            text = ""
            while end_mark not in text and select.select([terminal], [], [], 60)[0]:
                text += os.read(terminal, 4096).decode()
            return text

        assert "READY" in read_screen("", "READY> ")
        offered = read_screen("spd \t", "verify")
        assert all(command in offered for command in COMMANDS) and "checkpoint's" in offered
        assert "Qwen/Qwen3-0.6B" in read_screen("\x15spd inspect Qwen/Q\t", "0.6B")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
