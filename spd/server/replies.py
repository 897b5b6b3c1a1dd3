"""Replies while they grow: the base of each API's form of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from spd.conversation.reply import Part, PartDelta, ReplyBuilder
from spd.errors import EngineError
from spd.server.errors import ApiError, as_api_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from spd.conversation.settings import PreparedRequest
    from spd.runtime import Event, Request, RequestMetrics
    from spd.runtime.engine.driver import Update
    from spd.server.api_request import Generation
    from spd.server.service import Service

PING_SECONDS = 15.0
"""Seconds after which a stream sends a sign of life.

A long prompt takes minutes, and agents give up after some.
"""


class RequestGroup:
    """Requests that are answered together; they begin when the group is made.

    on_update: called in the event loop with a request's number and each update to it. At most as
    many requests run or wait as the server decodes together; the others follow as those end.
    `close` has to be called in any case: it aborts, within a round, the requests that still run.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        on_update: Callable[[int, Update], None],
    ) -> None:
        self._service = service
        self._requests = requests
        self._on_update = on_update
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()
        self._waiting = iter(range(len(requests)))
        """Numbers of the requests that have not begun."""
        for _ in range(service.slots):
            self._begin_next_request()

    def _begin_next_request(self) -> None:
        """Submit the next request to the engine, if there is one.

        Raises EngineError if the engine has ended.
        """
        index = next(self._waiting, None)
        if index is None:
            return
        self._service.thread.submit(self._requests[index], partial(self._receive_update, index))
        self._open.add(index)
        self._service.open_requests += 1

    def _receive_update(self, index: int, update: Update) -> None:
        """Pass an update from the engine's thread to the event loop."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._handle_update, index, update)

    def _handle_update(self, index: int, update: Update) -> None:
        """Count a request's end, pass the update on; begin the next request behind a last one."""
        reason = "error" if isinstance(update, BaseException) else update.finish_reason
        if reason is not None:
            self._open.discard(index)
            self._service.count_ended(self.metrics(index), reason)
        self._on_update(index, update)
        if reason not in (None, "error"):
            try:
                self._begin_next_request()
            except EngineError as error:
                self._on_update(index, error)

    def metrics(self, index: int) -> RequestMetrics:
        """Return a request's counters."""
        return self._service.thread.metrics(self._requests[index].id)

    def close(self) -> None:
        """Abort the requests that run, and begin none of the others."""
        self._waiting = iter(range(0))
        for index in self._open:
            self._service.thread.end(self._requests[index].id)


class TokenCounts(NamedTuple):
    """Tokens of a reply's choices; those of a prompt count once for all of its choices."""

    prompt: int
    cached: int
    """Tokens of prompts that were in the cache."""
    completion: int
    reasoning: int
    """Tokens of replies that are thinking."""


