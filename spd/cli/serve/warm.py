"""What answers the command line over the Unix socket: a prompt as `spd generate` would have run it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spd.cli.options import GenerateOptions
from spd.cli.serve.body import ApiError
from spd.cli.serve.local import LINE_LIMIT
from spd.cli.serve.service import Call, Service
from spd.cli.text.output import to_json
from spd.cli.text.prompt import Asked
from spd.errors import EngineError, ResourceError, SpdError
from spd.runtime.engine.request import Gathered, GrammarText

if TYPE_CHECKING:
    from spd.runtime import EnginePlan, Request, RequestMetrics

Message = dict[str, Any]


class WarmFront:
    """Answers connections of this user's commands. `solo` is the plan that each would have had alone."""

    def __init__(
        self, service: Service, solo: EnginePlan, made_of: Message, stop: Callable[[], None], url: str
    ) -> None:
        self._service, self._made_of, self._stop, self._url = service, made_of, stop, url
        tokenizer = service.settings.vocabulary.tokenizer
        self._alone: Any = SimpleNamespace(plan=solo, load_ms=0.0, tokenizer=tokenizer)
        """The engine as it would be alone."""

    async def listen(self, path: Path) -> asyncio.Server:
        """Begin to answer at a socket, in a folder that this user alone can reach."""
        server = await asyncio.start_unix_server(self._answer, path, limit=LINE_LIMIT)
        os.chmod(path, 0o600)
        return server

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message["do"] == "status":
                    _send(writer, self._status())
                elif message["do"] == "stop":
                    self._stop()
                elif message["do"] == "generate":
                    await self._generate(message, reader, writer)
                    await writer.drain()
                    return
        except (OSError, ValueError, LookupError, TypeError):
            pass  # it has gone, or is not spd
        finally:
            with suppress(OSError):
                writer.close()

    def _status(self) -> Message:
        """What a server says of itself: what its engine is made of, and why it takes no prompt."""
        service, refuses = self._service, None
        if service.draining:
            refuses = "it is shutting down"
        elif (alone := self._alone.plan.shape.ctx) != service.plan.shape.ctx:
            refuses = f"alone the context would be {alone:,}"
        return {
            "made_of": self._made_of,
            "refuses": refuses,
            "model": service.name,
            "url": self._url,
            "pid": os.getpid(),
            "running": service.open,
            "requests": service.served,
            "idle_seconds": 0.0 if service.open else round(time.monotonic() - service.used_at, 1),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "spec": service.plan.spec,
        }

    async def _generate(
        self, message: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Run one prompt, and abort it where the client says so or has gone."""
        try:
            request, inside, said = await asyncio.to_thread(self._prepare, message)
            call = Call(self._service, [request])
        except (ApiError, SpdError) as error:  # raised again where the prompt was typed
            if isinstance(error, ApiError):
                error = ResourceError(error.message, fix=["--no-server"], code=error.code)
            words = {"message": error.message, "reason": error.reason, "fix": error.fix, "code": error.code}
            _send(writer, {"refused": type(error).__name__, **words})
            return
        _send(writer, {"inside": inside, "said": said})
        reply = Gathered()
        running = asyncio.ensure_future(_run(call, reply, writer))
        leaving = asyncio.ensure_future(reader.readline())
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            else:
                running.cancel()
                call.close()
                reply.finish_reason = "abort"
            _send(writer, self._end(message["options"], request, inside, reply, call.metrics(0)))
        finally:
            leaving.cancel()
            running.cancel()
            call.close()

    def _prepare(self, message: Message) -> tuple[Request, bool | None, list[tuple[str, str]]]:
        """A prompt with its parameters, as `spd generate` makes them, and what it says before."""
        from spd.cli.commands.generate import say_before
        from spd.cli.text.sampling import resolve_sampling

        said: list[tuple[str, str]] = []
        console: Any = SimpleNamespace(
            verbose=True,
            note=lambda text: said.append(("note", text)),
            detail=lambda text: said.append(("detail", text)),
        )
        service, options = self._service, GenerateOptions(**message["options"])
        settings, suggested = service.settings, service.plan.model.generation
        sampling = resolve_sampling(options, suggested, settings.usable_vocab, logprobs=options.logprobs)
        shape = None if message["grammar"] is None else GrammarText(**message["grammar"])
        asked = Asked(**message["asked"])
        settings = dataclasses.replace(settings, sampling=sampling, grammar=shape, think=options.think)
        request, inside = settings.request(secrets.token_hex(8), asked)
        service.engine.check(request)
        say_before(console, options, settings, self._alone, request)
        return request, inside, said

    def _end(
        self,
        options: Message,
        request: Request,
        inside: bool | None,
        reply: Gathered,
        metrics: RequestMetrics,
    ) -> Message:
        """How a reply ended, and what `spd generate` says then."""
        from spd.cli.text.report import early_end, reply_fields, reply_object, stats_line

        metrics = dataclasses.replace(metrics, load_ms=0.0)
        fields, said = reply_fields(reply, metrics, self._alone, request, inside), list[tuple[str, str]]()
        if options["json"]:
            shown = reply_object(fields, self._alone.plan, request, options["model"])
            said.append(("out", to_json(shown) + "\n"))
        if early := early_end(fields, reply.error, request):
            said.append(("note", early))
        if options["stats"]:
            said.append(("tell", stats_line(metrics)))
        return {"finish_reason": reply.finish_reason, "error": reply.error, "said": said}


async def _run(call: Call, reply: Gathered, writer: asyncio.StreamWriter) -> None:
    """Send a reply's text as it comes."""
    try:
        async for _, event in call.events():
            reply.take(event)
            _send(writer, {"text": event.text})
            await writer.drain()
    except EngineError as error:
        reply.finish_reason, reply.error = "error", error.message


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
