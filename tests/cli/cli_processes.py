"""Runs of the command line in processes and on pseudo-terminals."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cli.conftest import ROOT, command_words, make_program

STYLE = re.compile(r"\x1b\[([0-9;]*)m")
PLAIN = {"NO_COLOR": "1"}


def run_on_terminal(
    *argv: object, columns: int = 80, code: str = "", **environment_changes: str
) -> tuple[int, str]:
    """Run a command on a pseudo-terminal; return its exit status and output."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(controller, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "SPD_MODEL")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    environment = {
        **inherited,
        "TERM": "xterm-256color",
        "PYTHONUTF8": "1",
        "HF_HUB_OFFLINE": "1",
        **environment_changes,
    }
    words = [str(word) for word in command_words(argv)]
    command = [sys.executable, *(("-c", code) if code else ("-m", "spd")), *words]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    seen = b""
    with suppress(OSError):  # the other side is closed
        while True:
            seen += os.read(controller, 65536)
    os.close(controller)
    return process.wait(), seen.decode().replace("\r\n", "\n")


def plain_text(text: str) -> str:
    """Return text without styles and without overwritten parts of lines."""
    return "\n".join(line.rpartition("\r")[2] for line in STYLE.sub("", text).split("\n"))


class TerminalStream(io.StringIO):
    """A stream that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def slow_program(
    model: Path,
    *argv: str | Sequence[str],
    hang_at: str = "step",
    extra_setup: str = "",
    **how: Any,
) -> list[str]:
    """Return a command that runs spd with an engine that loads or decodes slowly.

    The process prints a line if the interpreter ends while an engine thread runs: a real one would abort.
    """
    pieces = how.get("pieces", 40)
    pause = how.get("pause", 0.05)
    spd_argv = [
        "spd",
        *how.get("command", ("generate", "Hi")),
        "-m",
        str(model),
        *command_words(argv),
    ]
    setup = f"""
import atexit, threading
def hang(word):
    print(word, file=sys.stderr, flush=True)
    time.sleep(60)
def slow(step):
    time.sleep({pause})
    if {hang_at!r} == "prefill" and step == 0 or {hang_at!r} == "hang" and step == 2:
        print("hanging", file=sys.stderr, flush=True)
        while True: time.sleep(0.01)
def load(progress): {hang_at!r} == "load" and hang("loading")
{extra_setup}
atexit.register(lambda: threading.active_count() > 1 and print("torn down", file=sys.stderr))
sys.argv = {spd_argv!r}
"""
    script = f'pieces=["word "] * {pieces}, on_step=slow, on_load=load'
    return [sys.executable, "-c", make_program(script, setup=setup)]


def start(
    command: Sequence[str | Path],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.PIPE,
    start_new_session: bool = False,
    preexec_fn: Callable[[], object] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process with standard error in a pipe."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        start_new_session=start_new_session,
        preexec_fn=preexec_fn,
    )


def expect_stderr_line(process: subprocess.Popen[bytes], line: str) -> None:
    """Read one line of standard error and compare it."""
    assert process.stderr.readline().decode() == line


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, str]:
    """Wait for the end; return exit status, stdout and stderr."""
    out, err = process.communicate(timeout=100)  # a bound against hangs, not a measurement
    return process.returncode, out, (err or b"").decode()


def run_redirected(command: list[str], redirect: str, tmp_path: Path) -> tuple[int, bytes, str]:
    """Run a command with its streams as a shell redirects them."""
    (tmp_path / "run.py").write_text(command[2])
    return finish(
        start(["bash", "-c", f"exec '{sys.executable}' '{tmp_path / 'run.py'}' {redirect}"])
    )
