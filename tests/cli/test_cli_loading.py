"""What is seen of loading: a line, a bar, nothing; and models of random weights from one file."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from spd.cli.text import progress as module
from spd.cli.text.output import Console, write_stderr
from spd.cli.text.progress import loading
from spd.runtime.load.progress import LoadProgress, Phase
from tests.cli.conftest import refused
from tests.cli.test_cli_terminal import on_terminal

HIDE_CURSOR = "\x1b[?25l"
COLOUR = re.compile(r"\x1b\[[0-9;]*[13-9][0-9;]*m")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal of eighty columns, which shows a bar at once."""
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    return Terminal()


def load(stream: io.StringIO, console: Console, *phases: tuple[Phase, int, int]) -> None:
    with redirect_stderr(stream), loading("loading some/model", console) as progress:
        for phase, done, total in phases:
            if progress is not None:
                progress(LoadProgress(phase, done, total))


def seen(text: str) -> list[str]:
    """Everything that stood in some line at some time, without escapes."""
    return [line.strip() for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))]


STEPS: tuple[tuple[Phase, int, int], ...] = (
    ("read", 2**28, 2**30),
    ("read", 2**29, 2**30),
    ("pack", 2**29, 2**30),
)


def test_a_bar_names_phase_and_amount_and_goes_away(terminal: Terminal) -> None:
    load(terminal, Console(color=True), *STEPS)
    text = terminal.getvalue()
    lines = seen(text)
    assert lines[0] == "loading some/model …"
    assert any(line.startswith("reading weights") and line.endswith("0.25 GiB of 1.00 GiB") for line in lines)
    assert any(line.startswith("packing weights") and line.endswith("0.50 GiB of 1.00 GiB") for line in lines)
    assert text.endswith(("\x1b[2K", "\r")) and HIDE_CURSOR not in text
    assert text.count("\n") == text.count("\x1b[1A") == 1, "one line, and it came up again"
    assert COLOUR.search(text)


def test_without_colour_the_bar_has_none(terminal: Terminal) -> None:
    load(terminal, Console(color=False), *STEPS)
    assert "reading weights" in terminal.getvalue() and not COLOUR.search(terminal.getvalue())


