"""Streams and signals: terminal widths, colour, full disks, pipes, and the end of a run."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spd.cli.terminal.console import Console, write_error
from spd.cli.terminal.plain_text import cell_width, escape_controls, fit_lines
from spd.cli.terminal.sink import Sink, check_writable, to_json
from spd.cli.terminal.streams import is_color_enabled
from spd.errors import IncompatibleError, ResourceError, UsageError
from tests.cli.cli_processes import (
    PLAIN,
    TerminalStream,
    expect_stderr_line,
    finish,
    plain_text,
    run_on_terminal,
    run_redirected,
    slow_program,
    start,
)
from tests.cli.conftest import ROOT, make_failing, make_program
from tests.recipes.tiny_dense import write_dense

PIECES = ["A reply of words that goes on beyond", " the edge of a narrow terminal without a break."]


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


def test_an_error_is_styled_and_wrapped() -> None:
    styled = PLAIN_ERROR
    narrow = PLAIN_ERROR.replace("is a terminal", "is a\n    terminal")
    for word, styled_word in STYLED.items():
        styled = styled.replace(word, styled_word)
    for columns, environment, expected in (
        (80, {}, styled),
        (80, PLAIN, PLAIN_ERROR),
        (40, PLAIN, narrow),
    ):
        assert run_on_terminal("generate", "--temp", "1", columns=columns, **environment) == (
            2,
            expected,
        )


def test_reports_break_between_words(folder: Path) -> None:
    """The words are the same at each width, and no row but a single word is wider than the terminal."""
    drop = re.compile(r"\d+(?:\.\d+)?")  # free memory changes from run to run
    text = plain_text(run_on_terminal("inspect", folder, columns=40)[1])
    wide = plain_text(run_on_terminal("inspect", folder, columns=900)[1])
    assert drop.sub("", text).split() == drop.sub("", wide).split()
    for row in text.split("\n"):
        assert cell_width(row) <= 40 or len(row.split()) == 1, row


def test_facts_in_a_pipe_are_broken_between_fields_at_100_columns(spd_run, folder) -> None:
    rows = spd_run("inspect", folder).text.splitlines()
    end = next(number for number, row in enumerate(rows) if "vocabulary" in row)
    head = rows[:end]
    assert len(head) > 3 and head[0].startswith("target            model ")
    assert all(row.startswith(" " * 18) and row[18] != " " for row in head[1:])
    for row in rows:
        assert len(row) <= 100 or " · " not in row.removesuffix(" ·"), row
    ran = spd_run("generate", "-m", folder, "-v", "--raw", "Hi")
    assert "plan  " in ran.err and max(map(len, ran.err.splitlines())) <= 100


def test_a_streamed_reply_is_left_to_the_terminal_and_its_figures_are_not(model: Path) -> None:
    argv = ["generate", "-m", model, "--stats", "Hi"]
    status, text = run_on_terminal(
        argv, columns=40, code=make_program(f"pieces={PIECES!r}"), NO_COLOR="1"
    )
    reply, *figures = plain_text(text).rstrip("\n").split("\n")
    assert (status, reply) == (0, "".join(PIECES))
    assert " ".join(" ".join(figures).split()).startswith("4 tok · ")
    assert len(figures) > 1 and max(map(len, figures)) < 40


def test_lines_are_broken_between_words() -> None:
    fact = "target    demo · DeepseekV3ForCausalLM · 10.69 M params"
    assert (
        fit_lines(fact, 40) == "target    demo · DeepseekV3ForCausalLM\n          · 10.69 M params"
    )
    assert fit_lines(fact, 56) == fact and fit_lines(fact, None) == fact
    path = "/a/path/" + "x" * 60
    assert fit_lines(f"in {path} is nothing", 40) == f"in\n  {path}\n  is nothing"
    command = "  fix: spd generate --draft-model org/name-of-a-model --temperature 0"
    assert fit_lines(command, 40) == command
    help_line = (
        "  /regen     reply to the last message once more"  # a line of /help is not to be pasted
    )
    assert fit_lines(help_line, 40) == f"{help_line[:38]}\n{' ' * 13}once more"


def test_colour_follows_variables_then_the_terminal() -> None:
    for environ, with_terminal, without_terminal in (
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"CLICOLOR_FORCE": "0"}, True, False),
        ({"CLICOLOR_FORCE": "1"}, True, True),
    ):
        assert is_color_enabled(TerminalStream(), environ) is with_terminal
        assert (
            is_color_enabled(io.StringIO(), environ)
            is is_color_enabled(None, environ)
            is without_terminal
        )


def test_control_characters_are_spelled_out_and_json_is_strict() -> None:
    assert (
        escape_controls("a\x1b[31mb\x00\x9bc\td\r\ne\rf\udcffé")
        == "a\\x1b[31mb\\x00\\x9bc\td\r\ne\\rf\\udcffé"
    )
    line = to_json(
        {"a": float("-inf"), "b": (1.5, float("nan")), 3: Path("x"), "é": "a\nb", "t": True}
    )
    assert json.loads(line) == {"a": None, "b": [1.5, None], "3": "x", "é": "a\nb", "t": True}
    assert "\n" not in line and "é" in line


def test_a_slow_non_blocking_reader_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text = "x" * 300_000
    received = []

    def read() -> None:
        time.sleep(0.2)  # the pipe is full by then
        while data := os.read(reader, 4096):
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    Sink(writer).write(text)
    os.close(writer)
    thread.join(10)
    assert sum(map(len, received)) == len(text)
    os.close(reader)


def test_a_file_that_cannot_be_written_is_refused_early(tmp_path, monkeypatch) -> None:
    """A file that a full disk left empty is removed."""
    check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for bad in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(UsageError, match="cannot write"):
            check_writable(bad)
    (tmp_path / "old").write_text("x")
    monkeypatch.setattr(
        "spd.cli.terminal.sink._write_all", make_failing(OSError(errno.ENOSPC, "No space left"))
    )
    for name in ("new", "old"):
        with pytest.raises(ResourceError, match=f"cannot write to .*{name}: No space left"):
            Sink(tmp_path / name).write("x")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_an_error_has_one_line_for_each_part(capfd: pytest.CaptureFixture[str]) -> None:
    """Line ends in a part are escaped; an error without a fix gets the help command."""
    error = IncompatibleError(
        "no\x1b[2J way\nsecond", reason=["because\nof two"], fix=["do\nthis", "that"]
    )
    write_error(error, Console(), as_json=False)
    expected = "error: no\\x1b[2J way\\nsecond\n  because\\nof two\n  fix: do\\nthis\n       that\n"
    assert capfd.readouterr() == ("", expected)
    write_error(UsageError("x"), Console(help="/help"), as_json=False)
    assert capfd.readouterr() == ("", "error: x\n  fix: /help\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_decoding_keeps_the_text_and_ends_by_the_signal(
    signum: int, model: Path
) -> None:
    process = start(slow_program(model))
    first = os.read(process.stdout.fileno(), 5)
    process.send_signal(signum)
    code, out, err = finish(process)
    assert (code, err) == (-signum, "stopping…\n")
    assert first + out == b"word " * ((len(first + out) - 1) // 5) + b"\n"


@pytest.mark.parametrize(
    ("hang_at", "argv", "broken", "out", "expected"),
    [  # nothing has come of the reply yet; it cannot be asked any more
        ("load", [], "", "", "stopping…\n"),
        ("prefill", [], "", "\n", "stopping…\n"),
        ("hang", ["--json", "--stats"], "", "word word ", "stopping…\n4 tok"),
        ("hang", ["--json"], "del FakeEngine.abort", "word word ", ""),
    ],
)
def test_a_signal_ends_a_run_that_hangs(hang_at, argv, broken, out, expected, model) -> None:
    process = start(slow_program(model, argv, hang_at=hang_at, extra_setup=broken))
    expect_stderr_line(process, "loading\n" if hang_at == "load" else "hanging\n")
    process.send_signal(signal.SIGINT)
    code, printed, err = finish(process)
    assert code == -signal.SIGINT and err.startswith(expected)
    if argv:
        reply = json.loads(printed)
        assert (reply["finish_reason"], reply["text"], len(reply["token_ids"])) == ("abort", out, 4)
    else:
        assert (printed.decode(), err) == (out, expected)


def test_a_second_signal_ends_at_once(model: Path) -> None:
    process = start(
        slow_program(
            model,
            hang_at="hang",
            extra_setup="FakeEngine.abort = lambda self, request: hang('aborting')",
        )
    )
    expect_stderr_line(process, "hanging\n")
    process.send_signal(signal.SIGINT)
    for line in ("stopping…\n", "aborting\n"):
        expect_stderr_line(process, line)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (-signal.SIGINT, "")


def test_a_signal_swallowed_inside_the_engine_still_stops_the_run(model: Path) -> None:
    swallow = """def slow(step):
    try: step == 1 and os.kill(os.getpid(), 2)
    except BaseException: pass"""
    code, out, err = finish(start(slow_program(model, extra_setup=swallow)))
    assert (code, err) == (-signal.SIGINT, "stopping…\n") and out in (b"word \n", b"word word \n")


def test_a_shell_loop_stops(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(slow_program(model, pieces=400)[2])
    loop = f"for i in 1 2 3; do echo round; '{sys.executable}' {tmp_path / 'run.py'}; done"
    process = start(["bash", "-c", loop], start_new_session=True)
    seen = b""
    while b"word" not in seen:
        read = os.read(process.stdout.fileno(), 100)
        assert read, seen
        seen += read
    os.killpg(process.pid, signal.SIGINT)
    code, out, _ = finish(process)
    assert (seen + out).count(b"round") == 1 and code == -signal.SIGINT


def test_an_ignored_signal_stays_ignored(model: Path) -> None:
    process = start(
        slow_program(model, pieces=8),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    first = os.read(process.stdout.fileno(), 5)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, first + out, err) == (0, b"word " * 8 + b"\n", "")


@pytest.mark.parametrize(
    ("hang_at", "lines", "code"),
    # the reader leaves while a reply comes, or as the engine hangs; refused, and left, while the model loads
    [("step", b"Hi\n", 141), ("hang", b"Hi\n", 141), ("load", b"", 2), ("load", b"/exit\n", 0)],
)
def test_a_chat_ends_whatever_its_engine_does(
    hang_at: str, lines: bytes, code: int, model: Path
) -> None:
    process = start(
        slow_program(model, "--no-save", hang_at=hang_at, command=("chat",)), stdin=subprocess.PIPE
    )
    process.stdin.write(lines)
    process.stdin.close()
    if code == 141:
        os.read(process.stdout.fileno(), 5)
        process.stdout.close()
    assert process.wait(100) == code
    assert b"torn down" not in process.stderr.read()


def test_a_signal_ends_a_chat_over_lines(model: Path) -> None:
    """It does not end each reply in turn."""
    process = start(
        slow_program(model, "--no-save", pieces=400, command=("chat",)), stdin=subprocess.PIPE
    )
    process.stdin.write(b"Hi\nAgain\nOnce more\n")
    process.stdin.flush()
    assert os.read(process.stdout.fileno(), 5) == b"word "
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, err) == (-signal.SIGINT, "stopping…\n") and out.count(b"\n") == 1


@pytest.mark.parametrize(
    ("argv", "redirect", "code", "expected"),
    [
        ([], ">/dev/full", 5, "No space left"),
        (["--json"], ">/dev/full", 5, "No space left"),
        ([], ">&-", 5, "standard output is closed"),
        ([], "2>&- <&-", 0, ""),
    ],
)
def test_closed_and_full_streams_end_with_their_status(
    argv, redirect, code, expected, model, tmp_path
) -> None:
    done = run_redirected(slow_program(model, argv, pieces=2, pause=0), redirect, tmp_path)
    assert done[0] == code, done
    assert expected in done[2] and "Traceback" not in done[2] and "Exception ignored" not in done[2]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        *(
            (f"{command} >/dev/full", 5, "No space left")
            for command in ("--help", "completions bash")
        ),
        ("nonsense 2>/dev/full", 2, ""),
        ("--help >/dev/full 2>/dev/full", 5, ""),
        ("generate -m /nowhere Hi --json 2>/dev/full >/dev/full", 3, ""),
        *((f"{command} >/dev/full", 5, "cannot write") for command in ("--version", "-V", "rm -h")),
        *(
            (f"{command} >/dev/full", 5, "cannot write")
            for command in ("generate --help", "chat -h", "")
        ),
        *((f"{command} >/dev/full", 5, "cannot write") for command in ("inspect demo", "doctor")),
        ("--version >&-", 5, "closed"),
        ("--version 2>&-", 0, ""),
        ("generate --help", 141, ""),
        ("--version", 141, ""),
    ],
)
def test_the_exit_status_stands_whatever_the_streams_are(
    arguments: str, code: int, expected: str
) -> None:
    """So with buffered streams: a failing last flush of the interpreter would make the status 120.

    A full device is reported once.
    """
    shell = f"exec env -u PYTHONUNBUFFERED '{sys.executable}' -m spd {arguments}"
    reader, writer = os.pipe()
    os.close(reader)
    process = start(["bash", "-c", shell], stdout=writer if code == 141 else subprocess.PIPE)
    os.close(writer)
    status, _, err = finish(process)
    assert status == code and expected in err and "Traceback" not in err
    assert err.count("error:") == bool(expected)
    assert code != 141 or err == "", "help into a closed pipe is quiet"


def test_a_time_asleep_counts_in_no_speed() -> None:
    """Ctrl-Z suspends the program as usual; its clock continues without the pause."""
    code = """if True:
        import sys, time
        from spd.cli.signals import SignalGuard
        from spd.runtime.engine.clock import now
        SignalGuard().install()
        began, awake = time.perf_counter(), now()
        print("ready", flush=True)
        sys.stdin.readline()
        print(time.perf_counter() - began, now() - awake)
    """
    # A session's only group cannot be stopped.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=os.setpgrp,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate("\n", timeout=60)
    elapsed, awake = map(float, out.split())
    assert process.returncode == 0 and elapsed - awake > 1.9


def test_no_opened_file_takes_the_number_of_a_closed_stream(model: Path, tmp_path: Path) -> None:
    links = "open(%r, 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    setup = f"def slow(step): {links % str(tmp_path / 'fd')}"
    code = slow_program(model, "-o", str(tmp_path / "out"), pieces=2, extra_setup=setup)
    assert run_redirected(code, "<&- >&- 2>&-", tmp_path)[0] == 0
    assert (tmp_path / "fd").read_text() == "/dev/null /dev/null /dev/null"


def test_the_loading_line_is_replaced_by_note_and_answer(model: Path) -> None:
    """The note and the answer overwrite it."""
    code, output = run_on_terminal(code=slow_program(model, "-n", "500", pieces=2, pause=0)[2])
    loading, reply = output.rsplit("\r", 1)
    note, answer = reply.split("\n", 1)
    assert code == 0 and note.startswith("\x1b[36mnote:\x1b[0m the context leaves room for")
    assert loading.startswith("\rloading ") and loading.endswith(" ") and answer == "word word \n"


@pytest.mark.parametrize(
    ("piece", "expected"), [("word ", "word \n"), ("a\x1b[2Jb\tc", "a\\x1b[2Jb\tc\n")]
)
def test_no_control_character_comes_to_a_terminal(piece: str, expected: str, model: Path) -> None:
    code = slow_program(model, "-q", pieces=1, pause=0)[2].replace('"word "', repr(piece))
    assert run_on_terminal(code=code, TERM="dumb") == (0, expected)
