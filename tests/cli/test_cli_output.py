"""Streams: colour, encodings, control characters, strict JSON, full disks."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
import time
from pathlib import Path

import pytest

from spd.cli.text.output import Console, Sink, check_writable, printable, to_json, wants_color, write_error
from spd.errors import ResourceError, UsageError
from tests.cli.conftest import failing


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
        assert wants_color(Terminal(), environ) is on_terminal
        assert wants_color(io.StringIO(), environ) is wants_color(None, environ) is off_terminal


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
    check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for bad in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(UsageError, match="cannot write"):
            check_writable(bad)
    (tmp_path / "old").write_text("x")
    monkeypatch.setattr("spd.cli.text.output._write_all", failing(OSError(errno.ENOSPC, "No space left")))
    for name in ("new", "old"):
        with pytest.raises(ResourceError, match=f"cannot write to .*{name}: No space left"):
            Sink(tmp_path / name).write("x")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_an_error_that_knows_no_fix_gets_the_help_of_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    write_error(UsageError("x"), Console(help="/help"), as_json=False)
    assert capfd.readouterr() == ("", "error: x\n  fix: /help\n")
