"""A reply while it grows: what each API tells of it builds on this."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.serve.body import ApiError, api_error
from spd.cli.serve.forms import GUESSED, MARKS, UNKNOWN_FORM, CallParser, Piece, Tools
from spd.cli.text.prompt import ThinkingSplitter
from spd.cli.text.reply import UNANSWERED
from spd.cli.text.thinking import MarkedText, ThinkingCount
from spd.errors import EngineError
from spd.formats.thinking import KNOWN, ThinkingMarks

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from spd.cli.serve.http import Service
    from spd.cli.serve.wishes import Wish
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Event, Request, RequestMetrics
    from spd.runtime.engine.driver import Answer
    from spd.runtime.engine.request import TokenLogprob

    Prepared = tuple[Request, bool | None]
    """A request, and how its reply is parted: see `ThinkingSplitter`."""

PING_SECONDS = 15.0
"""After which a stream says that it goes on: a long prompt takes minutes, and agents give up after some."""


@dataclass
class Part:
    """Thinking, text, or a call with its arguments as `text`; `index` is its place in the reply."""

    kind: Literal["thinking", "text", "call"]
    index: int
    text: str = ""
    name: str = ""
    id: str = ""


Grown = tuple[Part, str, bool]
"""A part, what an event added to it, and whether it begins with that."""


def call_of(part: Part) -> dict[str, Any]:
    """A call as chat completions write it."""
    return {
        "id": part.id,
        "type": "function",
        "function": {"name": part.name, "arguments": part.text},
    }


class Choice:
    """One reply while it grows: its parts in the order in which they come."""

    def __init__(
        self,
        index: int,
        inside: bool | None,
        tools: Tools | None,
        tokenizer: Tokenizer,
        marks: ThinkingMarks = KNOWN,
        notes: Sequence[str] = (),
    ) -> None:
        """notes: what is said of how the reply was made."""
        self.index = index
        self._tools = tools
        self._notes = notes
        self.stop: str | None = None
        """The stop string that ended it, if one did."""
        self._parser = CallParser(tools) if tools else None
        self._splitter = ThinkingSplitter(inside, marks)
        self._count = ThinkingCount(inside, tokenizer.token_bytes, marks)
        special = tokenizer.special_tokens.items() if tools else ()
        silent = {i: mark for mark, i in special if mark in MARKS and not tokenizer.token_bytes(i)}
        self._marked = MarkedText(silent, tokenizer.token_bytes)
        self.parts: list[Part] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason: str | None = None
        """Why it ended: stop, length or abort."""
        self._unanswered = False
        """Whether it ended while it was thinking."""

    @property
    def reasoning_tokens(self) -> int:
        """Return how many of its tokens are thinking."""
        return self._count.tokens

    def take(self, event: Event) -> list[Grown]:
        """Add an event; returns what it brought."""
        final = event.finish_reason is not None
        self.logprobs += event.logprobs
        self.reason = "stop" if event.finish_reason == "abort" else event.finish_reason
        self._count.take(event.token_ids)
        self.stop = event.stop
        pieces: list[Piece] = []
        text = self._marked.take(event.token_ids, event.text)
        for thinking, part in self._splitter.feed(text, final=final):
            if thinking or self._parser is None:
                pieces.append(Piece("thinking" if thinking else "text", part))
            else:
                pieces += self._parser.feed(part)
        if final and self._parser is not None:
            pieces += self._parser.feed("", final=True)
        grown = [self._grow(piece) for piece in pieces if piece.text or piece.name]
        if final and self._splitter.thinking:
            grown += [self._grow(piece) for piece in self._calls_at_the_end()]
        if final and (self._splitter.thinking or self.all("thinking")):
            self._unanswered = not self.calls and not self.all("text").strip()
        return grown

    def _calls_at_the_end(self) -> list[Piece]:
        """Return the calls that thinking ends with: a model that stops behind them means them."""
        if self._tools is None or self.reason != "stop":
            return []
        known, parser = self._tools.functions, CallParser(self._tools)
        pieces = [*parser.feed(self.all("thinking")), *parser.feed("", final=True)]
        first = len(pieces)
        while first and (pieces[first - 1].kind == "call" or not pieces[first - 1].text.strip()):
            first -= 1
        calls = [piece for piece in pieces[first:] if piece.kind == "call"]
        return calls if all(call.name in known for call in calls if call.name) else []

    def _grow(self, piece: Piece) -> Grown:
        begins = bool(piece.name) or not self.parts or self.parts[-1].kind != piece.kind
        if begins:
            name = piece.id  # Kimi's templates write it where the name would stand
            if not name or name in [call.id for call in self.calls]:
                name = secrets.token_hex(5)[1:]  # nine characters are what Mistral wants
            self.parts.append(Part(piece.kind, len(self.parts), "", piece.name or "", name))
        self.parts[-1].text += piece.text
        return self.parts[-1], piece.text, begins

    def all(self, kind: str) -> str:
        """The text of all parts of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def calls(self) -> list[Part]:
        """The calls in it."""
        return [part for part in self.parts if part.kind == "call"]

    @property
    def malformed(self) -> Sequence[str]:
        """Return what an ended reply says of malformed calls, which are text."""
        return self._parser.notes if self._parser is not None and self.reason is not None else ()

    @property
    def noted(self) -> dict[str, Any]:
        """Return what is said of an ended reply beside its text; nothing where all is well."""
        notes = [*self._notes, *self.malformed]
        if self._unanswered:
            notes.append(UNANSWERED)
        tools = self._tools
        is_guessed = tools is not None and tools.form is GUESSED and not tools.required
        if is_guessed and not self.calls:
            notes.append(UNKNOWN_FORM)
        return {"notes": notes} if notes else {}

    def message(self) -> dict[str, Any]:
        """The whole reply as a message of a chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.all("text")}
        if thought := self.all("thinking"):
            message["reasoning_content"] = thought.strip("\n")
        if self.calls:
            message["tool_calls"] = [call_of(part) for part in self.calls]
        return message


class Call:
    """Requests that are answered together: `hear` is told each one's number and what comes, in the loop.

    As many run or wait as the server decodes together; the others follow as those end. `close` it
    whatever happens: what still runs is aborted then, within a round.
    """

    def __init__(
        self, service: Service, requests: Sequence[Request], hear: Callable[[int, Answer], None]
    ) -> None:
        self._service, self._requests, self._hear = service, requests, hear
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

    def _take(self, index: int, answer: Answer) -> None:
        with suppress(RuntimeError):  # the loop has ended: nothing listens any more
            self._loop.call_soon_threadsafe(self._tell, index, answer)

    def _tell(self, index: int, answer: Answer) -> None:
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

    def __init__(self, service: Service, wish: Wish, prepared: Sequence[Prepared]) -> None:
        self._service, self._wish = service, wish
        vocabulary = service.settings.vocabulary
        tokenizer = vocabulary.need_tokenizer()
        self._choices = [
            Choice(at, inside, wish.tools, tokenizer, vocabulary.marks, wish.notes)
            for at, (_, inside) in enumerate(prepared)
        ]
        self._name, self._size = prepared[0][0].id, len(prepared[0][0].prompt_ids)
        self._created = int(time.time())
        self._prompt_tokens = sum(
            len(request.prompt_ids) for request, _ in prepared[:: wish.body.get("n", 1)]
        )
        self._reply_tokens = 0
        """Tokens of all replies so far."""
        self._answers: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()
        requests = [request for request, _ in prepared]
        self._call = Call(service, requests, lambda *answer: self._answers.put_nowait(answer))

    @property
    def _has_ended(self) -> bool:
        return all(choice.reason is not None for choice in self._choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response, StreamingResponse

        try:
            if self._wish.body.get("stream"):
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

    async def _take(self, seconds: float) -> tuple[Choice, Event, list[Grown]] | None:
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
        grown = self._choices[index].take(event)
        self._score(event, grown)
        if malformed := len(self._choices[index].malformed):
            self._service.counters["malformed_calls_total"] += malformed
        return self._choices[index], event, grown

    def _score(self, event: Event, grown: Sequence[Grown]) -> None:
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

    def grow(self, choice: Choice, event: Event, grown: Sequence[Grown]) -> Iterator[bytes]:
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
        prompts = each[:: self._wish.body.get("n", 1)]
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
