"""Hostile inputs for the command line and the chat: each run ends with a message and no traceback."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import make_program
from tests.cli.test_cli_chat_terminal import Terminal

TIMEOUT_SECONDS = 60.0
"""Seconds after which a run counts as hung; no measurement."""
EXPECTED_STATUSES = {*range(2, 11), 0, 141}
"""Exit codes on purpose; 1 stands for an unexpected error."""
NOISE = bytes(range(256)) * 8
NESTED = "[" * 50_000
STDIN: dict[str, bytes | None] = {
    "closed": None,
    "empty": b"",
    "binary": NOISE,
    "nul": b"\0" * 1000,
    "huge line": b"x" * 3_000_000,
    "controls": b"\x1b[2J\x1b]0;owned\x07\x03\x04\x1a\r\n\x08\x7f" * 50,
    "not utf-8": "naïve\n".encode("latin-1"),
    "surrogates": b"\xed\xa0\x80\n",
    "carriage returns": b"Hi\r\nthere\r\n\r\n",
    "blank lines": b"\n" * 2000,
    "no end": b"no end",
    "commands": b"/nosuch\n/\n//\n/file\n/set x\n/spec\n/undo\n/load ../..\n/model /dev/zero\n/exit x\n",
    "files": b"/file ~nobody-here\n/file '\n/file -\n/file /\n/file /dev/null\nHi\n",
    "nested": NESTED.encode(),
    "objects": b'{"prompt": "Hi"}\n{}\n[]\n3\n{"prompt": 3}\n{"prompt": "Hi", "params": []}\n',
    "odd objects": b'{"id": NaN, "prompt": "\\ud800"}\n{"prompt": "a", "params": {"schema": 3}}\n',
}
ENVIRONMENT: dict[str, dict[str, str]] = {
    "usual": {},
    "dumb": {"TERM": "dumb"},
    "no term": {"TERM": ""},
    "one column": {"COLUMNS": "1", "LINES": "1"},
    "odd columns": {"COLUMNS": "many"},
    "C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    "odd locale": {"LC_ALL": "xx_YY.nonsense", "PYTHONUTF8": "0"},
    "no home": {"HOME": "/dev/null", "XDG_STATE_HOME": "", "XDG_CONFIG_HOME": ""},
    "relative": {"HOME": "relative", "XDG_STATE_HOME": "also", "XDG_RUNTIME_DIR": "and"},
    "state is a file": {"XDG_STATE_HOME": "{place}/file"},
    "sessions is a file": {"XDG_STATE_HOME": "{place}/bad-sessions"},
    "history is a folder": {"XDG_STATE_HOME": "{place}/bad-history"},
    "runtime is a file": {"XDG_RUNTIME_DIR": "{place}/file"},
    "dangling config": {"XDG_CONFIG_HOME": "{place}/dangling"},
    "config is a folder": {"XDG_CONFIG_HOME": "{place}/folder"},
    "config is a loop": {"XDG_CONFIG_HOME": "{place}/loop"},
    "config is endless": {"SPD_CONFIG": "/dev/zero"},
    "config is binary": {"SPD_CONFIG": "{place}/binary"},
    "config is nothing": {"SPD_CONFIG": "/nowhere/config.toml"},
    "full temporary": {"TMPDIR": "/dev/full"},
}
STREAMS = {
    "usual": "",
    "full stdout": ">/dev/full",
    "closed stdout": ">&-",
    "full stderr": "2>/dev/full",
    "closed stderr": "2>&-",
    "both full": ">/dev/full 2>/dev/full",
    "both closed": ">&- 2>&-",
    "nobody reads": "| true",
}
COMMANDS: list[list[str]] = [
    *(
        ["generate", "-m", "{model}", *arguments]
        for arguments in ([], ["Hi"], ["--json"], ["--jsonl"])
    ),
    *(["generate", "-m", "{model}", *arguments] for arguments in (["--raw"], ["--dry-run", "Hi"])),
    *(["generate", "-m", "{model}", "Hi", "-f", name] for name in ("-", "/", "/dev/null", "")),
    *(
        ["generate", "-m", "{model}", "Hi", "-o", name]
        for name in ("/", "/dev/full", "", "{place}")
    ),
    *(
        ["generate", "-m", "{model}", "Hi", "--schema", text]
        for text in ("{{", "-", "/", NESTED[:999])
    ),
    ["generate", "-m", "{model}", "Hi", "--messages", "-"],
    *(["chat", "{model}", *arguments] for arguments in ([], ["-c"], ["-c", "../x"], ["--no-save"])),
    ["chat", "{model}", "-f", "{place}/binary"],
    ["chat", "{model}", "-s", "@/dev/null"],
    ["inspect", "{model}"],
    ["inspect", "{place}/binary"],
    ["explain", "{place}/binary"],
    ["compare", "{place}/binary", "{place}/binary"],
    ["ls"],
    ["rm", "-y", "../.."],
    ["completions", "bash"],
    ["completions", "nosuch"],
    ["pull", "no such/name"],
    ["--version"],
    ["--help"],
    [],
    ["generate", "-h"],
    ["nosuch"],
    ["--", "--"],
]
EXTRA_ARGUMENTS = [
    ["-n", "-1"],
    ["-n", "9" * 40],
    ["-n", ""],
    ["--seed", "x"],
    ["--temperature", "nan"],
    ["--ctx", "0"],
    ["--ctx", "k"],
    ["--set", "="],
    ["--set", "top_k=\x1b"],
    ["--stop", ""],
    ["--nosuch\x1b[2J"],
    ["\udcff\udcfe"],
    ["a\nb"],
    ["x" * 100_000],
    ["-"],
    ["--"],
    [""],
    ["--json"],
    ["-q"],
    ["-v"],
    ["--color", "always"],
    ["--color", "\u202e"],
    [],
]


@dataclass
class Case:
    """One run: its arguments, and the names of its stdin, environment and streams."""

    argv: list[str]
    stdin: str
    environment: str
    streams: str

    @classmethod
    def draw(cls, number: int) -> Case:
        """Return the case of a number: a random command, stdin, environment and streams."""
        source = random.Random(number)
        argv = list(COMMANDS[number % len(COMMANDS)])
        if source.random() < 0.5:
            argv += source.choice(EXTRA_ARGUMENTS)
        environment = source.choice(list(ENVIRONMENT))
        streams = "usual" if source.random() < 0.6 else source.choice(list(STREAMS))
        return cls(argv, source.choice(list(STDIN)), environment, streams)

    @property
    def is_mute(self) -> bool:
        """True if standard error cannot be read."""
        return self.streams in ("full stderr", "closed stderr", "both full", "both closed")


def prepare(place: Path) -> None:
    """Write the files that the environments name."""
    (place / "file").write_text("")
    (place / "binary").write_bytes(NOISE)
    (place / "bad-sessions" / "spd").mkdir(parents=True)
    (place / "bad-sessions" / "spd" / "sessions").write_text("")
    (place / "bad-history" / "spd" / "history").mkdir(parents=True)
    for name in ("dangling", "folder", "loop"):
        (place / name / "spd").mkdir(parents=True)
    (place / "dangling" / "spd" / "config.toml").symlink_to(place / "nowhere")
    (place / "folder" / "spd" / "config.toml").mkdir()
    (place / "loop" / "spd" / "config.toml").symlink_to(place / "loop" / "spd" / "config.toml")


@dataclass(frozen=True)
class ProcessResult:
    """The exit status and the output of a process."""

    status: int
    out: bytes
    err: bytes


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Callable[[Case], ProcessResult]:
    """Return a function that runs a case over a fake engine; it returns exit status and output."""
    place = tmp_path / "place"
    place.mkdir()
    prepare(place)

    def start(case: Case) -> ProcessResult:
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {
            "TERM": "xterm",
            "XDG_STATE_HOME": str(place / "state"),
            "HF_HUB_OFFLINE": "1",
        }
        changes = ENVIRONMENT[case.environment]
        environment = environment | {
            name: value.format(place=place) for name, value in changes.items()
        }
        words = [
            word.replace("{model}", str(model)).replace("{place}", str(place)) for word in case.argv
        ]
        data = STDIN[case.stdin]
        redirect = STREAMS[case.streams] + " <&-" * (data is None)
        shell = f'set -o pipefail; "$@" {redirect}'
        command = ["bash", "-c", shell, "-", sys.executable, "-c", make_program(""), *words]
        process = subprocess.Popen(
            [os.fsencode(word) for word in command],
            cwd=place,
            env=environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = process.communicate(data or b"", timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"hangs: {case}") from None
        return ProcessResult(process.returncode, out, err)

    return start


def assert_well_ended(case: Case, result: ProcessResult) -> None:
    """Assert a known exit status, no traceback, and an error message."""
    status = result.status
    out = result.out
    err = result.err
    report = f"{case}\n{status}\n{out[-500:]!r}\n{err[-2000:]!r}"
    assert status in EXPECTED_STATUSES, report
    for forbidden in (b"Traceback", b"Exception ignored", b"Exception in", b"unexpected "):
        assert forbidden not in err.replace(b"unexpected extra", b""), report
    if status not in (0, 141) and not case.is_mute:
        assert b"error" in err + out, report
    if status == 0 and case.streams == "usual":
        assert out or err, report


@pytest.mark.covers(count=12)
@pytest.mark.parametrize("number", range(0, 300, 13))
def test_a_run_ends_and_says_what_is_wrong(number: int, run: Callable) -> None:
    case = Case.draw(number)
    assert_well_ended(case, run(case))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 600, 50))
def test_many_runs_end_and_say_what_is_wrong(start: int, run: Callable) -> None:
    for number in range(start, start + 50):
        case = Case.draw(number)
        assert_well_ended(case, run(case))


KEYS = [
    "\x1b",
    "\x1b[",
    "\x1b[200~",
    "\x1b[201~",
    "\x1bO",
    "\t",
    "\x08",
    "\x17",
    "\x12",
    "\x1f",
    "\x00",
    "\x01",
    "\x0b",
    "\x19",
    "\x7f" * 9,
    "\x1a",
    "\x0c",
    "\x10",
    "\x0e",
    "\x1b\r",
    "\x0a",
    "日本",
    "👩‍👩‍👧",
    "\u202e",
    "\ufffd",
    "x" * 3000,
    "\\",
    "\"'",
    "/",
    "//",
    "/fi\t",
    "/set a\r",
    "Hi\r",
    "/spec ngram\r",
    "/file ~nobody-here/x\r",
    "/load ..\r",
    "/think N\r",
    "/stats\r",
]


@pytest.fixture
def keyboard(model: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Return a function that starts a chat on a terminal of 20 columns: `keyboard(TERM="xterm")`."""
    opened: list[Terminal] = []

    def start(**changes: str) -> Terminal:
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        state = {"PYTHONUTF8": "1", "EDITOR": "true", "XDG_STATE_HOME": str(tmp_path / "state")}
        command = [
            sys.executable,
            "-c",
            make_program("pieces=['word '] * 3, ctx=90000"),
            "chat",
            str(model),
        ]
        opened.append(Terminal(command, environment | state | changes))
        opened[-1].size(5, 20)
        opened[-1].play("›")
        return opened[-1]

    yield start
    for opened_terminal in opened:
        opened_terminal.close()


