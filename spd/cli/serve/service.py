"""The model behind a server, and calls on their way through it: prepared, admitted, followed and answered."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse

from spd.cli.serve.body import ApiError, api_error
from spd.cli.serve.calls import MARKS, CallParser, Piece
from spd.cli.text.report import logprob_entry
from spd.cli.text.structured import ThinkingSplitter
from spd.runtime.engine.request import derived_seed

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from spd.cli.serve.wishes import Wish
    from spd.cli.text.job import Settings
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Engine, Event, Request, RequestMetrics
    from spd.runtime.engine.driver import EngineThread, Listener
    from spd.runtime.engine.request import TokenLogprob

    Prepared = tuple[Request, bool | None]
    """A request, and how its reply is parted: see `ThinkingSplitter`."""

IMPOSSIBLE = -9999.0
"""What the API says for the logarithm of nothing."""
QUEUE = 64
"""Requests that may wait beyond those that decode."""


class Service:
    """One loaded model, and the calls on their way through it."""

    def __init__(self, settings: Settings, name: str, thread: EngineThread, *, waiting: int = QUEUE) -> None:
        self.engine: Engine = thread.engine()
        self.plan = self.engine.plan
        self.settings = dataclasses.replace(settings, context=self.plan.shape.ctx)
        self.name, self.thread, self.slots = name, thread, self.plan.shape.slots
        self._most = self.slots + waiting
        self.counters: dict[str, float] = {}
        """What has been served, by the names that `/metrics` shows."""
        self.open = self.served = 0
        """Requests that run or wait; those that have ended."""
        self.draining = False
        self.used_at = time.monotonic()

    def check_name(self, name: str) -> None:
        """Raise ApiError for another model than the one that is served."""
        if name != self.name:
            why = f"The model '{name[:200]}' does not exist: '{self.name}' is served."
            raise ApiError(404, why, param="model", code="model_not_found")

    def admit(self, wanted: int) -> None:
        """Raise ApiError where so many more requests cannot wait their turn."""
        if self.draining:
            why = "The server is shutting down."
            raise ApiError(503, why, kind="server_error", code="shutting_down", retry_after=5)
        if wanted > self.slots:
            why = f"{wanted} replies at once, and this server decodes {self.slots} together"
            raise ApiError(400, f"Invalid 'n': {why}.", param="n", code="invalid_value")
        if self.open + wanted > self._most:
            why = f"{self.open} requests run or wait, and at most {self._most} may."
            code, kind = "rate_limit_exceeded", "rate_limit_error"
            raise ApiError(429, why, kind=kind, code=code, retry_after=1 + self.open // self.slots)

    def prepare(self, wish: Wish) -> list[Prepared]:
        """The requests of a call. Raises what encoding and compiling a grammar raise."""
        prepared: list[Prepared] = []
        for asked in wish.prompts:
            ids = self.settings.fit(asked)
            for choice in range(wish.n):
                seed = derived_seed(wish.params.seed, choice) if choice else wish.params.seed
                params = dataclasses.replace(wish.params, seed=seed)
                request, inside = self.settings.request(
                    secrets.token_hex(8), asked, ids, params, wish.grammar
                )
                prepared.append((dataclasses.replace(request, draft_max=wish.draft_max), inside))
        self.engine.check(prepared[0][0])
        return prepared

    def count(self, name: str, more: float = 1) -> None:
        """Add to a figure that `/metrics` shows."""
        self.counters[name] = self.counters.get(name, 0) + more

    def ended(self, metrics: RequestMetrics, reason: str) -> None:
        """Count a request that has ended."""
        self.open, self.served, self.used_at = self.open - 1, self.served + 1, time.monotonic()
        self.count(f'requests_total{{reason="{reason}"}}')
        self.count("prompt_tokens_total", metrics.prompt_tokens)
        self.count("cached_tokens_total", metrics.cached_tokens)
        self.count("generation_tokens_total", metrics.completion_tokens)
        self.count("spec_decode_num_drafts_total", metrics.num_drafts)
        self.count("spec_decode_num_draft_tokens_total", metrics.draft_n)
        self.count("spec_decode_num_accepted_tokens_total", metrics.draft_n_accepted)
        for position, count in enumerate(metrics.accepted_per_position):
            self.count(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}', count)
        self.count("first_token_seconds_total", metrics.first_token_ms / 1000)
        self.count("queue_seconds_total", metrics.queue_ms / 1000)

    def prometheus(self) -> str:
        """Every figure, in the text format of version 0.0.4."""
        waiting, (used, pages) = max(0, self.open - self.slots), self.engine.pages
        figures = {
            **self.counters,
            "rounds_total": self.engine.rounds,
            "requests_running": self.open - waiting,
            "requests_waiting": waiting,
            "slots": self.slots,
            "pages_used": used,
            "pages": pages,
        }
        lines: list[str] = []
        for name, value in sorted(figures.items()):
            family = name.partition("{")[0]
            kind = f"# TYPE spd_{family} {'counter' if family.endswith('_total') else 'gauge'}"
            lines += [f"spd_{name} {value}"] if kind in lines else [kind, f"spd_{name} {value}"]
        return "\n".join([*lines, ""])


class Call:
    """Requests that are answered together; `close` it whatever happens: what still runs is aborted then.

    Raises ApiError as `Service.admit` unless they are `admitted`, EngineError where there is no engine.
    """

    def __init__(self, service: Service, requests: Sequence[Request], *, admitted: bool = False) -> None:
        if not admitted:
            service.admit(len(requests))
        self._service, self._requests = service, requests
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue()
        self._open: dict[int, Listener] = {}
        try:
            for index, request in enumerate(requests):
                listener = partial(self._hear, index)
                service.thread.submit(request, listener)
                self._open[index] = listener
                service.open += 1
        except BaseException:
            self.close()
            raise

    def _hear(self, index: int, answer: Event | BaseException) -> None:
        with suppress(RuntimeError):  # the loop has ended: nothing listens any more
            self._loop.call_soon_threadsafe(self._answers.put_nowait, (index, answer))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(number of the request, event) as they come, to the last end. Raises what the engine raised."""
        while self._open:
            index, answer = await self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
            if answer.finish_reason is not None:
                self._end(index, answer.finish_reason)
            yield index, answer

    def metrics(self, index: int) -> RequestMetrics:
        """A request's counters."""
        return self._service.thread.metrics(self._requests[index].id)

    def _end(self, index: int, reason: str) -> None:
        del self._open[index]
        self._service.ended(self.metrics(index), reason)

    def close(self) -> None:
        """Abort what still runs, within a round."""
        for index, listener in list(self._open.items()):
            self._service.thread.forget(self._requests[index], listener)
            self._end(index, "abort")