@pytest.mark.parametrize("slow", [False, True])
def test_what_is_quick_and_what_cannot_move_its_cursor_shows_no_bar(
    slow: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb") if slow else monkeypatch.setattr(module, "DELAY", 60.0)
    load(terminal, Console(color=True), *STEPS)
    assert terminal.getvalue() == "loading some/model …\r" + 20 * " " + "\r"


def test_nothing_is_shown_to_the_quiet_and_to_files(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(terminal, Console(quiet=True), *STEPS)
    assert terminal.getvalue() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    load(file, Console(color=True), *STEPS)
    assert file.getvalue() == ""


def test_the_bar_is_drawn_ten_times_a_second_at_most(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL", 60.0)
    load(terminal, Console(), *(("read", n, 1000) for n in range(1000)))
    assert terminal.getvalue().count("reading weights") <= 3, "of a thousand"


def test_an_error_and_a_message_find_a_clean_line(terminal: Terminal) -> None:
    with (
        redirect_stderr(terminal),
        pytest.raises(KeyboardInterrupt),
        loading("loading x", Console()) as progress,
    ):
        assert progress is not None
        progress(LoadProgress("read", 1, 2))
        write_stderr("a word between\n")
        raise KeyboardInterrupt
    assert "a word between" in seen(terminal.getvalue())


def test_a_terminal_that_has_gone_stops_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(text: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", gone)
    load(terminal, Console(), *STEPS)


def test_generate_hands_its_progress_to_the_engine(spd_run: Callable, model: Path, script) -> None:
    told: list[object] = []
    script.on_load = told.append
    assert spd_run("generate", "-m", model, "Hi").code == 0
    assert told == [None], "standard error is no terminal here"


def test_a_real_terminal(model: Path) -> None:
    """In a process of its own, with the real delay."""
    code = f"""
import sys, time
import spd.runtime
from tests.cli.conftest import FakeEngine, Script, refused
from spd.runtime.load.progress import LoadProgress
def load(progress):
    for n in range(12):
        progress(LoadProgress("read", n, 12))
        time.sleep(0.1)
build = lambda config, progress=None: FakeEngine(config, Script(on_load=load), progress)
vars(spd.runtime)["Engine"] = build
from spd.cli.app import main
sys.exit(main(["generate", "-m", {str(model)!r}, "Hi"]))
"""
    status, text = on_terminal(code=code, TERM="xterm")
    lines = [line for line in seen(text) if line]
    assert status == 0
    assert any(line.startswith("reading weights") for line in lines)
    assert lines[-1] == "Hello wörld!"


# -- figures ---------------------------------------------------------------------------------------


def test_the_time_to_load_is_part_of_the_statistics(spd_run: Callable, model: Path, script) -> None:
    script.load_ms = 3210.0
    ran = spd_run("generate", "-m", model, "Hi", "--stats", "-v")
    assert " · load 3.21 s · first 0.01 s · " in ran.err and "load    3.21 s" in ran.err
    assert spd_run("generate", "-m", model, "Hi", "--json").json["timings"]["load_ms"] == 3210.0


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    from tests.cli.conftest import CONFIG

    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": None}))
    return folder


def test_random_weights_need_one_file(spd_run: Callable, bare: Path, random_weights: None) -> None:
    argv = ["generate", "-m", bare, "--prompt-ids", "5,6,7", "-n", "6"]
    argv += ["--temperature", "0", "--threads", "1"]
    ran = spd_run(*argv)
    assert ran.code == 0 and re.fullmatch(r"\d+(,\d+){5}\n", ran.text), ran
    assert ran.err == ""
    shown = spd_run(*argv, "--json").json
    assert shown["token_ids"] == [int(token) for token in ran.text.split(",")]
    assert shown["plan"]["load"] == "dummy" and shown["timings"]["load_ms"] > 0


def test_random_weights_cannot_read_text(spd_run: Callable, bare: Path) -> None:
    refused(spd_run("generate", "-m", bare, "Hi"), 4, "--prompt-ids")
    refused(spd_run("generate", "-m", bare, "--prompt-ids", "1,2"), 4, "model.safetensors")


def test_a_verbose_run_counts_memory_part_by_part(
    spd_run: Callable, bare: Path, random_weights: None
) -> None:
    argv = ["generate", "-m", bare, "--prompt-ids", "1", "-n", "1", "-v", "--threads", "1"]
    line = next(line for line in spd_run(*argv).err.splitlines() if line.startswith("memory  "))
    size = r"\d+\.\d\d \wiB"
    assert re.fullmatch(
        rf"memory  weights {size} \+ caches {size} \+ workspace {size} = {size} of {size} usable", line
    )


def test_too_much_is_refused_before_anything_is_loaded(
    spd_run: Callable, bare: Path, monkeypatch: pytest.MonkeyPatch, random_weights: None
) -> None:
    from spd.runtime.engine import assembly
    from spd.runtime.plan import machine

    monkeypatch.setattr(machine, "free_memory", lambda device: 2**18)
    monkeypatch.setattr(assembly, "load_model", None)
    argv = ["generate", "-m", bare, "--prompt-ids", "1", "--ctx", "128"]
    refused(spd_run(*argv), 5, "not enough memory on cpu", "weights", "workspace", "(frees ")


def test_memory_that_runs_out_ends_with_5(
    spd_run: Callable, bare: Path, monkeypatch: pytest.MonkeyPatch, random_weights: None
) -> None:
    from spd.runtime.engine import assembly
    from spd.runtime.round.round import Round

    def none(*_: object, **__: object) -> None:
        raise MemoryError

    argv = ["generate", "-m", bare, "--prompt-ids", "1,2", "--threads", "1"]
    monkeypatch.setattr(Round, "run", none)
    ran = spd_run(*argv, "-q", "-o", os.devnull)
    refused(ran, 5, "out of memory on cpu while running", "(frees ")
    monkeypatch.setattr(assembly, "load_model", none)
    ran = spd_run(*argv, "--json")
    assert ran.code == 5 and ran.json["error"]["code"] == "out_of_memory"
    assert "loading the weights of bare" in ran.json["error"]["message"]


def test_inspect_says_what_a_run_needs(spd_run: Callable, model: Path) -> None:
    from tests.cli.test_cli_inspect import expected, write_shard

    write_shard(model / "model.safetensors", expected(model))
    alone = spd_run("inspect", model, "--json").json["needs"]
    assert alone["ctx"] == 128 and alone["total"] == sum(alone["parts"].values())
    assert alone["parts"]["draft_weights"] == 0 < alone["parts"]["workspace"]
    pair = spd_run("inspect", model, "--draft", model, "--json").json["needs"]
    assert pair["parts"]["draft_weights"] == pair["parts"]["weights"] == alone["parts"]["weights"]
    text = spd_run("inspect", model).text
    said = " ".join(text[text.index("\nneeds     ") :].split())
    assert said.startswith("needs ") and "for 128 tokens" in said and "workspace" in said
