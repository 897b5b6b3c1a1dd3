"""Streams: a terminal of 40, 80 and 200 columns, colour, control characters, strict JSON, full disks."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from spd.cli.text import output
from spd.cli.text.output import Console, Sink, cells, fit_lines, printable, to_json
from spd.errors import IncompatibleError, ResourceError, UsageError
from tests.cli.conftest import ROOT, failing, program
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


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colour_order() -> None:
    for environ, on_terminal, off_terminal in (
        *(({}, True, False), ({"TERM": "dumb"}, False, False), ({"NO_COLOR": "1"}, False, False)),
        *(({"NO_COLOR": ""}, True, False), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False)),
        *(({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True), ({"CLICOLOR_FORCE": "0"}, True, False)),
        ({"CLICOLOR_FORCE": "1"}, True, True),
    ):
        assert output.wants_color(Terminal(), environ) is on_terminal
        assert output.wants_color(io.StringIO(), environ) is output.wants_color(None, environ) is off_terminal


def test_control_characters_are_spelled_out_and_json_is_strict() -> None:
    assert printable("a\x1b[31mb\x00\x9bc\td\r\ne\rf\udcffé") == "a\\x1b[31mb\\x00\\x9bc\td\r\ne\\rf\\udcffé"
    shown = to_json({"a": float("-inf"), "b": (1.5, float("nan")), 3: Path("x"), "é": "a\nb", "t": True})
    assert json.loads(shown) == {"a": None, "b": [1.5, None], "3": "x", "é": "a\nb", "t": True}
    assert "\n" not in shown and "é" in shown


def test_a_slow_non_blocking_reader_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text, got = "x" * 300_000, []

    def read() -> None:
        time.sleep(0.2)  # the pipe is full by then
        while data := os.read(reader, 4096):
            got.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    Sink(writer).write(text)
    os.close(writer)
    thread.join(10)
    assert sum(map(len, got)) == len(text)
    os.close(reader)


def test_what_cannot_be_written(tmp_path, monkeypatch) -> None:
    """It is said early; a file that a full disk left empty is removed."""
    output.check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for bad in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(UsageError, match="cannot write"):
            output.check_writable(bad)
    (tmp_path / "old").write_text("x")
    monkeypatch.setattr("spd.cli.text.output._write_all", failing(OSError(errno.ENOSPC, "No space left")))
    for name in ("new", "old"):
        with pytest.raises(ResourceError, match=f"cannot write to .*{name}: No space left"):
            Sink(tmp_path / name).write("x")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_the_lines_of_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    """None of them is broken by what it says; one that knows no fix gets the help of its place."""
    error = IncompatibleError("no\x1b[2J way\nsecond", reason=["because\nof two"], fix=["do\nthis", "that"])
    output.write_error(error, Console(), as_json=False)
    shown = "error: no\\x1b[2J way\\nsecond\n  because\\nof two\n  fix: do\\nthis\n       that\n"
    assert capfd.readouterr() == ("", shown)
    output.write_error(UsageError("x"), Console(help="/help"), as_json=False)
    assert capfd.readouterr() == ("", "error: x\n  fix: /help\n")
