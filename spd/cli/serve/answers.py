"""A call's way out: one object when it has ended, or a stream of server-sent events while it grows."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from spd.cli.serve.body import ApiError, api_error
from spd.cli.serve.replies import Choice, Delta, figures, usage

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from spd.cli.serve.service import Call, Prepared, Service
    from spd.cli.serve.wishes import Wish
    from spd.runtime import RequestMetrics

SEND_SECONDS = 60.0
"""For which a client may take nothing of what is sent to it."""
ALIVE_SECONDS = 15.0
"""Of silence, before a comment keeps the connection open."""
Result = TypeVar("Result")


class Gone(Exception):
    """The client has gone: nothing can be delivered."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What work returns. Raises Gone, and cancels it, where the client disconnects first."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    except asyncio.CancelledError:
        if working.done():
            raise Gone from None
        raise
    finally:
        for task in (working, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def as_json(value: object) -> bytes:
    """Strict JSON as UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def respond(send: Send, status: int, value: object, headers: dict[str, str] | None = None) -> None:
    """Send one JSON object."""
    data = as_json(value)
    fields = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    pairs = [(name.encode(), text.encode()) for name, text in fields.items()]
    pairs.append((b"x-content-type-options", b"nosniff"))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})


class Answer:
    """One call's answer, as an ASGI application."""

    def __init__(self, service: Service, wish: Wish, prepared: Sequence[Prepared]) -> None:
        self._service, self._wish, self._prepared = service, wish, prepared
        tokenizer = service.tokenizer
        self._choices = [Choice(i, one.inside, wish, tokenizer) for i, one in enumerate(prepared)]
        self._call: Call = service.start(prepared)
        kind = ("text_completion", "chat.completion")[wish.chat] + ".chunk" * (wish.chat and wish.stream)
        name = f"{'chatcmpl' if wish.chat else 'cmpl'}-{prepared[0].request.id}"
        self._head = {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": service.names[0],
            "system_fingerprint": service.fingerprint,
        }
        self._metrics: dict[int, RequestMetrics] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._wish.stream:
                await unless_gone(receive, self._stream(send))
                return
            try:
                answer = await unless_gone(receive, self._whole())
            except Gone:
                raise
            except Exception as error:
                refusal = api_error(error)
                self._service.refused(refusal.status)
                await respond(send, refusal.status, refusal.body(), refusal.headers)
            else:
                await respond(send, 200, answer)
        except (Gone, OSError):
            pass
        finally:
            self._call.close()

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        async for index, event in self._call.events():
            choice = self._choices[index]
            delta = choice.take(event)
            if event.finish_reason is not None:
                self._metrics[index] = self._call.metrics(index)
            if event.finish_reason == "error":
                why = event.error or "the model failed while generating"
                raise ApiError(500, why, kind="server_error", code="generation_failed")
            yield choice, delta

    def _prompt(self, choice: Choice) -> str:
        """What `echo` puts before a choice's text."""
        if not self._wish.echo:
            return ""
        asked = self._wish.prompts[choice.index // self._wish.n]
        return asked.text if asked.text is not None else self._service.tokenizer.decode(asked.ids or ())

    def _figures(self) -> dict[str, Any]:
        each = [self._metrics[index] for index in range(len(self._choices))]
        return {"usage": usage(each, self._choices, self._wish.n), **figures(each, self._service.plan)}

    # -- whole ---------------------------------------------------------------------------------------

    async def _whole(self) -> dict[str, Any]:
        async for _ in self._deltas():
            pass
        shown = [self._whole_choice(choice) for choice in self._choices]
        return {**self._head, "choices": shown, **self._figures()}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        wanted = self._wish.params.logprobs is not None
        if self._wish.chat:
            return {**choice.whole(), "logprobs": choice.chat_logprobs(choice.logprobs) if wanted else None}
        prompt = self._prompt(choice)
        return {
            "index": choice.index,
            "text": prompt + choice.content,
            "logprobs": choice.text_logprobs(choice.logprobs, len(prompt)) if wanted else None,
            "finish_reason": choice.finish_reason,
        }

    # -- streamed ------------------------------------------------------------------------------------

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        chunks = asyncio.Queue[bytes | None]()
        writing = asyncio.ensure_future(self._write(chunks))
        try:
            while True:
                try:
                    chunk = chunks.get_nowait() if chunks.qsize() else await _patient(chunks)
                except asyncio.TimeoutError:
                    chunk = b": still there\n\n"
                if chunk is None:
                    break
                await _send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
            await _send(send, {"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        finally:
            writing.cancel()

    async def _write(self, chunks: asyncio.Queue[bytes | None]) -> None:
        """Put every chunk of the stream where it is sent from, then None."""
        try:
            for choice in self._choices:
                first: dict[str, Any] | str = self._prompt(choice)
                if self._wish.chat:
                    first = {"role": "assistant", "content": ""}
                if first:
                    chunks.put_nowait(self._chunk(choice, first))
            sent = [0] * len(self._choices)
            async for choice, delta in self._deltas():
                if delta.content or delta.reasoning or delta.calls or delta.logprobs:
                    said = delta.message() if self._wish.chat else delta.content
                    logprobs = self._logprobs(choice, delta, sent[choice.index])
                    sent[choice.index] += len(delta.content)
                    chunks.put_nowait(self._chunk(choice, said, logprobs))
                if choice.reason is not None:
                    end: dict[str, Any] | str = {} if self._wish.chat else ""
                    chunks.put_nowait(self._chunk(choice, end, reason=choice.finish_reason))
            if self._wish.include_usage:
                chunks.put_nowait(_event({**self._head, "choices": [], **self._figures()}))
        except Exception as error:
            refusal = api_error(error)
            self._service.refused(refusal.status)
            chunks.put_nowait(_event(refusal.body()))
        chunks.put_nowait(None)

    def _logprobs(self, choice: Choice, delta: Delta, sent: int) -> dict[str, Any] | None:
        if self._wish.params.logprobs is None:
            return None
        if self._wish.chat:
            return choice.chat_logprobs(delta.logprobs)
        return choice.text_logprobs(delta.logprobs, len(self._prompt(choice)) + sent)

    def _chunk(
        self,
        choice: Choice,
        said: dict[str, Any] | str,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> bytes:
        shown = {
            "index": choice.index,
            "delta" if self._wish.chat else "text": said,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        usage: dict[str, Any] = {"usage": None} if self._wish.include_usage else {}
        return _event({**self._head, "choices": [shown], **usage})


def _event(value: object) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


async def _patient(chunks: asyncio.Queue[bytes | None]) -> bytes | None:
    return await asyncio.wait_for(chunks.get(), ALIVE_SECONDS)


async def _send(send: Send, message: dict[str, Any]) -> None:
    """Send, and end this task where the client takes nothing for too long."""
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(SEND_SECONDS, task.cancel)
    try:
        await send(message)
    finally:
        timer.cancel()