class Choice:
    """One reply while it grows."""

    def __init__(self, index: int, inside: bool | None, wish: Wish, tokenizer: Tokenizer) -> None:
        self._index, self._tokenizer, self._wish = index, tokenizer, wish
        self._splitter = ThinkingSplitter(inside)
        self._parser = None if wish.tools is None else CallParser(wish.tools)
        names = tokenizer.special_tokens if self._parser is not None else {}
        self._marks = {names[mark]: mark for mark in MARKS if mark in names}
        self._text, self._reasoning = "", ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[TokenLogprob] = []
        self._reason: str | None = None
        self.reasoning_tokens = 0

    def first(self) -> dict[str, Any] | None:
        """What a stream begins with."""
        return self._shown(delta={"role": "assistant", "content": ""}) if self._wish.chat else None

    def take(self, event: Event) -> dict[str, Any] | None:
        """Add an event; returns what a stream shows of it."""
        final, content, delta = event.finish_reason is not None, "", dict[str, Any]()
        if self._splitter.thinking:
            self.reasoning_tokens += len(event.token_ids)
        offset = len(self._text)
        parts = self._splitter.feed(self._marked(event), final=final)
        if thought := "".join(text for thinking, text in parts if thinking):
            delta["reasoning_content"] = thought
        said = "".join(text for thinking, text in parts if not thinking)
        for piece in self._parser.feed(said, final=final) if self._parser else [Piece(said)]:
            if piece.call is None:
                content += piece.text
            else:
                delta.setdefault("tool_calls", []).append(self._call(piece.call, piece.name, piece.text))
        if content:
            delta["content"] = content
        self._text += content
        self._reasoning += thought
        self._logprobs += event.logprobs
        self._reason = event.finish_reason
        if not (delta or final or event.logprobs):
            return None
        logprobs = self._shown_logprobs(event.logprobs, offset)
        said_now = {"delta": delta} if self._wish.chat else {"text": content}
        return self._shown(logprobs=logprobs, finish_reason=self._finish_reason, **said_now)

    def _shown(self, **fields: Any) -> dict[str, Any]:
        return {"index": self._index, "logprobs": None, "finish_reason": None, **fields}

    def _marked(self, event: Event) -> str:
        """An event's text, with the special tokens that calls are written with."""
        text: str = event.text
        ids = event.token_ids
        for at in range(len(ids) - 1, -1, -1) if self._marks else ():
            if mark := self._marks.get(ids[at]):
                behind = self._tokenizer.bytes_of(ids[at + 1 :]).decode("utf-8", "ignore")
                place = max(0, len(event.text) - len(behind))
                text = f"{text[:place]}{mark}{text[place:]}"
        return text

    def _call(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        """Add to a call, which begins with its name; returns what a stream shows of it."""
        if name is None:
            self._calls[index]["function"]["arguments"] += arguments
            return {"index": index, "function": {"arguments": arguments}}
        call = {"id": secrets.token_hex(5)[1:], "type": "function"}  # nine characters are what Mistral wants
        self._calls.append({**call, "function": {"name": name, "arguments": arguments}})
        return {"index": index, **call, "function": {"name": name, "arguments": arguments}}

    @property
    def _finish_reason(self) -> str | None:
        """How it ended, as the API says it."""
        tools = self._wish.tools
        if self._reason == "stop" and self._calls and tools is not None and tools.named is None:
            return "tool_calls"
        return "stop" if self._reason == "abort" else self._reason

    def whole(self) -> dict[str, Any]:
        """All of it, as an answer that is not streamed shows it."""
        logprobs = self._shown_logprobs(self._logprobs, 0)
        shown = self._shown(logprobs=logprobs, finish_reason=self._finish_reason)
        if not self._wish.chat:
            return {**shown, "text": self._text}
        message: dict[str, Any] = {"role": "assistant", "content": self._text, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning.strip("\n")
        if self._calls:
            message |= {"content": self._text.strip() or None, "tool_calls": self._calls}
        return {**shown, "message": message}

    def _shown_logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        """Log-probabilities in the API's form; `offset` is that of the first token's text."""
        if self._wish.params.logprobs is None:
            return None
        named = [logprob_entry(entry, self._tokenizer) for entry in entries]
        if self._wish.chat:
            tops = [[_finite(one) for one in entry.pop("top")] for entry in named]
            shown = [{**_finite(one), "top_logprobs": top} for one, top in zip(named, tops, strict=True)]
            return {"content": shown, "refusal": None}
        tokens = [entry["token"] for entry in named]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry)["logprob"] for entry in named],
            "top_logprobs": [
                {one["token"]: _finite(one)["logprob"] for one in entry["top"]} for entry in named
            ],
            "text_offset": [offset + sum(map(len, tokens[:at])) for at in range(len(tokens))],
        }


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without its id, of a logarithm that JSON can hold."""
    shown = {name: value for name, value in entry.items() if name != "token_id"}
    return {**shown, "logprob": max(entry["logprob"], IMPOSSIBLE)}


class Answer:
    """One call's answer, as an ASGI application."""

    def __init__(self, service: Service, wish: Wish, prepared: Sequence[Prepared]) -> None:
        self._service, self._wish = service, wish
        tokenizer = service.settings.vocabulary.need_tokenizer()
        self._choices = [Choice(i, inside, wish, tokenizer) for i, (_, inside) in enumerate(prepared)]
        self._call = Call(service, [request for request, _ in prepared])
        kind = ("text_completion", "chat.completion")[wish.chat] + ".chunk" * (wish.chat and wish.stream)
        self._head = {
            "id": f"{'chatcmpl' if wish.chat else 'cmpl'}-{prepared[0][0].id}",
            "object": kind,
            "created": int(time.time()),
            "model": service.name,
        }
        self._metrics: dict[int, RequestMetrics] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: JSONResponse | StreamingResponse
        try:
            if self._wish.stream:
                headers = {"cache-control": "no-cache"}
                response = StreamingResponse(self._stream(), 200, headers, "text/event-stream")
            else:
                response = JSONResponse(await unless_gone(receive, self._whole()))
            await response(scope, receive, send)
        finally:
            self._call.close()

    async def _shown(self) -> AsyncIterator[dict[str, Any]]:
        """What each event brings, as a stream shows it."""
        async for index, event in self._call.events():
            shown = self._choices[index].take(event)
            if event.finish_reason is not None:
                self._metrics[index] = self._call.metrics(index)
            if event.finish_reason == "error":
                why = event.error or "the model failed while generating"
                raise ApiError(500, why, kind="server_error", code="generation_failed")
            if shown is not None:
                yield shown

    async def _whole(self) -> dict[str, Any]:
        async for _ in self._shown():
            pass
        return {**self._head, "choices": [choice.whole() for choice in self._choices], **self._figures()}

    async def _stream(self) -> AsyncIterator[bytes]:
        usage: dict[str, Any] = {"usage": None} if self._wish.include_usage else {}
        try:
            for choice in self._choices:
                if first := choice.first():
                    yield _event({**self._head, "choices": [first], **usage})
            async for shown in self._shown():
                yield _event({**self._head, "choices": [shown], **usage})
            if usage:
                yield _event({**self._head, "choices": [], **self._figures()})
        except Exception as error:
            refusal = api_error(error)
            self._service.count(f'refused_total{{status="{refusal.status}"}}')
            yield _event(refusal.body)
        yield b"data: [DONE]\n\n"

    def _figures(self) -> dict[str, Any]:
        """Tokens of a call, a prompt's once for all of its choices; times and acceptance of the first one."""
        each, plan = [metrics for _, metrics in sorted(self._metrics.items())], self._service.plan
        prompt = sum(one.prompt_tokens for one in each[:: self._wish.n])
        completion = sum(one.completion_tokens for one in each)
        speculation = each[0].speculative_decoding(plan.spec, plan.shape.draft_max)
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {
                    "cached_tokens": sum(one.cached_tokens for one in each[:: self._wish.n])
                },
                "completion_tokens_details": {
                    "reasoning_tokens": sum(one.reasoning_tokens for one in self._choices),
                    "draft_tokens": sum(one.draft_n for one in each),
                    "accepted_draft_tokens": sum(one.draft_n_accepted for one in each),
                },
            },
            "timings": each[0].timings(),
            "metrics": {"speculative_decoding": speculation},
        }


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """What work returns. Raises ClientDisconnect, and cancels it, where the client goes first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
