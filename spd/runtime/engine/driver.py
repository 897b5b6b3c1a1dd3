"""What drives an engine: the loop over its steps, and a thread for it.

No torch here: the command line builds on this before it loads anything.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from spd.errors import EngineError, ResourceError
from spd.runtime.engine.client import EngineClient
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.engine.request import Event, Request

if TYPE_CHECKING:
    from spd.runtime.load.progress import LoadProgress, Progress
    from spd.runtime.round.sampling_params import SamplingParams


def drive(
    step: Callable[[], list[Event]],
    should_continue: Callable[[], bool],
    on_out_of_memory: Callable[[ResourceError], None] | None = None,
) -> Iterator[list[Event]]:
    """Yield the events of each step of an engine, as long as `should_continue` returns True.

    `should_continue` is called before each step. It adds and aborts requests, and blocks while there is
    nothing to do. `on_out_of_memory` is called where memory ran out: running requests then end with an
    error, and waiting ones continue. Raises what `step` raises.
    """
    while should_continue():
        try:
            events = step()
        except ResourceError as error:
            if on_out_of_memory is None:
                raise
            on_out_of_memory(error)
            events = []
        yield events


Answer = Event | BaseException
Listener = Callable[[Answer], None]  # hears of one request, in the engine's thread
E = TypeVar("E", bound=EngineClient)
_Order = tuple[Callable[[EngineClient], None], Listener]
"""What to do with the engine, and what hears that it failed."""
CLOSED = "the engine was closed"


class EngineThread(Generic[E]):
    """An engine in a thread of its own: everything that touches the device happens there.

    `build` makes the engine in the thread and reports its progress. While idle the thread captures rounds
    that requests with the `expected` parameters will run; a command waits for one capture at most. Where a
    step fails, every running request's listener gets the error, and the thread continues with the next
    request. For `on_out_of_memory` see `drive`.
    """

    def __init__(
        self,
        build: Callable[[Progress], E],
        expected: Callable[[], Collection[SamplingParams]],
        on_out_of_memory: Callable[[ResourceError], None] | None = None,
    ) -> None:
        self.progress: LoadProgress | None = None
        self.failure: BaseException | None = None  # why there is no engine
        self._build = build
        self._expected = expected
        self._on_out_of_memory = on_out_of_memory
        self._engine: E | None = None
        self.ready = threading.Event()
        self._leave = threading.Event()
        """Whether loading has ended, well or not; whether it is to end."""
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()  # None ends the thread
        self._lock = threading.Lock()
        """Held while an order is placed, and while the end of all orders is declared."""
        self._ended: BaseException | None = None
        self._broken = False
        """Whether a step failed since the last request: the engine is left alone until the next one."""
        self._listeners: dict[str, Listener] = {}
        self._thread = threading.Thread(target=self._work, name="spd engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def engine(self) -> E:
        """The engine, once it is loaded. Raises what loading raised."""
        self.ready.wait()
        if self._engine is None:
            raise self.failure or EngineError(CLOSED)
        return self._engine

    def close(self, seconds: float | None = None) -> bool:
        """End what runs and let go of the engine; False if the thread does not come back in time."""
        self._leave.set()
        self._orders.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- orders ----------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> None:
        """Run a request. Raises EngineError where the thread has ended; the listener hears other errors."""

        def begin(engine: EngineClient) -> None:
            engine.add(request)
            self._listeners[request.id] = listener
            self._broken = False

        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._orders.put((begin, listener))

    def run(self, request: Request) -> Iterator[Event]:
        """Decode one request to its end, or to where `end` cut it. Raises what the engine raised."""
        self.engine()
        answers = queue.SimpleQueue[Answer]()
        reason: str | None = None
        self.submit(request, answers.put)
        try:
            while reason is None:
                answer = answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                reason = answer.finish_reason
                yield answer
        finally:
            if reason is None:
                self.end(request.id)

    def end(self, name: str) -> None:
        """End a request after the round that is under way, if it has begun; its listener hears of it."""
        self._orders.put((lambda engine: engine.abort(name), lambda _: None))

    def metrics(self, request_id: str) -> RequestMetrics:
        """A request's counters; all zero if it never began, or the engine was let go of."""
        try:
            return self.engine().metrics(request_id)
        except (KeyError, EngineError):
            return RequestMetrics()

    # -- in the thread ---------------------------------------------------------------------------

    def _report(self, progress: LoadProgress) -> None:
        if self._leave.is_set():
            raise EngineError(CLOSED)
        self.progress = progress

    def _work(self) -> None:
        try:
            self._engine = self._build(self._report)
        except BaseException as error:
            self.failure = error
        self.ready.set()
        ended = EngineError(CLOSED)
        if self._engine is None:
            ended = EngineError(f"there is no engine: {self.failure}")
        else:
            self._run(self._engine)
        with self._lock:
            self._ended = ended
        self._tell_all(ended)
        while not self._orders.empty():
            if (order := self._orders.get()) is not None:
                order[1](ended)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()  # another engine may want the memory

    def _run(self, engine: E) -> None:
        """Carry out orders until there are no more."""
        while True:
            try:
                for events in drive(
                    engine.step, partial(self._take_orders, engine), self._on_out_of_memory
                ):
                    self._deliver(events)
                return
            except BaseException as error:
                self._broken = True
                for name in self._listeners:
                    with suppress(Exception):  # it may be what failed
                        engine.abort(name)
                self._tell_all(error)

    def _take_orders(self, engine: E) -> bool:
        """Carry out what was asked for, waiting for it while there is nothing to do; False at the end."""
        while True:
            idle = self._broken or not engine.has_work
            with suppress(Exception):  # a fault of the engine is told when a request meets it
                while (
                    idle
                    and self._orders.empty()
                    and engine.capture_ahead(self._expected(), limit=1)
                ):
                    pass
            try:
                order = self._orders.get(block=idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            act, listener = order
            try:
                act(engine)
            except BaseException as error:
                listener(error)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            find = self._listeners.get if event.finish_reason is None else self._listeners.pop
            if (listener := find(event.request_id, None)) is not None:
                listener(event)

    def _tell_all(self, error: BaseException) -> None:
        listeners = self._listeners
        self._listeners = {}
        for listener in listeners.values():
            listener(error)
