"""The engine in a thread of its own: it loads while people type, and stops between two rounds when asked.

Everything that touches the device happens in that thread, for a current device belongs to a thread.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from spd.errors import EngineError

if TYPE_CHECKING:
    from spd.runtime import Engine, EngineConfig, Event, Request, RequestMetrics
    from spd.runtime.progress import LoadProgress
    from spd.runtime.request import SamplingParams

LEAVE_SECONDS = 5.0


class LoadingStopped(Exception):
    """Loading was given up on request."""


class EngineThread:
    """Builds an engine and runs one request at a time; `on_ready` is called in the thread, before
    anyone learns that loading has ended.

    While there is nothing to do rounds are captured that requests with the `expected` parameters will run.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_ready: Callable[[], None],
        expected: Callable[[], SamplingParams],
    ) -> None:
        self.config, self._expected = config, expected
        self.progress: LoadProgress | None = None
        self.failure: BaseException | None = None
        self._engine: Engine | None = None
        self._on_ready = on_ready
        self._ready, self._stop, self._leave = threading.Event(), threading.Event(), threading.Event()
        self._orders: queue.SimpleQueue[Request | Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether loading has ended, well or not."""
        return self._ready.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait so long for the end of loading; whether it has come."""
        return self._ready.wait(seconds)

    def engine(self) -> Engine:
        """The engine, once it is loaded. Raises what loading raised."""
        if self._engine is None:
            self._ready.wait()
        if self._engine is None:
            raise self.failure or LoadingStopped
        return self._engine

    def run(self, request: Request) -> Iterator[Event]:
        """Decode one request to its end, or to where `stop` cut it. Raises what the engine raised."""
        yield from self._carry_out(request)

    def call(self, work: Callable[[Engine], None]) -> None:
        """Have the engine's thread do something with the engine, and wait. Raises what it raises."""
        for _ in self._carry_out(work):
            pass

    def _carry_out(self, order: Request | Callable[[Engine], None]) -> Iterator[Event]:
        self.engine()
        self._stop.clear()
        self._orders.put(order)
        while (answer := self._answer()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    def _answer(self) -> Event | BaseException | None:
        while True:
            with suppress(queue.Empty):
                return self._answers.get(timeout=1.0)
            if not self._thread.is_alive():
                return EngineError("the thread of the engine has ended")

    def stop(self) -> None:
        """End the running request after the round that is under way."""
        self._stop.set()

    def metrics(self, request_id: str) -> RequestMetrics:
        """A request's counters; all zero if it never began, or the engine was let go of."""
        from spd.runtime import RequestMetrics

        try:
            return self.engine().metrics(request_id)
        except (KeyError, LoadingStopped):
            return RequestMetrics()

    def close(self) -> bool:
        """Stop whatever runs and let go of the engine; False if the thread does not come back."""
        self._leave.set()
        self._stop.set()
        self._orders.put(None)
        self._thread.join(LEAVE_SECONDS)
        return not self._thread.is_alive()

    def _work(self) -> None:
        from spd.runtime import Engine

        try:
            self._engine = Engine(self.config, progress=self._report)
        except BaseException as error:
            self.failure = error
        self._on_ready()
        self._ready.set()
        while self._engine is not None and (order := self._next_order(self._engine)) is not None:
            try:
                if callable(order):
                    order(self._engine)
                else:
                    self._decode(self._engine, order)
                self._answers.put(None)
            except BaseException as error:
                self._answers.put(error)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()  # another engine may want the memory

    def _next_order(self, engine: Engine) -> Request | Callable[[Engine], None] | None:
        """Wait for an order; who gives one waits for one capture at most."""
        with suppress(Exception):  # a fault of the engine is told to who needs it
            while self._orders.empty() and engine.capture_ahead([self._expected()], most=1):
                pass
        return self._orders.get()

    def _report(self, progress: LoadProgress) -> None:
        if self._leave.is_set():
            raise LoadingStopped
        self.progress = progress

    def _decode(self, engine: Engine, request: Request) -> None:
        engine.add(request)
        aborted = False
        while engine.has_work:
            if self._stop.is_set() and not aborted:
                engine.abort(request.id)
                aborted = True
            for event in engine.step():
                self._answers.put(event)