def press(chat: Terminal, number: int) -> None:
    """Press random keys, then leave the chat, which must end."""
    source = random.Random(number)
    for _ in range(25):
        os.write(chat.descriptor, source.choice(KEYS).encode())
        chat._read(time.monotonic() + 0.02)
    end = time.monotonic() + TIMEOUT_SECONDS
    while chat.process.poll() is None:  # a paste is closed, a line is cleared, and the chat left
        assert time.monotonic() < end, chat.seen[-2000:]
        os.write(chat.descriptor, b"\x1b[201~\x15\x04\x03")
        chat._read(time.monotonic() + 0.2)
    assert chat.process.returncode in (0, -signal.SIGINT), chat.seen[-3000:]
    for forbidden in (b"Traceback", b"Exception", b"unexpected "):
        assert forbidden not in chat.seen, chat.seen[-3000:]


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_random_keys_crash_no_chat(term: str, keyboard: Callable) -> None:
    press(keyboard(TERM=term), 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_many_random_keys_crash_no_chat(number: int, keyboard: Callable) -> None:
    press(keyboard(TERM=("xterm-256color", "dumb", "nonsense", "")[number % 4]), number)


def test_every_surrounding_comes_up() -> None:
    cases = [Case.draw(number) for number in range(600)]
    assert {case.stdin for case in cases} == set(STDIN)
    assert {case.environment for case in cases} == set(ENVIRONMENT)
    assert {case.streams for case in cases} == set(STREAMS)
    assert len({json.dumps(vars(case)) for case in cases}) > 550
