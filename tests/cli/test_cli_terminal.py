"""One command on a pseudo-terminal of 40, 80 and 200 columns, and what colour variables change of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from spd.cli.text.output import cells, fit_lines
from tests.cli.conftest import ROOT, program
from tests.recipes.tiny_dense import write_dense

STYLE = re.compile(r"\x1b\[([0-9;]*)m")
PIECES = ["A reply of words that goes on beyond", " the edge of a narrow terminal without a break."]


def on_terminal(*argv: object, columns: int = 80, code: str = "", **more: str) -> tuple[int, str]:
    """Exit status and everything that a command wrote to a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "SPD_MODEL")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    environment = {**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1", **more}
    command = [sys.executable, *(("-c", code) if code else ("-m", "spd")), *map(str, argv)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the other side is closed
        while True:
            seen += os.read(ours, 65536)
    os.close(ours)
    return process.wait(), seen.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    """Text without styles, and without what a line held before it was written over."""
    return "\n".join(line.rpartition("\r")[2] for line in STYLE.sub("", text).split("\n"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("model") / "m", "mistral", layers=1)


PLAIN_ERROR = """\
error: nothing to generate from
  No PROMPT argument and stdin is a terminal.
  fix: spd generate "your prompt"
       echo "your prompt" | spd generate
"""
STYLED = {"error:": "\x1b[1;31merror:\x1b[0m", "fix:": "\x1b[32mfix:\x1b[0m"}
PLAIN = {"NO_COLOR": "1"}


def test_an_error() -> None:
    styled, narrow = PLAIN_ERROR, PLAIN_ERROR.replace("is a terminal", "is a\n    terminal")
    for word, shown in STYLED.items():
        styled = styled.replace(word, shown)
    for columns, environment, said in ((80, {}, styled), (80, PLAIN, PLAIN_ERROR), (40, PLAIN, narrow)):
        assert on_terminal("generate", "--temp", "1", columns=columns, **environment) == (2, said)


def test_reports_break_between_words(folder: Path) -> None:
    """The same words at every width, no row wider than the terminal but a single word or what is pasted."""
    drop = re.compile(r"\d+(?:\.\d+)?")  # free memory changes from run to run
    text = plain(on_terminal("inspect", folder, columns=40)[1])
    wide = plain(on_terminal("inspect", folder, columns=900)[1])
    assert drop.sub("", text).split() == drop.sub("", wide).split()
    for row in text.split("\n"):
        assert cells(row) <= 40 or len(row.split()) == 1, row


def test_a_streamed_reply_is_left_to_the_terminal_and_its_figures_are_not(model: Path) -> None:
    argv = ["generate", "-m", model, "--stats", "Hi"]
    status, text = on_terminal(*argv, columns=40, code=program(f"pieces={PIECES!r}"), NO_COLOR="1")
    reply, *figures = plain(text).rstrip("\n").split("\n")
    assert (status, reply) == (0, "".join(PIECES))
    assert " ".join(" ".join(figures).split()).startswith("4 tok · ")
    assert len(figures) > 1 and max(map(len, figures)) < 40


def test_lines_are_broken_between_words() -> None:
    fact = "target    demo · DeepseekV3ForCausalLM · 10.69 M params"
    assert fit_lines(fact, 40) == "target    demo · DeepseekV3ForCausalLM\n          · 10.69 M params"
    assert fit_lines(fact, 56) == fact and fit_lines(fact, None) == fact
    path = "/a/path/" + "x" * 60
    assert fit_lines(f"in {path} is nothing", 40) == f"in\n  {path}\n  is nothing"
    command = "  fix: spd generate --draft-model org/name-of-a-model --temperature 0"
    assert fit_lines(command, 40) == command
    told = "  /regen     reply to the last message once more"  # a line of /help is not to be pasted
    assert fit_lines(told, 40) == f"{told[:38]}\n{' ' * 13}once more"
