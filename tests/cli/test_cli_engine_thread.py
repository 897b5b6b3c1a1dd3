"""A chat's engine in its thread: rounds are captured while no request waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.cli.chat.loop import ChatModel
from spd.cli.commands.chat import ChatOptions
from spd.cli.text.output import Console
from spd.runtime import EngineConfig, Request, SamplingParams
from spd.runtime.engine.driver import EngineThread

WAIT = 60
PARAMS = SamplingParams(temperature=0.5)


def until(true: Callable[[], object]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def engine_thread(model: Path) -> EngineThread:
    def build(progress: Any) -> Any:
        from spd.runtime import Engine

        return Engine(EngineConfig(model=model), progress=progress)

    thread = EngineThread(build, lambda: [PARAMS])
    thread.start()
    return thread


def test_who_asks_waits_for_one_capture_at_most(model: Path, script: Any) -> None:
    """It goes on where it was interrupted once the request has ended."""
    asked, script.captures = threading.Event(), 5
    added: list[int] = []
    script.on_capture = lambda number: number == 2 and asked.wait(WAIT)
    script.on_step = lambda step: added.append(len(script.engine.captured))
    thread = engine_thread(model)
    assert thread.engine() is script.engine, "who waits for loading waits for none"
    until(lambda: len(script.engine.captured) == 2)
    threading.Timer(0.05, asked.set).start()  # when the request is there
    assert "".join(event.text for event in thread.run(Request("a", (1, 2), PARAMS))) == "Hello wörld!"
    assert added == [2, 2, 2]
    until(lambda: len(script.engine.captured) == 5)
    assert script.engine.captured == [([PARAMS], {"most": 1})] * 5
    assert thread.close() and script.engine.closed


def test_a_capture_that_breaks_breaks_nothing_else(model: Path, script: Any) -> None:
    def broken(number: int) -> None:
        raise RuntimeError("no capture")

    script.on_capture = broken
    thread = engine_thread(model)
    assert [event.text for event in thread.run(Request("a", (1, 2), PARAMS))] == ["Hello", " wörld", "!"]
    assert script.engine.captured and thread.close()


def test_a_chat_expects_its_own_parameters(model: Path, script: Any) -> None:
    """As they are by then."""
    script.captures = 1
    session: Any = SimpleNamespace(console=Console(), runtime_folder=model / "none")
    chat = ChatModel(ChatOptions(model=str(model), temperature=0.3), session)
    chat.start()
    assert chat.thread.engine() is script.engine
    until(lambda: script.engine.captured)
    ((params,), _) = script.engine.captured[0]
    assert (params.temperature, params.logprobs) == (0.3, None) and chat.close()


@pytest.mark.parametrize(("lines", "together"), [(1, None), (4, None), (5, 4)])
def test_a_batch_that_fills_all_slots_is_captured_for(
    spd_run: Callable,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    random_weights: None,
    lines: int,
    together: int | None,
) -> None:
    """With the parameters of the command; a shorter one captures what it runs."""
    from spd.runtime.engine.engine import Engine

    asked: list[tuple[list[SamplingParams], int]] = []
    monkeypatch.setattr(
        Engine, "capture_ahead", lambda self, params, together: asked.append((list(params), together))
    )
    argv = ["--jsonl", "-m", model, "--threads", 1, "--concurrency", 4, "-n", 2]
    ran = spd_run("generate", *argv, "--temperature", 0.7, stdin=b'{"prompt": "Hi"}\n' * lines)
    assert ran.code == 0
    assert [(params[0].temperature, together) for params, together in asked] == (
        [] if together is None else [(0.7, together)]
    )
