"""A reply while it grows: what each API tells of it builds on this."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from spd.conversation.reply import Part, PartDelta, ReplyBuilder
from spd.errors import EngineError
from spd.server.errors import ApiError, api_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from spd.conversation.settings import PreparedRequest
    from spd.runtime import Event, Request, RequestMetrics
    from spd.runtime.engine.driver import Update
    from spd.server.api_request import Generation
    from spd.server.service import Service

PING_SECONDS = 15.0
"""After which a stream says that it goes on: a long prompt takes minutes, and agents give up after some."""


class RequestGroup:
    """Requests that are answered together: `hear` is told each one's number and what comes, in the loop.

    As many run or wait as the server decodes together; the others follow as those end. `close` it
    whatever happens: what still runs is aborted then, within a round.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        on_answer: Callable[[int, Update], None],
    ) -> None:
        self._service = service
        self._requests = requests
        self._hear = on_answer
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()
        self._rest = iter(range(len(requests)))
        """Numbers of the requests that are still to begin."""
        for _ in range(service.slots):
            self._begin_next()

    def _begin_next(self) -> None:
        """Hand the next request to the engine, if there is one. Raises EngineError where it has ended."""
        index = next(self._rest, None)
        if index is None:
            return
        self._service.thread.submit(self._requests[index], partial(self._take, index))
        self._open.add(index)
        self._service.open += 1

    def _take(self, index: int, answer: Update) -> None:
        with suppress(RuntimeError):  # the loop has ended: nothing listens any more
            self._loop.call_soon_threadsafe(self._tell, index, answer)

    def _tell(self, index: int, answer: Update) -> None:
        reason = "error" if isinstance(answer, BaseException) else answer.finish_reason
        if reason is not None:
            self._open.discard(index)
            self._service.ended(self.metrics(index), reason)
        self._hear(index, answer)
        if reason not in (None, "error"):
            try:
                self._begin_next()
            except EngineError as error:
                self._hear(index, error)

    def metrics(self, index: int) -> RequestMetrics:
        """A request's counters."""
        return self._service.thread.metrics(self._requests[index].id)

    def close(self) -> None:
        """Abort what runs, and begin nothing more."""
        self._rest = iter(range(0))
        for index in self._open:
            self._service.thread.end(self._requests[index].id)


class Reply:
    """What one API tells of a call's choices, streamed or whole, as an ASGI application."""

    def __init__(
        self, service: Service, generation: Generation, prepared: Sequence[PreparedRequest]
    ) -> None:
        self._service = service
        self._generation = generation
        self._request = generation.request
        vocabulary = service.settings.vocabulary
        tokenizer = vocabulary.need_tokenizer()
        self._choices = [
            ReplyBuilder(
                at,
                each.inside_thinking,
                generation.tools,
                tokenizer,
                marks=vocabulary.marks,
                notes=generation.notes,
            )
            for at, each in enumerate(prepared)
        ]
        first = prepared[0].request
        self._name = first.id
        self._size = len(first.prompt_ids)
        self._created = int(time.time())
        self._prompt_tokens = sum(
            len(each.request.prompt_ids) for each in prepared[:: self._request.n]
        )
        self._reply_tokens = 0
        """Tokens of all replies so far."""
        self._answers: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        requests = [each.request for each in prepared]
        self._call = RequestGroup(
            service, requests, lambda *answer: self._answers.put_nowait(answer)
        )

    @property
    def _has_ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response, StreamingResponse

        try:
            if self._request.stream:
                headers = {"cache-control": "no-cache"}
                response: Response = StreamingResponse(
                    self._stream(), 200, headers, "text/event-stream"
                )
            else:
                request = Request(scope, receive)
                while not (self._has_ended or await request.is_disconnected()):
                    await self._take(0.2)
                if not self._has_ended:
                    return
                response = JSONResponse(self.whole())
            await response(scope, receive, send)
        finally:
            self._call.close()

    async def _take(self, seconds: float) -> tuple[ReplyBuilder, Event, list[PartDelta]] | None:
        """The next event with what it added to its choice; None where none comes. Raises what ended it."""
        try:
            index, event = await asyncio.wait_for(self._answers.get(), seconds)
        except asyncio.TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        if event.finish_reason == "error":
            why = event.error or "the model failed while generating"
            raise ApiError(500, why, code="generation_failed")
        event = self._heard(index, event)
        self._reply_tokens += len(event.token_ids)
        grown = self._choices[index].add_event(event)
        self._score(event, grown)
        if malformed := len(self._choices[index].malformed_calls):
            self._service.counters["malformed_calls_total"] += malformed
        return self._choices[index], event, grown

    def _score(self, event: Event, grown: Sequence[PartDelta]) -> None:
        """Note which log-probabilities belong to what an event added."""

    def _heard(self, index: int, event: Event) -> Event:
        """Return an event of a choice as the reply is to show it."""
        return event

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            begun = False
            while not self._has_ended:
                taken = await self._take(PING_SECONDS)
                for data in () if begun else self.begin(self._call.metrics(0).cached_tokens):
                    yield data
                begun = True
                for data in (self.ping(),) if taken is None else self.grow(*taken):
                    yield data
            for data in self.end():
                yield data
        except Exception as error:
            refusal = api_error(error)
            self._service.counters[f'refused_total{{status="{refusal.status}"}}'] += 1
            for data in self.fail(refusal):
                yield data

    def begin(self, cached: int) -> Iterator[bytes]:
        """What a stream begins with, as far as it is known by then how much of the prompt was cached."""
        yield from ()

    def grow(
        self, choice: ReplyBuilder, event: Event, grown: Sequence[PartDelta]
    ) -> Iterator[bytes]:
        """What a stream tells of an event: a part ends where the next one begins."""
        for part, text, begins in grown:
            if begins and part.index:
                yield from self._last(choice.parts[part.index - 1])
            if begins:
                yield from self._first(dataclasses.replace(part, text=""))
            yield self._more(part, text)
        if event.finish_reason is not None and choice.parts:
            yield from self._last(choice.parts[-1])

    # What a part begins with, grows by and ends with; what a stream ends with, well or not; a whole reply.
    _first: Callable[[Part], Iterator[bytes]]
    _more: Callable[[Part, str], bytes]
    _last: Callable[[Part], Iterator[bytes]]
    end: Callable[[], Iterator[bytes]]
    fail: Callable[[ApiError], Iterator[bytes]]
    whole: Callable[[], dict[str, Any]]

    def ping(self) -> bytes:
        """What a stream says while nothing comes."""
        return b": ping\n\n"

    @property
    def _metrics(self) -> list[RequestMetrics]:
        """The counters of each choice."""
        return [self._call.metrics(choice.index) for choice in self._choices]

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        """Tokens of prompts (each counts once), the cached ones, those of replies, those of thinking."""
        each = self._metrics
        prompts = each[:: self._request.n]
        return (
            sum(one.prompt_tokens for one in prompts),
            sum(one.cached_tokens for one in prompts),
            sum(one.completion_tokens for one in each),
            sum(choice.reasoning_tokens for choice in self._choices),
        )


def sse(value: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()
