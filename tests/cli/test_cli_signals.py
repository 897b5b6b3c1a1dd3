"""Signals, pipes and closed streams, each in a process of its own around the fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import conftest
from tests.cli.conftest import ROOT
from tests.cli.test_cli_terminal import on_terminal


def program(
    model: Path,
    *argv: str,
    at: str = "step",
    pieces: int = 40,
    pause: float = 0.05,
    command: tuple[str, ...] = ("generate", "Hi"),
    more: str = "",
) -> list[str]:
    """A command that runs spd with an engine that takes its time while loading or decoding.

    It says so where the interpreter ends while a thread of the engine runs: a real one would abort.
    """
    setup = f"""
import atexit, threading
def hang(word):
    print(word, file=sys.stderr, flush=True)
    time.sleep(60)
def slow(step):
    time.sleep({pause})
    if {at!r} == "prefill" and step == 0 or {at!r} == "hang" and step == 2:
        print("hanging", file=sys.stderr, flush=True)
        while True: time.sleep(0.01)
def load(progress): {at!r} == "load" and hang("loading")
{more}
atexit.register(lambda: threading.active_count() > 1 and print("torn down", file=sys.stderr))
sys.argv = ["spd", *{list(command)!r}, "-m", {str(model)!r}, *{list(argv)!r}]
"""
    script = f'pieces=["word "] * {pieces}, on_step=slow, on_load=load'
    return [sys.executable, "-c", conftest.program(script, setup=setup)]


def start(command: list[str], **how: object) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def wait_for(process: subprocess.Popen[bytes], line: str) -> None:
    """Read one line of standard error."""
    assert process.stderr.readline().decode() == line


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, str]:
    out, err = process.communicate(timeout=100)  # a bound against hangs, not a measurement
    return process.returncode, out, (err or b"").decode()


def shell(command: list[str], redirect: str, tmp_path: Path) -> tuple[int, bytes, str]:
    """Run a command with its streams as a shell redirects them."""
    (tmp_path / "run.py").write_text(command[2])
    return finish(start(["bash", "-c", f"exec '{sys.executable}' '{tmp_path / 'run.py'}' {redirect}"]))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_decoding_keeps_the_text_and_ends_by_the_signal(signum: int, model: Path) -> None:
    process = start(program(model))
    first = os.read(process.stdout.fileno(), 5)
    process.send_signal(signum)
    code, out, err = finish(process)
    assert (code, err) == (-signum, "stopping…\n")
    assert first + out == b"word " * ((len(first + out) - 1) // 5) + b"\n"


@pytest.mark.parametrize(
    ("at", "argv", "broken", "out", "said"),
    [  # nothing has come of the reply yet; it cannot be asked any more
        *(("load", [], "", "", "stopping…\n"), ("prefill", [], "", "\n", "stopping…\n")),
        ("hang", ["--json", "--stats"], "", "word word ", "stopping…\n4 tok"),
        ("hang", ["--json"], "del FakeEngine.abort", "word word ", ""),
    ],
)
def test_a_signal_while_nothing_comes(at, argv, broken, out, said, model) -> None:
    process = start(program(model, *argv, at=at, more=broken))
    wait_for(process, "loading\n" if at == "load" else "hanging\n")
    process.send_signal(signal.SIGINT)
    code, printed, err = finish(process)
    assert code == -signal.SIGINT and err.startswith(said)
    if argv:
        shown = json.loads(printed)
        assert (shown["finish_reason"], shown["text"], len(shown["token_ids"])) == ("abort", out, 4)
    else:
        assert (printed.decode(), err) == (out, said)


def test_a_second_signal_ends_at_once(model: Path) -> None:
    process = start(
        program(model, at="hang", more="FakeEngine.abort = lambda self, request: hang('aborting')")
    )
    wait_for(process, "hanging\n")
    process.send_signal(signal.SIGINT)
    for line in ("stopping…\n", "aborting\n"):
        wait_for(process, line)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (-signal.SIGINT, "")


def test_a_signal_swallowed_inside_the_engine_still_stops_the_run(model: Path) -> None:
    swallow = """def slow(step):
    try: step == 1 and os.kill(os.getpid(), 2)
    except BaseException: pass"""
    code, out, err = finish(start(program(model, more=swallow)))
    assert (code, err) == (-signal.SIGINT, "stopping…\n") and out in (b"word \n", b"word word \n")


def test_a_shell_loop_stops(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(program(model, pieces=400)[2])
    loop = f"for i in 1 2 3; do echo round; '{sys.executable}' {tmp_path / 'run.py'}; done"
    process = start(["bash", "-c", loop], start_new_session=True)
    seen = b""
    while b"word" not in seen:
        seen += os.read(process.stdout.fileno(), 100)
    os.killpg(process.pid, signal.SIGINT)
    code, out, _ = finish(process)
    assert (seen + out).count(b"round") == 1 and code == -signal.SIGINT


def test_an_ignored_signal_stays_ignored(model: Path) -> None:
    process = start(program(model, pieces=8), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    first = os.read(process.stdout.fileno(), 5)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, first + out, err) == (0, b"word " * 8 + b"\n", "")


@pytest.mark.parametrize(
    ("at", "lines", "code"),
    # the reader leaves while a reply comes, or as the engine hangs; refused, and left, while the model loads
    [("step", b"Hi\n", 141), ("hang", b"Hi\n", 141), ("load", b"", 2), ("load", b"/exit\n", 0)],
)
def test_a_chat_ends_whatever_its_engine_does(at: str, lines: bytes, code: int, model: Path) -> None:
    process = start(program(model, "--no-save", at=at, command=("chat",)), stdin=subprocess.PIPE)
    process.stdin.write(lines)
    process.stdin.close()
    if code == 141:
        os.read(process.stdout.fileno(), 5)
        process.stdout.close()
    assert process.wait(100) == code
    assert b"torn down" not in process.stderr.read()


def test_a_signal_ends_a_chat_over_lines(model: Path) -> None:
    """Not one reply after the other."""
    process = start(program(model, "--no-save", pieces=400, command=("chat",)), stdin=subprocess.PIPE)
    process.stdin.write(b"Hi\nAgain\nOnce more\n")
    process.stdin.flush()
    assert os.read(process.stdout.fileno(), 5) == b"word "
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, err) == (-signal.SIGINT, "stopping…\n") and out.count(b"\n") == 1


@pytest.mark.parametrize(
    ("argv", "redirect", "code", "words"),
    [
        *(([], ">/dev/full", 5, "No space left"), (["--json"], ">/dev/full", 5, "No space left")),
        *(([], ">&-", 5, "standard output is closed"), ([], "2>&- <&-", 0, "")),
    ],
)
def test_closed_and_full_streams(argv, redirect, code, words, model, tmp_path) -> None:
    done = shell(program(model, *argv, pieces=2, pause=0), redirect, tmp_path)
    assert done[0] == code, done
    assert words in done[2] and "Traceback" not in done[2] and "Exception ignored" not in done[2]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        *((f"{what} >/dev/full", 5, "No space left") for what in ("--help", "completions bash")),
        *(("nonsense 2>/dev/full", 2, ""), ("--help >/dev/full 2>/dev/full", 5, "")),
        ("generate -m /nowhere Hi --json 2>/dev/full >/dev/full", 3, ""),
        *(("--version >&-", 5, ""), ("--version 2>&-", 0, ""), ("generate --help", 141, "")),
    ],
)
def test_the_exit_status_stands_whatever_the_streams_are(words: str, code: int, said: str) -> None:
    """Also where they are buffered: what the interpreter cannot flush at its end makes its status 120."""
    shell, (reader, writer) = f"exec env -u PYTHONUNBUFFERED '{sys.executable}' -m spd {words}", os.pipe()
    os.close(reader)
    process = start(["bash", "-c", shell], **({"stdout": writer} if code == 141 else {}))
    os.close(writer)
    status, _, err = finish(process)
    assert status == code and said in err and "Traceback" not in err
    assert code != 141 or err == "", "help into a closed pipe is quiet"


def test_no_opened_file_takes_the_number_of_a_closed_stream(model: Path, tmp_path: Path) -> None:
    links = "open(%r, 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    more = f"def slow(step): {links % str(tmp_path / 'fd')}"
    code = program(model, "-o", str(tmp_path / "out"), pieces=2, more=more)
    assert shell(code, "<&- >&- 2>&-", tmp_path)[0] == 0
    assert (tmp_path / "fd").read_text() == "/dev/null /dev/null /dev/null"


def test_in_a_terminal(model: Path) -> None:
    """What is loading is written over by the note and the answer."""
    code, shown = on_terminal(code=program(model, "-n", "500", pieces=2, pause=0)[2])
    loading, rest = shown.rsplit("\r", 1)
    note, answer = rest.split("\n", 1)
    assert code == 0 and note.startswith("\x1b[36mnote:\x1b[0m the context leaves room for")
    assert loading.startswith("\rloading ") and loading.endswith(" ") and answer == "word word \n"


@pytest.mark.parametrize(("piece", "shown"), [("word ", "word \n"), ("a\x1b[2Jb\tc", "a\\x1b[2Jb\tc\n")])
def test_no_control_character_comes_to_a_terminal(piece: str, shown: str, model: Path) -> None:
    code = program(model, "-q", pieces=1, pause=0)[2].replace('"word "', repr(piece))
    assert on_terminal(code=code, TERM="dumb") == (0, shown)
