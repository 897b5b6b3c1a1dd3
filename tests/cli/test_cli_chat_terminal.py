"""`spd chat` on a terminal: a real pseudo-terminal, real keys, an engine that says a script."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.cli.chat.editor import rows_of
from spd.cli.chat.loop import Chat

Start = Callable[..., "Terminal"]

ROOT = Path(__file__).resolve().parents[2]
BOUND = 60.0
"""Seconds after which a terminal that says nothing counts as hung; no measurement."""
COLOURS = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7])(?:;[0-9;]*)?m")
PROGRAM = """
import sys, threading, time
begun = threading.Event()
sys.path.insert(0, {root!r})
import spd.errors, spd.runtime
from tests.cli.conftest import FakeEngine, Script
def build(config, progress=None):
    time.sleep({loading})
    threading.Timer(0.5, begun.set).start()
    if {broken}:
        raise spd.errors.ResourceError("no room for it", fix=["less"])
    return FakeEngine(config, Script(pieces={pieces!r}, on_step=lambda step: time.sleep({pause}), ctx=90000))
vars(spd.runtime)["Engine"] = build
from spd.cli.chat.editor import Editor
read = Editor.read
def read_later(self, draft=""):
    {slow_prompt} and begun.wait()
    return read(self, draft)
Editor.read = read_later
from spd.cli.app import main
sys.exit(main(["chat", {model!r}, *{argv!r}]))
"""


class Terminal:
    """One `spd chat` behind a pseudo-terminal; `seen` is all that it wrote."""

    def __init__(self, code: str, environment: dict[str, str]) -> None:
        self.descriptor, other = pty.openpty()
        self.size(24, 80)
        self.before = termios.tcgetattr(other)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._other = other
        self.seen = b""
        self._mark = 0

    def size(self, rows: int, columns: int) -> None:
        """Resize; the kernel tells the program."""
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.descriptor, text.encode())

    def wait(self, words: str) -> bytes:
        """Read until these words have come since the last call; returns what came."""
        start = self._mark
        end = time.monotonic() + BOUND
        while (at := self.seen.find(words.encode(), start)) < 0:
            assert self._read(end), f"no {words!r} in {self.seen[start:]!r}"
        self._mark = at + len(words.encode())
        return self.seen[start : self._mark]

    def wait_for_model(self) -> None:
        """Read until the model's figures have come: above the prompt that stands, or before the first."""
        end = time.monotonic() + BOUND
        while b"mem " not in self.seen:
            assert self._read(end), self.seen

    def end(self) -> int:
        """Read to the end; returns how the process ended."""
        end = time.monotonic() + BOUND
        while self.process.poll() is None:
            assert time.monotonic() < end, f"still runs after {self.seen[self._mark :]!r}"
            self._read(time.monotonic() + 0.2)
        while self._read(time.monotonic() + 0.1):
            pass
        return self.process.returncode

    def leave(self, keys: str = "\x04") -> None:
        """Wait for the prompt, press Ctrl-D or other keys, and see the chat end well."""
        self.wait("›")
        self.type(keys)
        assert self.end() == 0

    def settings(self) -> list[Any]:
        """The terminal's settings now."""
        return termios.tcgetattr(self._other)

    def close(self) -> None:
        """Leave nothing running."""
        self.process.kill()
        self.process.wait()
        os.close(self._other)
        os.close(self.descriptor)

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self.descriptor], [], [], max(0.0, end - time.monotonic()))
        if ready:
            self.seen += os.read(self.descriptor, 65536)
        return bool(ready)


