"""The library as its docstrings show it: lists in order, events as they come, tasks of asyncio."""

from __future__ import annotations

import asyncio
import doctest
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import spd
import spd.runtime.engine.async_engine
import spd.runtime.engine.engine
from spd.errors import EngineError, UsageError
from spd.runtime import AsyncEngine, EngineConfig, Request, SamplingParams
from spd.runtime.engine import assembly
from tests.helpers import make_engine, random_prompts, run_one

PROMPTS = random_prompts(6, 30, 256)
PARAMS = [SamplingParams(temperature=0.9, max_tokens=6 + 5 * i, seed=i, logprobs=1) for i in range(6)]
REQUESTS = [Request(f"r{i}", p, q) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3", layers=1)


@pytest.fixture(scope="module")
def alone(target: Path) -> list[Any]:
    return [run_one(target, p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("module", [spd.runtime.engine.engine, spd.runtime.engine.async_engine])
def test_the_examples_in_the_docstrings(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 3 and result.failed == 0


def test_importing_spd_imports_nothing_heavy() -> None:
    code = "import sys, spd; print([n for n in ('torch', 'llguidance', 'asyncio') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert all(getattr(spd, name) is not None for name in spd.__all__)


def test_completions_come_in_the_order_asked(target: Path, alone: list[Any]) -> None:
    engine = make_engine(target, slots=3, lag=1)
    done = engine.generate(iter(REQUESTS[::-1]))
    assert [one.request_id for one in done] == [request.id for request in REQUESTS[::-1]]
    for one, run in zip(done, alone[::-1], strict=True):
        assert (list(one.token_ids), one.text, one.finish_reason) == run.output
        assert [entry.logprob for entry in one.logprobs] == run.logprobs
        assert one.metrics.completion_tokens == len(one.token_ids) == len(one.drafted) and one.error is None
    assert not engine.has_work


@pytest.mark.parametrize(
    ("last", "words"), [(Request("x", (), PARAMS[0]), "no tokens"), (REQUESTS[0], "given twice")]
)
def test_one_bad_request_stops_the_list_before_it_runs(target: Path, last: Request, words: str) -> None:
    """Of two with one name one could have ended before the other is added, and their texts be joined."""
    engine = make_engine(target)
    with pytest.raises(UsageError, match=words):
        engine.generate([*REQUESTS[:5], last])
    assert not engine.has_work
    assert [one.request_id for one in engine.generate([REQUESTS[0]])] == ["r0"]


def test_requests_are_taken_as_room_appears(target: Path) -> None:
    """Thousands of requests need not exist at once."""
    engine, taken = make_engine(target, slots=2), 0

    def source() -> Iterator[Request]:
        nonlocal taken
        for i in range(40):
            taken += 1
            yield Request(f"q{i}", PROMPTS[0], SamplingParams(max_tokens=3))

    ended = 0
    for event in engine.stream(source()):
        ended += event.finish_reason is not None
        assert taken - ended <= 2 * 2 + 2
    assert ended == taken == 40


def test_a_stream_left_early_takes_its_requests_along(target: Path, alone: list[Any]) -> None:
    engine = make_engine(target, slots=2, lag=2)
    available = engine._pages.num_available
    for event in engine.stream(REQUESTS):
        if event.token_ids:
            break
    for _ in range(3):
        assert engine.step() == []
    assert not engine.has_work and engine._pages.num_available == available
    assert list(engine.generate([REQUESTS[1]])[0].token_ids) == alone[1].tokens


def test_an_id_may_be_used_again(target: Path, alone: list[Any]) -> None:
    """What an aborted request of that id has left is not the next one's."""
    engine = make_engine(target, slots=3, lag=1)
    again = Request(REQUESTS[0].id, PROMPTS[1], SamplingParams(max_tokens=30))
    engine.add(again)
    assert engine.step() is not None
    engine.abort(again.id)  # its end is not heard of before the id is used again
    assert list(engine.generate([REQUESTS[0]])[0].token_ids) == alone[0].tokens and not engine.has_work


def config(target: Path, **wishes: Any) -> EngineConfig:
    return EngineConfig(model=target, threads=1, dtype="float32", ctx=256, spec="off", slots=3, **wishes)


def test_tasks_get_what_each_alone_gets(target: Path, alone: list[Any]) -> None:
    async def main() -> list[Any]:
        with AsyncEngine(config(target, lag=1)) as engine:
            return await asyncio.gather(*map(engine.generate, REQUESTS))

    done = asyncio.run(main())
    assert [(list(one.token_ids), one.text, one.finish_reason) for one in done] == [r.output for r in alone]


def test_an_idle_engine_captures_for_requests_that_are_expected(
    target: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round at a time, so that who comes meanwhile waits for one; it goes on after them."""
    seen: list[tuple[str, Any, int]] = []
    idle, came = threading.Event(), threading.Event()

    def noted(self: Any, params: Any, most: int) -> int:
        if self.has_work:
            return 0
        seen.append((threading.current_thread().name, params, most))
        if len(seen) == 3:
            idle.set()
            came.wait(60)
        return int(len(seen) < 6)

    added: list[int] = []
    add = spd.runtime.engine.engine.Engine.add
    monkeypatch.setattr(spd.runtime.engine.engine.Engine, "capture_ahead", noted)
    monkeypatch.setattr(
        spd.runtime.engine.engine.Engine, "add", lambda *given: (added.append(len(seen)), add(*given))
    )

    async def main() -> list[Any]:
        with AsyncEngine(config(target), expected=PARAMS[:2]) as engine:
            assert await asyncio.to_thread(idle.wait, 60)
            task = asyncio.create_task(engine.generate(REQUESTS[2]))
            await asyncio.sleep(0.05)
            came.set()
            done = await task
            while len(seen) < 6:
                await asyncio.sleep(0.01)
            return [done]

    (done,) = asyncio.run(main())
    assert list(done.token_ids) == alone[2].tokens and added == [3]
    assert seen[:6] == [("spd engine", PARAMS[:2], 1)] * 6


def test_who_stops_listening_aborts_and_who_is_refused_is_told(target: Path, alone: list[Any]) -> None:
    async def main() -> None:
        with AsyncEngine(config(target)) as engine:
            long = Request("long", PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
            task = asyncio.create_task(engine.generate(long))
            stream = engine.stream(Request("other", PROMPTS[1], SamplingParams(max_tokens=200)))
            assert (await anext(stream)).request_id == "other"
            with pytest.raises(UsageError, match="already running"):
                await engine.generate(Request("other", PROMPTS[1], PARAMS[1]))
            await stream.aclose()  # type: ignore[attr-defined]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert list((await engine.generate(REQUESTS[2])).token_ids) == alone[2].tokens
            assert engine.engine._scheduler.by_id == {}

    asyncio.run(main())


def test_a_consumer_that_fails_or_a_loop_that_ends_holds_up_no_other(target: Path, alone: list[Any]) -> None:
    """An exception between two events, and a loop gone while its request still runs; then a fresh loop."""
    long = SamplingParams(max_tokens=200, ignore_eos=True)

    async def fails(engine: AsyncEngine) -> None:
        async for _ in engine.stream(Request("long", PROMPTS[0], long)):
            raise ZeroDivisionError

    async def leaves(engine: AsyncEngine) -> None:
        await anext(engine.stream(Request("left", PROMPTS[0], long)))

    async def works(engine: AsyncEngine) -> list[int]:
        return list((await engine.generate(REQUESTS[2])).token_ids)

    with AsyncEngine(config(target)) as engine:
        with pytest.raises(ZeroDivisionError):
            asyncio.run(fails(engine))
        asyncio.run(leaves(engine))
        closing: Any = asyncio.new_event_loop()
        closing.close()
        closing.is_closed = lambda: False  # it closes right after it was looked at
        spd.runtime.engine.async_engine._tell(closing, asyncio.Queue(), EngineError("gone"))
        del closing.is_closed
        assert asyncio.run(works(engine)) == alone[2].tokens
        assert engine.engine._scheduler.by_id == {}


def test_the_thread_that_steps_uses_the_engines_device(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current device is each thread's own, and the first one unless it is set."""
    seen: list[tuple[str, str]] = []

    def noted(device: str) -> None:
        seen.append((threading.current_thread().name, device))

    monkeypatch.setattr(assembly, "use_device", noted)
    AsyncEngine(config(target)).close()
    assert seen == [("spd engine", "cpu")]


def test_a_failed_engine_tells_everyone_and_stays_failed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = AsyncEngine(config(target))
        monkeypatch.setattr(engine.engine._device, "launch", lambda *_: 1 // 0)
        results = await asyncio.gather(*map(engine.generate, REQUESTS), return_exceptions=True)
        assert len(results) == 6 and all(isinstance(error, EngineError) for error in results), results
        with pytest.raises(EngineError, match="division"):
            await engine.generate(REQUESTS[0])
        engine.close()

    asyncio.run(main())
    assert all(thread.name != "spd engine" for thread in threading.enumerate())
