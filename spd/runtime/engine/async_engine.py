"""An engine for asyncio: its thread's events, handed to event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from functools import partial

from spd.runtime.engine.driver import Answer, EngineThread
from spd.runtime.engine.engine import Engine
from spd.runtime.engine.request import Completion, Event, Request
from spd.runtime.load.progress import Progress
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.sampling_params import SamplingParams


class AsyncEngine:
    """Requests from any number of tasks; the engine belongs to a thread of its own.

    A slow listener holds up no other. Should the engine fail, every request under way and every later
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
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        expected: Collection[SamplingParams] = (SamplingParams(),),
    ) -> None:
        self._thread = EngineThread(lambda _: Engine(config, progress), lambda: expected, goes_on=False)
        self._thread.start()
        self.engine = self._thread.engine()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs, and the thread."""
        self._thread.close()

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Run one request, yielding events as they come; stopping to listen aborts it.

        Raises what `Engine.add` raises, and EngineError where the engine has failed or is closed.
        """
        loop, answers = asyncio.get_running_loop(), asyncio.Queue[Answer]()
        listener = partial(_tell, loop, answers)
        self._thread.submit(request, listener)
        try:
            while True:
                answer = await answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
                if answer.finish_reason is not None:
                    return
        finally:
            self._thread.forget(request, listener)

    async def generate(self, request: Request) -> Completion:
        """Run one request to its end; raises as `stream` does."""
        done = Completion(request_id=request.id)
        async for event in self.stream(request):
            done.take(event)
        done.metrics = self.engine.metrics(request.id)
        return done


def _tell(loop: asyncio.AbstractEventLoop, answers: asyncio.Queue[Answer], answer: Answer) -> None:
    with suppress(RuntimeError):  # the loop is closed: nothing listens any more
        loop.call_soon_threadsafe(answers.put_nowait, answer)