@pytest.fixture
def terminal(model: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """`terminal("--no-stats", pieces=[...])` starts a chat."""
    opened: list[Terminal] = []
    settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 90000}
    (model / "config.json").write_text(json.dumps(settings))

    def start(
        *argv: str,
        pieces: list[str] | None = None,
        pause: float = 0.0,
        loading: float = 0.0,
        broken: bool = False,
        slow_prompt: bool = False,
        **more: str,
    ) -> Terminal:
        said = ["Hello", " wörld", "!"] if pieces is None else pieces
        code = PROGRAM.format(
            root=str(ROOT),
            model=str(model),
            pieces=said,
            pause=pause,
            loading=loading,
            broken=broken,
            slow_prompt=slow_prompt,
            argv=list(argv),
        )
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        environment = kept | {"PYTHONUTF8": "1", "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), **more}
        opened.append(Terminal(code, environment))
        opened[-1].wait("›")
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def turns(tmp_path: Path) -> list[dict[str, Any]]:
    """The turns of the only saved chat."""
    (path,) = (tmp_path / "state" / "spd" / "sessions").glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def test_a_reply_in_markdown_then_the_end(terminal: Start, tmp_path: Path) -> None:
    chat = terminal(pieces=["Some **bo", "ld** te", "xt\x1b[31m"])
    chat.type("Hi\r")
    chat.wait("\x1b[1mbold\x1b[0m")
    assert b"text\\x1b[31m" in chat.wait("ctx")
    chat.leave()
    assert chat.settings() == chat.before
    assert [turn["reply"] for turn in turns(tmp_path)] == ["Some **bold** text\x1b[31m"]


def test_a_file_too_long_is_named_and_left_out(terminal: Start, tmp_path: Path) -> None:
    """The message waits in the editor, and the next Enter sends it alone."""
    (tmp_path / "long.txt").write_text("x" * 90_100)
    chat = terminal("-f", str(tmp_path / "long.txt"))
    chat.type("Hi\r")
    said = b" ".join(chat.wait("fix:").split())  # broken between words, as rows are
    assert b"the context is 90,000" in said and b"long.txt: 90,100 tokens, no longer attached" in said
    chat.wait("Hi")
    chat.type("\r")
    chat.wait("ctx")
    chat.leave()
    assert [turn["user"] for turn in turns(tmp_path)] == ["Hi"]


def test_ctrl_c_keeps_what_came_and_what_was_typed(terminal: Start, tmp_path: Path) -> None:
    chat = terminal(pieces=["word "] * 4000, pause=0.02)
    chat.type("Hi\r")
    chat.wait("word word word")
    chat.type("/stats off\rtyped ahead")
    chat.type("\x03")
    chat.wait("[interrupted]")
    assert b"typed ahead" in chat.wait("typed ahead")  # by the editor, behind the prompt after next
    chat.type("\r")
    chat.wait("word word")
    chat.type("\x03")
    chat.leave("/exit\r")
    first, second = turns(tmp_path)
    assert first["finish"] == second["finish"] == "abort" and second["user"] == "typed ahead"
    assert first["reply"].startswith("word word word") and len(first["reply_ids"]) >= 6


def test_ctrl_c_on_an_empty_line_needs_two(terminal: Start) -> None:
    chat = terminal()
    chat.type("text\x03")
    chat.type("\x03")
    chat.wait("Ctrl-D or /exit to quit")
    chat.type("\x03")
    assert chat.end() == -signal.SIGINT


def test_pastes_are_one_message(terminal: Start, tmp_path: Path) -> None:
    """Of any length, unmarked ones too; where the end mark got lost the keys come back by themselves."""
    lines = [f"line {number}" for number in range(5000)]
    chat = terminal()
    chat.wait_for_model()
    data = "\x1b[200~" + "\n".join(lines) + "\x1b[201~"
    for at in range(0, len(data), 1000):  # as a terminal sends it: no more than the line buffer holds
        chat.type(data[at : at + 1000])
        time.sleep(0.005)
    chat.wait("[pasted 5,000 lines]")
    chat.type(" see above\r")
    chat.wait("wörld!")
    chat.wait("›")
    time.sleep(1.0)  # else it could come before the prompt, as keys typed ahead do
    chat.type("unmarked\rpaste\rof lines")
    chat.type("\x0aand Ctrl-J\r")
    chat.wait("wörld!")
    chat.wait("›")
    time.sleep(1.0)
    chat.type("\x1b[200~lost end")
    chat.wait("lost end")
    chat.type(" found\r")
    chat.wait("wörld!")
    chat.leave()
    assert [turn["user"] for turn in turns(tmp_path)] == [
        "\n".join(lines) + " see above",
        "unmarked\npaste\nof lines\nand Ctrl-J",
        "lost end found",
    ]
    history = (tmp_path / "state" / "spd" / "history").read_text()
    assert "+line 4999 see above" in history and "[pasted" not in history


@pytest.mark.slow
def test_a_message_can_be_sent_while_the_model_loads(terminal: Start, tmp_path: Path) -> None:
    chat = terminal(loading=1.5)
    chat.type("early\r")
    chat.wait("spec  draft, up to 4, adaptive")
    chat.wait("wörld!")
    chat.leave()
    assert turns(tmp_path)[0]["user"] == "early"


def test_what_is_said_fits_a_narrow_terminal(terminal: Start) -> None:
    """Lines of figures are broken between words, not by the terminal's edge."""
    chat = terminal("--no-save")
    chat.size(24, 40)
    chat.type("Hi\r")
    chat.wait("wörld!")
    said = chat.wait(" ctx ").split(b"\r\n") + chat.wait("›").split(b"\r\n")
    plain = [re.sub(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|[78])", b"", row).decode() for row in said]
    figures = [row for row in plain if "tok" in row or "drafts" in row or "/4" in row]
    assert len(figures) >= 2 and all(len(row) < 40 for row in figures), plain
    assert any("drafts 3/12 (25%)" in row for row in figures), figures
    chat.type("\x04")
    assert chat.end() == 0


@pytest.mark.slow
def test_a_terminal_that_shrinks_while_a_reply_comes(terminal: Start) -> None:
    chat = terminal("--no-stats", pieces=["word "] * 60, pause=0.02)
    chat.type("Hi\r")
    chat.wait("word word")
    chat.size(24, 40)
    rows = chat.wait("›").split(b"\r\n")
    narrow = [re.sub(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|[78])", b"", row) for row in rows if b"word" in row]
    assert all(len(row) < 40 for row in narrow[-4:-1]) and len(narrow) > 4


def test_a_prompt_that_the_terminal_broke_is_drawn_from_its_beginning(terminal: Start) -> None:
    """Rows that a narrower terminal has broken are counted; what stood above them stays."""
    chat = terminal("--no-save")
    chat.wait_for_model()
    chat.size(24, 100)
    chat.type("a" * 85)
    chat.wait("a" * 85)
    time.sleep(0.5)  # until the last of it is drawn
    chat.size(24, 40)
    chat.wait("\x1b[2A\r\x1b7\x1b[2K\x1b[B")
    chat.wait("a" * 37)
    chat.type("\x03\x04")
    assert chat.end() == 0


def test_rows_of_a_narrower_terminal() -> None:
    from prompt_toolkit.layout.screen import Char

    for text, columns, rows in (("", 4, 1), ("abcd", 4, 1), ("abcde", 4, 2), ("abcd    ", 4, 1)):
        assert rows_of({i: Char(c) for i, c in enumerate(text)}, columns) == rows
    wide = {0: Char("a"), 1: Char("日"), 3: Char("本"), 5: Char("語")}
    assert rows_of(defaultdict(Char, wide), 4) == 2 and rows_of(defaultdict(Char, wide), 2) == 4


@pytest.mark.parametrize(
    ("columns", "line"),
    [(80, " demo · spec off · ctx 7/4,096"), (30, " demo · ctx 7/4,096"), (19, " ctx 7/4,096")],
)
def test_the_line_at_the_bottom_fits(columns: int, line: str) -> None:
    words = {"spec_words": lambda: "spec off", "context_words": lambda: "7/4,096"}
    model = SimpleNamespace(name="demo", is_loaded=True, **words)
    look = SimpleNamespace(size=lambda: os.terminal_size((columns, 24)))
    chat: Any = SimpleNamespace(model=model, look=look)
    assert Chat._status(chat) == line


def test_a_refused_line_says_what_to_type(terminal: Start) -> None:
    chat = terminal("--no-save", NO_COLOR="1")
    chat.wait_for_model()
    for line in ("/nothing", "/set temperature=-1"):
        chat.type(f"{line}\r")
        chat.wait("error: ")
        assert chat.wait("fix: ").count(b"\n") <= 4
        chat.wait("›")
    chat.type("\x04")
    assert chat.end() == 0


def test_drafts_are_coloured_or_underlined(terminal: Start) -> None:
    for more, style in (({}, b"\x1b[32m"), ({"NO_COLOR": "1"}, b"\x1b[4m")):
        chat = terminal("--show-drafts", "--no-save", **more)
        chat.type("Hi\r")
        assert style + b"H\x1b[0mello" in chat.wait("drafts ")
        chat.wait("›")
        if more:
            assert not COLOURS.search(chat.seen)
        chat.type("\x04")
        assert chat.end() == 0


def test_killed_while_replying_the_message_is_there_again(terminal: Start, tmp_path: Path) -> None:
    chat = terminal(pieces=["word "] * 400, pause=0.02)
    chat.type("precious words\r")
    chat.wait("word word")
    chat.process.kill()
    chat.process.wait()
    assert [turn["reply"] for turn in turns(tmp_path)] == [None]
    chat = terminal("-c")
    chat.wait("precious words")
    chat.type("\r")
    chat.wait("wörld!")
    chat.leave()
    assert [turn["reply"] for turn in turns(tmp_path)] == ["Hello wörld!"]


def test_escape_stops_a_reply_and_other_keys_do_not(terminal: Start, tmp_path: Path) -> None:
    """Esc alone; the arrow before it, which begins with one, and what is typed wait for the next message."""
    chat = terminal(pieces=["word "] * 400, pause=0.02)
    chat.type("Hi\r")
    chat.wait("word word")
    for keys in ("type", "\x1b[D", "\x1b[200~pa\x1b", "sted\x1b[201~"):
        chat.type(keys)
        time.sleep(0.2)
    assert b"[interrupted]" not in chat.seen
    chat.wait("word word")
    chat.type("\x1b")
    chat.wait("[interrupted]")
    chat.wait("typpa")
    chat.wait("stede")
    (turn,) = turns(tmp_path)
    assert turn["finish"] == "abort" and turn["reply"].startswith("word word")
    assert len(turn["reply"]) < 5 * 400
    chat.type("\x03\x04")
    assert chat.end() == 0 and chat.settings() == chat.before


def test_a_dumb_terminal_gets_plain_lines(terminal: Start) -> None:
    chat = terminal("--show-drafts", pieces=["**a**"], TERM="dumb")
    assert b"--show-drafts marks tokens on a terminal only" in chat.seen
    chat.type("Hi\n")
    chat.wait("**a**")
    chat.leave()
    assert b"\x1b" not in chat.seen


@pytest.mark.slow
def test_hidden_thinking_is_one_line(terminal: Start) -> None:
    chat = terminal("--think", "hide", "--no-stats", pieces=["<thi", "nk>hm", "m</think>", "Yes"])
    chat.type("Hi\r")
    reply = chat.wait("Yes")
    assert b"hmm" not in reply and b"thought for 0." in reply
    chat.wait("›")
    chat.type("/think on\r")
    chat.wait("/think on")
    chat.wait("\x1b[?2004l")  # sent: together with what follows it would be a paste
    chat.wait("›")
    chat.type("Again\r")
    assert b"\x1b[2;3mm\x1b[0m" in chat.wait("Yes")


@pytest.mark.parametrize("early", [False, True])
def test_loading_that_fails_ends_the_chat(terminal: Start, tmp_path: Path, early: bool) -> None:
    """A message sent meanwhile is not lost: -c begins with it."""
    chat = terminal(loading=1.0 if early else 0.5, broken=True)
    if early:
        chat.type("precious words\r")
    assert chat.end() == 5 and chat.seen.count(b"error:") == chat.seen.count(b"no room for it") == 1
    assert chat.settings() == chat.before
    if early:
        assert [(turn["user"], turn["reply"]) for turn in turns(tmp_path)] == [("precious words", None)]


@pytest.mark.parametrize("broken", [False, True])
def test_what_loading_says_before_a_prompt_stands_is_said(terminal: Start, broken: bool) -> None:
    chat = terminal("--no-save", slow_prompt=True, broken=broken)
    if broken:
        assert chat.end() == 5 and chat.seen.count(b"no room for it") == 1
        return
    assert b"mem " in chat.seen[: chat.seen.index("›".encode())] and chat.seen.count(b"mem ") == 1
    chat.type("Hi\r")
    chat.wait("wörld!")
    chat.wait("›")
    assert chat.seen.count(b"mem ") == 1
    chat.type("\x04")
    assert chat.end() == 0


def test_what_comes_as_a_prompt_ends_waits_for_the_next() -> None:
    """A thread may see a prompt that stands and speak when it is over: nothing is drawn, nothing raised."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    from spd.cli.chat.editor import Editor

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        editor = Editor(None, color=False, status=str, commands=[], with_path=[])
        keys.send_text("hi\r")
        assert editor.read() == "hi"
        editor.say("news")
        editor.leave(RuntimeError("no room"))
        editor._show()
        editor._leave()
        assert editor.unsaid() == "news\n"
        with pytest.raises(RuntimeError, match="no room"):
            editor.read()
