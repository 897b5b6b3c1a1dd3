"""`spd chat` on a pseudo-terminal with real keys and a fake engine."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, edit_json, make_program, read_saved_chat
from tests.server.conftest import TEMPLATE

PIECES = ("Hello", " wörld", "!")
TIMEOUT_SECONDS = 60.0
"""Seconds without output after which a terminal counts as hung; no measurement."""
COLOURS = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7])(?:;[0-9;]*)?m")


class Terminal:
    """A `spd chat` behind a pseudo-terminal; `seen` holds all its output."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.descriptor, self._other = pty.openpty()
        self.size(24, 80)
        self.before = self.settings()
        self.process = subprocess.Popen(
            command,
            stdin=self._other,
            stdout=self._other,
            stderr=self._other,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            cwd=ROOT,
            env=environment,
        )
        self.seen = b""
        self.cursor_row = 1
        """The row in which the cursor is said to stand."""
        self._mark = 0

    def size(self, rows: int, columns: int) -> None:
        """Resize the terminal; the kernel signals the program."""
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def play(self, *steps: str) -> bytes:
        """Press the keys after a `<`; for other steps read until their text.

        Return the last output.
        """
        start = self._mark
        for step in steps:
            if step[0] == "<":
                os.write(self.descriptor, step[1:].encode())
                continue
            start = self._mark
            end = time.monotonic() + TIMEOUT_SECONDS
            while (at := self.seen.find(step.encode(), start)) < 0:
                assert self._read(end), f"no {step!r} in {self.seen[start:]!r}"
            self._mark = at + len(step.encode())
        return self.seen[start : self._mark]

    def end(self) -> int:
        """Read to the end and return the exit status."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end, f"still runs after {self.seen[self._mark :]!r}"
            self._read(time.monotonic() + 0.2)
        while self._read(time.monotonic() + 0.1):
            pass
        return self.process.returncode

    def leave(self) -> None:
        """Press Ctrl-D at the prompt, and see the chat end well."""
        self.play("›", "<\x04")
        assert self.end() == 0

    def settings(self) -> list[Any]:
        """Return the terminal's current attributes."""
        return termios.tcgetattr(self._other)

    def close(self) -> None:
        """Kill the process and close the terminal."""
        self.process.kill()
        self.process.wait()
        os.close(self._other)
        os.close(self.descriptor)

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self.descriptor], [], [], max(0.0, end - time.monotonic()))
        if ready:
            data = os.read(self.descriptor, 65536)
            self.seen += data
            position = f"\x1b[{self.cursor_row};1R"
            os.write(self.descriptor, position.encode() * data.count(b"\x1b[6n"))
        return bool(ready)