class Reply:
    """The choices of a generation in one API's form, as a stream or one body: an ASGI application.

    Its requests begin when it is made, and end with it.
    """

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
                index,
                prepared_request.inside_thinking,
                generation.tools,
                tokenizer,
                marks=vocabulary.marks,
                notes=generation.notes,
            )
            for index, prepared_request in enumerate(prepared)
        ]
        first = prepared[0].request
        self._id = first.id
        self._prompt_length = len(first.prompt_ids)
        self._created = int(time.time())
        self._prompt_tokens = sum(
            len(prepared_request.request.prompt_ids)
            for prepared_request in prepared[:: self._request.n]
        )
        self._reply_tokens = 0
        """Tokens of all choices so far."""
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        requests = [prepared_request.request for prepared_request in prepared]
        self._group = RequestGroup(
            service, requests, lambda index, update: self._updates.put_nowait((index, update))
        )

    @property
    def _has_ended(self) -> bool:
        """True if all choices have ended."""
        return all(choice.finish_reason is not None for choice in self._choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply, as a stream if the request asks for one; then end its requests."""
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response, StreamingResponse

        try:
            if self._request.stream:
                headers = {"cache-control": "no-cache"}
                response: Response = StreamingResponse(
                    self._stream_chunks(), 200, headers, "text/event-stream"
                )
            else:
                request = Request(scope, receive)
                while not (self._has_ended or await request.is_disconnected()):
                    await self._next_event(0.2)
                if not self._has_ended:
                    return
                response = JSONResponse(self.full_body())
            await response(scope, receive, send)
        finally:
            self._group.close()

    async def _next_event(
        self, seconds: float
    ) -> tuple[ReplyBuilder, Event, list[PartDelta]] | None:
        """Add the next event to its choice; return choice, event and what it added.

        None after `seconds` without an event. Raises the exception that ended the generation.
        """
        try:
            index, update = await asyncio.wait_for(self._updates.get(), seconds)
        except asyncio.TimeoutError:
            return None
        if isinstance(update, BaseException):
            raise update
        if update.finish_reason == "error":
            message = update.error or "the model failed while generating"
            raise ApiError(500, message, code="generation_failed")
        event = self._visible_event(index, update)
        self._reply_tokens += len(event.token_ids)
        grown = self._choices[index].add_event(event)
        self._assign_logprobs(event, grown)
        if malformed := len(self._choices[index].malformed_call_notes):
            self._service.counters["malformed_calls_total"] += malformed
        return self._choices[index], event, grown

    def _assign_logprobs(self, event: Event, grown: Sequence[PartDelta]) -> None:
        """Assign an event's log-probabilities to the parts that it added to."""

    def _visible_event(self, index: int, event: Event) -> Event:
        """Return an event of a choice as the reply shows it."""
        return event

    async def _stream_chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks of the stream, of an error too, and signs of life between them."""
        try:
            has_begun = False
            while not self._has_ended:
                growth = await self._next_event(PING_SECONDS)
                for data in (
                    () if has_begun else self.start_chunks(self._group.metrics(0).cached_tokens)
                ):
                    yield data
                has_begun = True
                if growth is None:
                    yield self.ping_chunk()
                    continue
                choice, event, grown = growth
                for data in self.event_chunks(choice, event, grown):
                    yield data
            for data in self.end_chunks():
                yield data
        except Exception as error:
            refusal = as_api_error(error)
            self._service.counters[f'refused_total{{status="{refusal.status}"}}'] += 1
            for data in self.error_chunks(refusal):
                yield data

    def start_chunks(self, cached: int) -> Iterator[bytes]:
        """Yield the first chunks of a stream. cached: tokens of the prompt that were in the
        cache.
        """
        yield from ()

    def event_chunks(
        self, choice: ReplyBuilder, event: Event, grown: Sequence[PartDelta]
    ) -> Iterator[bytes]:
        """Yield the chunks of an event: a part ends where the next one begins."""
        for part, text, begins in grown:
            if begins and part.index:
                yield from self._part_end(choice.parts[part.index - 1])
            if begins:
                yield from self._part_start(dataclasses.replace(part, text=""))
            yield self._part_delta(part, text)
        if event.finish_reason is not None and choice.parts:
            yield from self._part_end(choice.parts[-1])

    # Chunks at a part's start, for a piece of it and at its end; chunks at the end of a stream, and
    # behind an error; the body of a reply that is not streamed.
    _part_start: Callable[[Part], Iterator[bytes]]
    _part_delta: Callable[[Part, str], bytes]
    _part_end: Callable[[Part], Iterator[bytes]]
    end_chunks: Callable[[], Iterator[bytes]]
    error_chunks: Callable[[ApiError], Iterator[bytes]]
    full_body: Callable[[], Mapping[str, object]]

    def ping_chunk(self) -> bytes:
        """Return the chunk of a stream that shows that it goes on."""
        return b": ping\n\n"

    @property
    def _metrics(self) -> list[RequestMetrics]:
        """Return the counters of each choice."""
        return [self._group.metrics(choice.index) for choice in self._choices]

    @property
    def _token_counts(self) -> TokenCounts:
        """Return the tokens of all choices."""
        all_metrics = self._metrics
        prompts = all_metrics[:: self._request.n]
        return TokenCounts(
            prompt=sum(metrics.prompt_tokens for metrics in prompts),
            cached=sum(metrics.cached_tokens for metrics in prompts),
            completion=sum(metrics.completion_tokens for metrics in all_metrics),
            reasoning=sum(choice.reasoning_tokens for choice in self._choices),
        )


def sse_event(value: Mapping[str, object], name: str = "") -> bytes:
    """Return a server-sent event with a value as JSON. name: its type, left out if empty."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()
