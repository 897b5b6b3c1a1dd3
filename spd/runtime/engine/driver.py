"""The loop over an engine's steps, and a thread that runs it.

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

    `should_continue` is called before each step. It adds and aborts requests, and blocks while
    there is nothing to do. `on_out_of_memory` is called where memory ran out: running requests then
    end with an error, and waiting ones continue. Raises what `step` raises.
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


Update = Event | BaseException
"""An event of one request, or the error that ended it."""
Listener = Callable[[Update], None]
"""Called in the engine's thread with each update of one request."""
EngineType = TypeVar("EngineType", bound=EngineClient)
_Command = tuple[Callable[[EngineClient], None], Listener]
"""A function to call with the engine, and the listener that gets the error if it fails."""
CLOSED_MESSAGE = "the engine was closed"


class EngineThread(Generic[EngineType]):
    """An engine in a thread of its own: everything that touches the device happens there.

    build: makes the engine, in the thread, and reports its progress. expected: returns sampling
    parameters of requests to come: while idle the thread captures the rounds that these will run; a
    command waits for one capture at most. Where a step fails, every running request's listener gets
    the error, and the thread continues with the next request. For `on_out_of_memory` see `drive`.
    """

    def __init__(
        self,
        build: Callable[[Progress], EngineType],
        expected: Callable[[], Collection[SamplingParams]],
        on_out_of_memory: Callable[[ResourceError], None] | None = None,
    ) -> None:
        self.progress: LoadProgress | None = None
        self.failure: BaseException | None = None  # the error that loading raised
        self._build = build
        self._expected = expected
        self._on_out_of_memory = on_out_of_memory
        self._engine: EngineType | None = None
        self.ready = threading.Event()
        """Set once loading has ended, with success or failure."""
        self._closing = threading.Event()
        """Set once loading has to be cut short."""
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        """Commands for the thread in order; None ends it."""
        self._lock = threading.Lock()
        """Held while a command is queued, and while `_end_error` is set."""
        self._end_error: BaseException | None = None
        """Raised by `submit` once the thread takes no more commands."""
        self._has_failed = False
        """True after a failed step until the next request: no step is run in between."""
        self._listeners: dict[str, Listener] = {}
        self._thread = threading.Thread(target=self._run_thread, name="spd engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which loads the engine."""
        self._thread.start()

    def engine(self) -> EngineType:
        """Wait until loading has ended and return the engine. Raises what loading raised."""
        self.ready.wait()
        if self._engine is None:
            raise self.failure or EngineError(CLOSED_MESSAGE)
        return self._engine

    def close(self, seconds: float | None = None) -> bool:
        """Abort all requests, close the engine and wait for the thread; return False if it does not
        end within `seconds`.
        """
        self._closing.set()
        self._commands.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- commands from other threads -------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request, whose events and errors go to `listener`.

        Raises EngineError where the thread has ended.
        """

        def begin(engine: EngineClient) -> None:
            """Add the request in the engine's thread."""
            engine.add(request)
            self._listeners[request.id] = listener
            self._has_failed = False

        with self._lock:
            if self._end_error is not None:
                raise self._end_error
            self._commands.put((begin, listener))

    def run(self, request: Request) -> Iterator[Event]:
        """Yield the events of one request until it ends, or `end` ends it.

        Raises what the engine raised.
        """
        self.engine()
        updates = queue.SimpleQueue[Update]()
        finish_reason: str | None = None
        self.submit(request, updates.put)
        try:
            while finish_reason is None:
                update = updates.get()
                if isinstance(update, BaseException):
                    raise update
                finish_reason = update.finish_reason
                yield update
        finally:
            if finish_reason is None:
                self.end(request.id)

    def end(self, request_id: str) -> None:
        """Abort a request after the current round.

        Its listener gets the last event if it had begun.
        """
        self._commands.put((lambda engine: engine.abort(request_id), lambda _: None))

    def metrics(self, request_id: str) -> RequestMetrics:
        """Return a request's counters; all zero if it never began, or the engine was closed."""
        try:
            return self.engine().metrics(request_id)
        except (KeyError, EngineError):
            return RequestMetrics()

    # -- in the thread ---------------------------------------------------------------------------

    def _report_progress(self, progress: LoadProgress) -> None:
        """Set `progress`. Raises EngineError once the engine is closed, which cuts loading
        short.
        """
        if self._closing.is_set():
            raise EngineError(CLOSED_MESSAGE)
        self.progress = progress

    def _run_thread(self) -> None:
        """Build the engine, run it until it is closed, and close it; the thread's function."""
        try:
            self._engine = self._build(self._report_progress)
        except BaseException as error:
            self.failure = error
        self.ready.set()
        end_error = EngineError(CLOSED_MESSAGE)
        if self._engine is None:
            end_error = EngineError(f"there is no engine: {self.failure}")
        else:
            self._run_engine(self._engine)
        with self._lock:
            self._end_error = end_error
        self._fail_all(end_error)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                _, listener = command
                listener(end_error)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()  # another engine may need the memory

    def _run_engine(self, engine: EngineType) -> None:
        """Run commands and steps until the thread has to end; a failed step ends all requests."""
        while True:
            try:
                for events in drive(
                    engine.step, partial(self._run_commands, engine), self._on_out_of_memory
                ):
                    self._deliver_events(events)
                return
            except BaseException as error:
                self._has_failed = True
                for request_id in self._listeners:
                    with suppress(Exception):  # the abort may be what failed
                        engine.abort(request_id)
                self._fail_all(error)

    def _run_commands(self, engine: EngineType) -> bool:
        """Run the queued commands; return False if the thread has to end.

        While the engine is idle this captures rounds ahead, and then blocks until a command comes.
        """
        while True:
            idle = self._has_failed or not engine.has_work
            with suppress(Exception):  # a fault of the engine is raised again by the next request
                while (
                    idle
                    and self._commands.empty()
                    and engine.capture_ahead(self._expected(), limit=1)
                ):
                    pass
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            action, listener = command
            try:
                action(engine)
            except BaseException as error:
                listener(error)

    def _deliver_events(self, events: list[Event]) -> None:
        """Call each event's listener with it; the last event of a request removes its listener."""
        for event in events:
            is_last = event.finish_reason is not None
            look_up = self._listeners.pop if is_last else self._listeners.get
            listener = look_up(event.request_id, None)
            if listener is not None:
                listener(event)

    def _fail_all(self, error: BaseException) -> None:
        """Give every listener an error, and drop them all."""
        listeners = self._listeners
        self._listeners = {}
        for listener in listeners.values():
            listener(error)
