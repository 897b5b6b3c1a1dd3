"""An engine for asyncio: one thread around `Engine`, and no other logic."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spd.errors import EngineError
from spd.runtime.config import EngineConfig
from spd.runtime.engine import Engine
from spd.runtime.progress import Progress
from spd.runtime.request import Completion, CompletionParts, Event, Request, SamplingParams
from spd.runtime.transfer import use_device

_Params = Collection[SamplingParams]
_Stream = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[Event | BaseException]"]


@dataclass(frozen=True)
class _Order:
    """Run a request and tell its stream, or, with `stop`, forget about it."""

    request: Request
    stream: _Stream
    stop: bool = False


class AsyncEngine:
    """Requests from any number of tasks; the engine belongs to a thread of its own.

    Who listens slowly holds up nobody. Should the engine fail, every request under way and every later
    one raises EngineError. Close it, or use it as a context manager.
    While idle it captures what requests like the `expected` will run; see `Engine.capture_ahead`.

    >>> import asyncio
    >>> from spd import AsyncEngine, EngineConfig, Request, SamplingParams, demo_folder
    >>> async def main():
    ...     config = EngineConfig(model=demo_folder(), slots=2, ctx=256, threads=1)
    ...     with AsyncEngine(config) as engine:
    ...         requests = [Request(name, (70, 71), SamplingParams(max_tokens=4)) for name in "ab"]
    ...         return await asyncio.gather(*map(engine.generate, requests))
    >>> [len(one.token_ids) for one in asyncio.run(main())]
    [4, 4]
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, expected: _Params = (SamplingParams(),)
    ) -> None:
        self.engine, self._expected = Engine(config, progress), expected
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while an order is placed, and while the end of all orders is declared."""
        self._streams: dict[str, _Stream] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spd engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs, and the thread."""
        self._orders.put(None)
        self._thread.join()

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Run one request, yielding events as they come; stopping to listen aborts it.

        Raises what `Engine.add` raises, and EngineError where the engine has failed or is closed.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        stream = (loop, events)
        with self._lock:
            if self._failure is not None:
                raise _failed(self._failure)
            self._orders.put(_Order(request, stream))
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._orders.put(_Order(request, stream, stop=True))

    async def generate(self, request: Request) -> Completion:
        """Run one request to its end; raises as `stream` does."""
        parts = CompletionParts()
        async for event in self.stream(request):
            parts.take(event)
        return parts.completion(request.id, self.engine.metrics(request.id))

    # -- in the engine's thread --------------------------------------------------------------------

    def _carry_out(self, order: _Order) -> None:
        name = order.request.id
        if order.stop:
            if self._streams.get(name) is order.stream:
                del self._streams[name]
                self.engine.abort(name)
            return
        try:
            self.engine.add(order.request)
        except Exception as error:
            _tell(order.stream, error)
        else:
            self._streams[name] = order.stream

    def _run(self) -> None:
        failure: BaseException = EngineError("the engine was closed")
        try:
            use_device(self.engine.plan.device)
            while self._take_orders():
                for event in self.engine.step():
                    self._deliver(event)
        except BaseException as error:
            failure = error
        with self._lock:
            self._failure = failure
        streams = list(self._streams.values())
        while not self._orders.empty():
            order = self._orders.get()
            if order is not None and not order.stop:
                streams.append(order.stream)
        for stream in streams:
            _tell(stream, _failed(failure))
        self.engine.close()

    def _take_orders(self) -> bool:
        """Carry out what was asked for, waiting for it while there is nothing to do; False at the end."""
        while True:
            while self._orders.empty() and self.engine.capture_ahead(self._expected, most=1):
                pass
            try:
                order = self._orders.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            self._carry_out(order)

    def _deliver(self, event: Event) -> None:
        stream = self._streams.get(event.request_id)
        if stream is not None:
            if event.finish_reason is not None:
                del self._streams[event.request_id]
            _tell(stream, event)


def _tell(stream: _Stream, message: Any) -> None:
    loop, events = stream
    with suppress(RuntimeError):  # its loop is closed: nobody listens any more
        loop.call_soon_threadsafe(events.put_nowait, message)


def _failed(error: BaseException | None) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(f"the engine failed: {error}")
