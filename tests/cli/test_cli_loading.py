"""Progress of loading and prefill, captures of the engine thread, and random weights."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spd.runtime
import spd.server.run
from spd.cli import engine as engine_module
from spd.cli.chat.model import ChatModel
from spd.cli.chat.options import ChatOptions
from spd.cli.signals import Interrupted, SignalGuard
from spd.cli.terminal import progress as progress_module
from spd.cli.terminal.console import Console
from spd.cli.terminal.progress import Ticker, loading
from spd.errors import UsageError
from spd.kernels.native import build
from spd.runtime import EngineConfig, Request, SamplingParams, lab
from spd.runtime.engine import assembly
from spd.runtime.engine.driver import EngineThread
from spd.runtime.engine.engine import Engine
from spd.runtime.lab import diagnostics
from spd.runtime.load.progress import LoadProgress
from spd.runtime.plan import machine
from spd.runtime.round.round import Round
from tests.cli import conftest
from tests.cli.cli_processes import TerminalStream
from tests.cli.conftest import assert_refused, make_failing, wait_until


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> TerminalStream:
    """Return standard error as a terminal of eighty columns that shows a bar at once."""
    monkeypatch.setattr(progress_module, "BAR_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "WRITE_INTERVAL_SECONDS", 0.0)
    return TerminalStream()


def load(stream: io.StringIO, console: Console) -> None:
    """Report all of `STEPS` to a bar on the stream."""
    with redirect_stderr(stream), loading("loading some/model", console) as progress:
        for step in STEPS:
            progress(step)


STEPS = (
    LoadProgress("read", 0, 2**30),
    LoadProgress("read", 2**28, 2**30),
    LoadProgress("read", 2**29, 2**30),
    LoadProgress("pack", 0, 2**30),
    LoadProgress("pack", 2**29, 2**30),
)


def test_a_bar_names_phase_and_amount_and_goes_away(terminal: TerminalStream) -> None:
    load(terminal, Console())
    lines = terminal.getvalue().split("\r")
    assert (
        lines[1] == "loading some/model …"
        and lines[-2].strip() == ""
        and "\n" not in terminal.getvalue()
    )
    for label, done in (("reading weights 25%", "0.25"), ("packing weights 50%", "0.50")):
        pattern = rf"{label} (\[#+\.+\] )?\d+:\d\d left · {done} GiB of 1.00 GiB · \d+\.\d\d GiB/s"
        assert any(re.match(pattern, line) for line in lines), lines


AMOUNT_AND_RATE = " · 1,024 tok of 4,096 tok · 102 tok/s"


def test_the_time_left_is_seen_at_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "BAR_DELAY_SECONDS", 0.0)
    for columns, bar, facts in (
        (40, "...", ""),
        (80, "......", AMOUNT_AND_RATE),
        (120, f"####{15 * '.'}", AMOUNT_AND_RATE),
    ):
        terminal = TerminalStream()
        times = iter((0.0, 10.0, 10.0))
        monkeypatch.setattr(progress_module, "columns_of", lambda stream, columns=columns: columns)
        monkeypatch.setattr(time, "perf_counter", times.__next__)
        with redirect_stderr(terminal):
            ticker = Ticker(Console())
            for done in (0, 1024):
                ticker.show_progress("reading the prompt", done, 4096, "{:,} tok".format)
        assert terminal.getvalue() == f"\rreading the prompt 25% [#{bar}] 0:30 left{facts}"
        assert len(terminal.getvalue()) <= columns


def test_nothing_is_shown_to_the_quiet_and_a_lost_terminal_stops_nothing(
    terminal, monkeypatch
) -> None:
    load(terminal, Console(quiet=True))
    file = io.StringIO()
    load(file, Console(color=True))
    assert terminal.getvalue() == file.getvalue() == ""
    monkeypatch.setattr(terminal, "write", make_failing(OSError(5, "Input/output error")))
    load(terminal, Console())


def test_a_long_prompt_is_seen_while_it_is_read(terminal, spd_run, tiny, monkeypatch) -> None:
    counts = list[Any]()
    monkeypatch.setattr(
        Ticker, "show_progress", lambda self, *arguments, **_: counts.append(arguments[:3])
    )
    argv = ["-m", tiny("qwen3", layers=1), "-n", 1, "--threads", 1, "--raw"]
    assert spd_run("generate", argv, stdin=b"word " * 90).code == 0
    read = [(done, total) for task, done, total in counts if task == "reading the prompt"]
    assert read and read == sorted(read) and read[-1][0] == read[-1][1] > 400


def test_what_took_long_is_said(ask, script, monkeypatch, terminal) -> None:
    """Cover the load time, a missing compiler, and a first compile."""
    script.load_ms = 3210.0
    ran = ask("--stats", "-v")
    assert " · load 3.21 s · first 0.01 s · " in ran.err and "load              3.21 s" in ran.err
    assert " · weight bytes 1.00 MiB · " in " ".join(ran.err.split())
    assert ask("--json").json["timings"]["load_ms"] == 3210.0
    reason = "not the C kernels: no C compiler is installed"
    monkeypatch.setattr(conftest, "FakePlan", partial(conftest.FakePlan, kernels_reason=reason))
    assert f"note: this is slow: {reason}" in ask().err
    script.on_load = lambda progress: [progress(step) for step in STEPS]
    with redirect_stderr(terminal):
        assert ask().code == 0 and "reading weights 25%" in terminal.getvalue()
    with redirect_stderr(terminal), loading("loading some/model", Console()):
        fields = {"done": 3, "total": 8}
        build.logger.getChild("compiling").info("compiling C kernels", extra=fields)
    assert "\rcompiling C kernels [###.....] …" in terminal.getvalue()


def test_a_load_of_seconds_names_what_spares_it(ask, script, monkeypatch) -> None:
    note = "keeps the model loaded"
    script.load_ms = 3210.0
    assert note not in ask().err, "where nobody reads it"
    monkeypatch.setattr(engine_module, "is_terminal", lambda stream: True)
    script.load_ms = 2990.0
    assert note not in ask().err
    script.load_ms = 3210.0
    err = ask().err
    assert "note: loading took 3.2 s; spd serve --detach -m /" in err and err.count(note) == 1
    assert note not in ask("-q").err + ask("--json").err + ask("--no-server").err

    def compile_kernels(progress: object) -> None:
        fields = {"done": 1, "total": 8}
        build.logger.getChild("compiling").info("compiling C kernels", extra=fields)

    script.on_load = compile_kernels
    assert note not in ask().err, "the next load will not take as long"


@pytest.mark.parametrize("argv", ["verify demo", "bench demo --category code", "doctor --quick"])
def test_a_first_compile_is_seen_in_every_command_that_runs_a_model(
    argv: str, spd_run, terminal, monkeypatch
) -> None:
    def compile_kernels(*_: object) -> None:
        fields = {"done": 3, "total": 8}
        build.logger.getChild("compiling").info("compiling C kernels", extra=fields)
        raise UsageError("enough")

    monkeypatch.setattr(lab, "replay_requests", compile_kernels)
    monkeypatch.setattr(lab.Sweep, "run", compile_kernels)
    steps = [diagnostics.Step("cpu", compile_kernels)]
    monkeypatch.setattr(lab, "diagnostic_steps", lambda quick: steps)
    with redirect_stderr(terminal):
        assert spd_run(argv.split()).code
    assert "\rcompiling C kernels [###.....] …" in terminal.getvalue()


def test_a_server_shows_that_it_loads_before_it_plans(spd_run, monkeypatch) -> None:
    """A plan compiles kernels at a first run."""
    monkeypatch.setattr(spd.runtime, "make_plan", make_failing(UsageError("a plan")))
    monkeypatch.setattr(spd.server.run, "load_engine_thread", make_failing(UsageError("a load")))
    assert_refused(spd_run("serve", "demo", "--port", 0), 2, "error: a load")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Return a folder with only a config.json."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(conftest.CONFIG | {"eos_token_id": None}))
    return folder


def test_random_weights_need_one_file(spd_run, bare, request) -> None:
    """Without a tokenizer text is refused; without random weights a file is missing."""
    assert_refused(spd_run("generate", "-m", bare, "Hi"), 4, "--prompt-ids")
    argv = [
        "generate",
        "-m",
        bare,
        "--prompt-ids",
        "5,6,7",
        "-n",
        6,
        "--temperature",
        0,
        "--threads",
        1,
    ]
    assert_refused(spd_run(argv), 4, "model.safetensors")
    request.getfixturevalue("random_weights")
    ran = spd_run(argv)
    assert ran.code == 0 and re.fullmatch(r"\d+(,\d+){5}\n", ran.text) and ran.err == "", ran
    reply = spd_run(argv, "--json").json
    assert reply["token_ids"] == [int(token) for token in ran.text.split(",")]
    assert reply["plan"]["load"] == "dummy" and reply["timings"]["load_ms"] > 0


def test_memory_that_runs_out_ends_with_5(spd_run, bare, monkeypatch, random_weights) -> None:
    argv = ["generate", "-m", bare, "--prompt-ids", "1,2", "--threads", "1"]
    monkeypatch.setattr(Round, "run", make_failing(MemoryError()))
    ran = spd_run(argv, "-q", "-o", os.devnull)
    assert_refused(ran, 5, "out of memory on cpu while running", "(frees ")
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**18)
    monkeypatch.setattr(assembly, "load_model", None)
    ran = spd_run("generate", "-m", bare, "--prompt-ids", "1", "--ctx", "128")
    assert_refused(ran, 5, "not enough memory on cpu", "weights", "workspace", "(frees ")


PARAMS = SamplingParams(temperature=0.5)


def engine_thread(model: Path) -> EngineThread:
    thread = EngineThread(
        lambda progress: spd.runtime.Engine(EngineConfig(model=model)), lambda: [PARAMS]
    )
    thread.start()
    return thread


def test_who_asks_waits_for_one_capture_at_most(model: Path, script: Any) -> None:
    """Capturing continues once the request has ended."""
    request_added = threading.Event()
    script.captures = 5
    added: list[int] = []
    script.on_capture = lambda number: number == 2 and request_added.wait(60)
    script.on_step = lambda step: added.append(len(script.engine.captured))
    thread = engine_thread(model)
    loaded: Any = thread.engine()
    assert loaded is script.engine, "a caller that waits for loading waits for no capture"
    wait_until(lambda: len(script.engine.captured) == 2)
    threading.Timer(0.05, request_added.set).start()  # when the request is there
    assert (
        "".join(event.text for event in thread.run(Request("a", (1, 2), PARAMS))) == "Hello wörld!"
    )
    assert added == [2, 2, 2]
    wait_until(lambda: len(script.engine.captured) == 5)
    assert script.engine.captured == [([PARAMS], {"limit": 1})] * 5
    assert thread.close() and script.engine.closed
    script.on_capture = make_failing(RuntimeError("no capture"))
    script.on_step = None
    thread = engine_thread(model)
    assert [event.text for event in thread.run(Request("a", (1, 2), PARAMS))] == [
        "Hello",
        " wörld",
        "!",
    ]
    assert script.engine.captured and thread.close(), "a capture that breaks breaks nothing else"


def test_a_chat_expects_its_own_parameters(model: Path, script: Any) -> None:
    """Captures use the sampling parameters of the chat."""
    script.captures = 1
    session: Any = SimpleNamespace(console=Console(), runtime_folder=model / "none")
    chat = ChatModel(ChatOptions(model=str(model), temperature=0.3), session)
    chat.start_loading()
    loaded: Any = chat.thread.engine()
    assert loaded is script.engine
    wait_until(lambda: script.engine.captured)
    ((params,), _) = script.engine.captured[0]
    assert (params.temperature, params.logprobs) == (0.3, None)
    assert chat.close(seconds=60)  # a busy machine may take its time


def test_a_batch_that_fills_all_slots_is_captured_for(
    spd_run, model, monkeypatch, random_weights
) -> None:
    """A batch that fits the slots captures nothing ahead."""
    captures: list[tuple[float, int]] = []

    def capture(self: Engine, params: list[SamplingParams], concurrency: int) -> None:
        captures.append((params[0].temperature, concurrency))

    monkeypatch.setattr(Engine, "capture_ahead", capture)
    argv = [
        "--jsonl",
        "-m",
        model,
        "--threads",
        1,
        "--concurrency",
        4,
        "-n",
        2,
        "--temperature",
        0.7,
    ]
    for lines, captured in ((1, []), (4, []), (5, [(0.7, 4)])):
        assert spd_run("generate", argv, stdin=b'{"prompt": "Hi"}\n' * lines).code == 0
        assert captures == captured


def test_a_signal_that_a_callback_swallowed_ends_the_command_after_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is noted, and nothing is generated."""
    guard = SignalGuard()

    def load_while_a_signal_comes(config: EngineConfig, progress: Any) -> Any:
        guard.received = signal.SIGINT
        return SimpleNamespace(load_ms=1e6)

    monkeypatch.setattr(spd.runtime, "Engine", load_while_a_signal_comes)
    session: Any = SimpleNamespace(console=Console(), guard=guard)
    with pytest.raises(Interrupted):
        engine_module.load_engine(
            session, "demo", EngineConfig(model=Path("demo")), recommends_server=True
        )
    assert "loading took" not in capsys.readouterr().err