@pytest.fixture
def terminal(model: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Return a function that starts a chat: `terminal("--no-stats", pieces=[...])`.

    broken: its engine fails after these seconds; slow: seconds that every second load takes.
    """
    opened: list[Terminal] = []
    edit_json(model / "config.json", max_position_embeddings=90000)

    def start(
        *argv: str,
        pieces: Any = PIECES,
        pause: float = 0,
        broken: float = 0,
        slow: float = 0,
        **environment_changes: str,
    ) -> Terminal:
        setup = f"""
from spd.runtime import LoadProgress
loads = []

def load(progress):
    loads.append(progress)
    ends = time.monotonic() + {slow} * (len(loads) % 2 == 0)
    while time.monotonic() < ends:
        progress(LoadProgress("read", 1, 100))
        time.sleep(0.05)
    time.sleep({broken})
    if {broken}:
        raise spd.errors.ResourceError("no room for it", fix=["less"])
"""
        script = (
            f"pieces={pieces!r}, on_load=load, on_step=lambda step: time.sleep({pause}), ctx=90000"
        )
        inherited = {
            name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ
        }
        environment = inherited | {"PYTHONUTF8": "1", "TERM": "xterm-256color"}
        environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), **environment_changes}
        command = [
            sys.executable,
            "-c",
            make_program(script, setup=setup),
            "chat",
            str(model),
            *argv,
        ]
        opened.append(Terminal(command, environment))
        opened[-1].play("›")
        return opened[-1]

    yield start
    for opened_terminal in opened:
        opened_terminal.close()


def turns(tmp_path: Path) -> list[dict[str, Any]]:
    """Return the turns of the only saved chat."""
    return read_saved_chat(tmp_path)[1:]


def test_a_chat_on_a_terminal_renders_edits_and_interrupts(terminal, tmp_path) -> None:
    """Cover Markdown, the toolbar, TAB, Esc, Ctrl-C, keys typed during a reply, and the end."""
    chat = terminal(pieces=["Some **bo", "ld** te", "xt\x1b[31m", *["word "] * 400], pause=0.02)
    chat.play("ctx 0/90,000", "<Hi\r", "\x1b[1mbold\x1b[0m")
    assert b"text\\x1b[31m" in chat.play("word word")
    for keys in ("type", "\x1b[D", "\x1b[200~pa\x1b", "sted\x1b[201~"):
        chat.play(f"<{keys}")
        time.sleep(0.2)
    assert b"[interrupted]" not in chat.seen
    chat.play(
        "<\x1b",
        "[interrupted]",
        "typpa",
        "stede",
        "<\x05\r",
        "word word",
        "<\x03",
        "[interrupted]",
        "›",
    )
    chat.play("</un\t", "do", "<\r", "took back: typpa", "›", "<text\x03/exit\r")
    assert chat.end() == 0 and chat.settings() == chat.before
    (turn,) = turns(tmp_path)
    assert turn["finish"] == "abort" and turn["reply"].startswith(
        "Some **bold** text\x1b[31mword word"
    )


def test_a_long_paste_is_folded_until_it_is_sent(terminal, tmp_path) -> None:
    """A refused paste comes back folded below its error; an unmarked paste is one message."""
    long = tmp_path / "long.txt"
    long.write_text("x" * 60_000)
    chat = terminal("-f", str(long))
    chat.play("ctx 0/90,000")
    data = "\x1b[200~" + "\n".join(f"line {number}" for number in range(5000)) + "\x1b[201~"
    for at in range(
        0, len(data), 1000
    ):  # as a terminal sends it: no more than the line buffer holds
        chat.play(f"<{data[at : at + 1000]}")
        time.sleep(0.005)
    error_text = b" ".join(
        chat.play("[paste 1: 5,000 lines]", "< see above\r", "/file none").split()
    )
    assert b"the context is 90,000" in error_text
    assert b"line 17" not in chat.play("[paste 1: 5,000 lines] see above")
    chat.play("<\x03/file none\r", "no file", "›")
    time.sleep(0.5)  # else it could come before the prompt, as keys typed ahead do
    chat.play("<unmarked\rpaste\rof lines\x0aand Ctrl-J\r", "wörld!")
    chat.leave()
    assert [turn["user"] for turn in turns(tmp_path)] == ["unmarked\npaste\nof lines\nand Ctrl-J"]
    history = (tmp_path / "state" / "spd" / "history").read_text()
    assert "+line 4999 see above" in history and "[paste" not in history


def test_all_commands_are_completed_in_the_last_rows_and_tabs_are_blanks(
    terminal, tmp_path
) -> None:
    chat = terminal()
    chat.cursor_row = 23
    chat.play("<Hi\r", "wörld!", "›", "</\t")
    for name in ("clear", "exit", "model", "set", "stats", "undo"):
        chat.play(f"/{name}")
    chat.play("<\x03\x1b[200~one\tline\x1b[201~", "one", "line", "<\r", "wörld!")
    chat.leave()
    assert b"^I" not in chat.seen and turns(tmp_path)[1]["user"] == "one\tline"


def test_messages_fit_a_narrow_terminal(terminal) -> None:
    """Figures are wrapped between words; drafts are underlined without colour."""
    chat = terminal("--no-save", "--show-drafts", NO_COLOR="1")
    chat.size(24, 40)
    assert b"\x1b[4mH\x1b[0mello" in chat.play("<Hi\r", "first ")
    rows = chat.play(" ctx ").split(b"\r\n") + chat.play("›").split(b"\r\n")
    plain = [re.sub(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|[78])", b"", row).decode() for row in rows]
    figures = [row for row in plain if "tok" in row or "drafts" in row or "/90" in row]
    assert len(figures) >= 2 and all(len(row) < 40 for row in figures), plain
    assert chat.play("</set temperature=-1\r", "error: ", "fix: ").count(b"\n") <= 4
    chat.play("›", "<\x03\x03")
    assert chat.end() == -signal.SIGINT and not COLOURS.search(chat.seen)


def test_killed_while_replying_the_message_is_there_again(terminal, tmp_path) -> None:
    """It is the draft after the earlier turn, whose accepted drafts were coloured."""
    chat = terminal("-c", "a", "--show-drafts")
    assert b"\x1b[32mH\x1b[0mello" in chat.play("<Hi\r", "drafts ")
    chat.leave()
    chat = terminal("-c", pieces=["word "] * 400, pause=0.02)
    chat.play("Hello wörld!", "/90,000", "<precious words\r", "word word")
    chat.process.kill()
    chat.process.wait()
    assert [turn["reply"] for turn in turns(tmp_path)] == ["Hello wörld!", None]
    chat = terminal("-c")
    chat.play("precious words", "<\r", "wörld!")
    chat.leave()
    assert [turn["reply"] for turn in turns(tmp_path)] == ["Hello wörld!"] * 2


def test_a_dumb_terminal_gets_plain_lines(terminal) -> None:
    chat = terminal("--show-drafts", pieces=["**a**"], TERM="dumb")
    assert b"--show-drafts marks tokens on a terminal only" in b" ".join(chat.seen.split())
    chat.play("<Hi\n", "**a**")
    chat.leave()
    assert b"\x1b" not in chat.seen


def test_lines_typed_while_it_replies_are_read_one_by_one(terminal, tmp_path) -> None:
    """Commands run, messages are sent, a backslash joins two lines, and an unfinished one waits."""
    chat = terminal("--no-stats", pieces=["word "] * 30, pause=0.02)
    chat.play("ctx 0/90,000", "<First\r", "word word")
    chat.play("</set top_k=7\rSecond\rtwo\\\rlines\r/undo\rnot sent")
    chat.play("top k ", "7 (given)", "took back: two lines", "not sent")
    chat.play("<\x15")
    chat.leave()
    assert [turn["user"] for turn in turns(tmp_path)] == ["First", "Second"]


def test_lines_typed_while_it_loads_are_read_one_by_one(terminal, tmp_path) -> None:
    chat = terminal("--no-stats", slow=2.0)
    chat.play("ctx 0/90,000", "</spec ngram 4\r", "loading ")
    chat.play("</set top_k=7\r", "</set top_k=8\r", "<Hi\r")
    chat.play("7 (given)", "8 (given)", "wörld!")
    chat.leave()
    assert [turn["user"] for turn in turns(tmp_path)] == ["Hi"]


def test_a_refused_message_comes_back_with_lines_typed_after_it(terminal, tmp_path) -> None:
    """Commands that were typed after it run first."""
    long = tmp_path / "long.txt"
    long.write_text("x" * 90_000)
    chat = terminal("--no-stats", "-f", str(long), slow=2.0)
    chat.play("ctx 0/90,000", "</spec ngram 4\r", "loading ")
    chat.play("<Question\rMore of it\r/file none\r")
    chat.play("the context is 90,000", "/file none", "no file goes with", "More of it")
    assert b"/undo" not in chat.seen and turns(tmp_path) == []
    chat.play("<!\r", "wörld!")
    chat.leave()
    assert [turn["user"] for turn in turns(tmp_path)] == ["Question\nMore of it!"]


@pytest.mark.parametrize("key", ["\x03", "\x1b"])
def test_loading_another_model_can_be_given_up(terminal, model, key) -> None:
    """The chat continues with the old model."""
    chat = terminal("--no-save", "--no-stats", slow=30.0)
    chat.play("ctx 0/90,000", f"</model {shutil.copytree(model, model.parent / 'other')}\r")
    chat.play("loading ", f"<{key}", "[interrupted] the chat goes on with", str(model))
    chat.play("›", "<Hi\r", "wörld!")
    chat.leave()


def test_the_second_interrupt_is_announced(terminal) -> None:
    chat = terminal("--no-save")
    chat.play("ctx 0/90,000", "<\x03", "again, Ctrl-D", "<\x03")
    assert chat.end() == -signal.SIGINT


@pytest.mark.slow
def test_hidden_thinking_is_one_line(terminal) -> None:
    chat = terminal("--think", "hide", "--no-stats", pieces=["<thi", "nk>hm", "m</think>", "Yes"])
    reply = chat.play("<Hi\r", "Yes")
    assert b"hmm" not in reply and "thinking…".encode() in reply
    chat.play(
        "›", "</think on\r", "\x1b[?2004l", "›"
    )  # sent: together with what follows it would be a paste
    assert b"\x1b[2mm\x1b[0m" in chat.play("<Again\r", "Yes")


@pytest.mark.parametrize("early", [False, True])
def test_loading_that_fails_ends_the_chat(terminal, tmp_path, early) -> None:
    """A message sent meanwhile is not lost: -c begins with it."""
    chat = terminal(broken=1.0 if early else 0.5)
    if early:
        chat.play("<precious words\r")
    assert chat.end() == 5 and chat.seen.count(b"error:") == chat.seen.count(b"no room for it") == 1
    assert chat.settings() == chat.before
    if early:
        assert [(turn["user"], turn["reply"]) for turn in turns(tmp_path)] == [
            ("precious words", None)
        ]


def test_tools_run_after_a_yes_only(terminal, model, tmp_path) -> None:
    """Ctrl-C and other words are no consent; results go to the next turn."""
    edit_json(model / "tokenizer_config.json", chat_template=TEMPLATE)
    properties = {"type": "object", "properties": {"name": {"type": "string"}}}
    command = ["bash", "-c", 'echo ran; touch "$0"', "{name}"]
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"name": "make", "parameters": properties, "command": command}]))
    created_path = Path(f"{tmp_path}/made\x1b[2J\u202e")
    function_call = {"name": "make", "arguments": {"name": str(created_path)}}
    chat = terminal(
        "--tools", str(file), pieces=["So.", f"<tool_call>{json.dumps(function_call)}</tool_call>"]
    )
    for answer in ("\r", "no\r", "\x03"):
        assert b"made\\x1b[2J\\u202e" in chat.play("<Hi\r", "run it? [y/N]")
        chat.play(f"<{answer}", "did not allow this call", "›")
        assert not created_path.exists()
    chat.play("<Hi\r", "run it? [y/N]", "<y\r", "ran", "run it? [y/N]")
    assert created_path.exists()
    chat.play("<\r")
    chat.leave()
    *_, last, next_turn = turns(tmp_path)
    message, result = map(json.loads, last["answered"])
    assert message["tool_calls"][0]["function"] == function_call and result["content"] == "ran\n"
    assert next_turn["user"] == "" and json.loads(next_turn["answered"][1])["content"].startswith(
        "the user did not"
    )


def test_a_history_that_cannot_be_kept_is_said(terminal, tmp_path) -> None:
    (tmp_path / "state" / "spd" / "history").mkdir(parents=True)
    chat = terminal("--no-save")
    assert b"what you type is not kept for the next chat" in b" ".join(chat.seen.split())
    chat.play("<Hi\r", "wörld!")
    chat.leave()
    assert b"Exception" not in chat.seen
