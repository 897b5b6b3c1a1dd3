"""What answers the command line over the Unix socket: a prompt as `spd generate` would have run it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spd.cli.options import GenerateOptions
from spd.cli.serve.body import ApiError
from spd.cli.serve.local import LINE_LIMIT
from spd.cli.serve.service import Call, Prepared, Service
from spd.cli.text.output import Console, to_json
from spd.cli.text.prompt import Asked
from spd.errors import EngineError, ResourceError, SpdError
from spd.runtime.engine.request import GrammarText

if TYPE_CHECKING:
    from spd.runtime import EnginePlan, Request, RequestMetrics
    from spd.runtime.engine.driver import Gathered

Message = dict[str, Any]


@dataclass(frozen=True)
class Recorded(Console):
    """Words that are said where the prompt was typed."""

    said: list[tuple[str, str]] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.said.append(("note", text))

    def detail(self, text: str) -> None:
        self.said.append(("detail", text))


class WarmFront:
    """Answers connections of this user's commands. `solo` is the plan that each would have had alone."""

    def __init__(
        self, service: Service, solo: EnginePlan, made_of: Message, stop: Callable[[], None], url: str
    ) -> None:
        self._service, self._solo, self._stop, self._url = service, solo, stop, url
        self._made_of = json.loads(json.dumps(made_of))

    async def listen(self, path: Path) -> asyncio.Server:
        """Begin to answer at a socket that this user alone can reach."""
        server = await asyncio.start_unix_server(self._answer, path, limit=LINE_LIMIT)
        os.chmod(path, 0o600)
        return server

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            sock: socket.socket = writer.get_extra_info("socket")
            peer = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if peer[1] != os.geteuid():
                return
            while line := await reader.readline():
                message = json.loads(line)
                if message["do"] == "generate":
                    await self._generate(message, reader, writer)
                    return
                _send(writer, self._short(message))
        except (OSError, ValueError, LookupError, TypeError, asyncio.IncompleteReadError):
            pass  # it has gone, or is not spd
        finally:
            with suppress(OSError):
                writer.close()

    def _short(self, message: Message) -> Message:
        """What is answered at once."""
        service = self._service
        if message["do"] == "stop":
            self._stop()
        elif message["do"] == "ask":
            if service.draining:
                return {"no": "it is shutting down"}
            if self._solo.shape.ctx != service.plan.shape.ctx:
                return {"no": f"alone the context would be {self._solo.shape.ctx:,}"}
            wishes = message["made_of"]
            other = [name for name, value in self._made_of.items() if wishes.get(name) != value]
            if other:
                return {"no": f"another {', '.join(other)}"}
            return {"yes": self._url}
        return {
            "model": service.names[0],
            "url": self._url,
            "pid": os.getpid(),
            "slots": service.slots,
            "running": service.open,
            "requests": sum(service.counters.ended.values()),
            "idle_seconds": 0.0 if service.open else round(time.monotonic() - service.used_at, 1),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "spec": service.plan.spec,
            "context": service.settings.context,
        }

    async def _generate(
        self, message: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Run one prompt, and abort it where the client says so or has gone."""
        service = self._service
        try:
            request, inside, console = await asyncio.to_thread(self._prepare, message)
        except SpdError as error:
            _send(writer, _refusal(error))
            await writer.drain()
            return
        try:
            call = service.start([Prepared(request, inside)])
        except ApiError as error:
            _send(writer, _refusal(ResourceError(error.message, fix=["--no-server"], code=error.code)))
            await writer.drain()
            return
        _send(writer, {"inside": inside, "said": console.said})
        gone = asyncio.ensure_future(reader.readline())
        try:
            reply = await self._run(call, gone, writer)
            _send(writer, self._end(message, request, inside, reply, call.metrics(0)))
            await writer.drain()
        finally:
            gone.cancel()
            call.close()

    async def _run(self, call: Call, gone: asyncio.Future[bytes], writer: asyncio.StreamWriter) -> Gathered:
        from spd.runtime.engine.driver import Gathered

        reply, events = Gathered(), call.events()
        while reply.finish_reason is None:
            coming = asyncio.ensure_future(anext(events))
            waited: set[asyncio.Future[Any]] = {coming, gone}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                call.close()
                reply.finish_reason = "abort"
                break
            try:
                _, event = coming.result()
            except EngineError as error:
                reply.finish_reason, reply.error = "error", error.message
                break
            reply.take(event)
            if event.text or event.finish_reason is not None:
                _send(writer, {"text": event.text})
                await writer.drain()
        return reply

    def _prepare(self, message: Message) -> tuple[Request, bool | None, Recorded]:
        """A prompt with its parameters, as `spd generate` makes them."""
        from spd.cli.commands.generate import REQUEST_ID, say_before
        from spd.cli.text.sampling import resolve_sampling

        service, options = self._service, GenerateOptions(**message["options"])
        settings, grammar = service.settings, message["grammar"]
        sampling = resolve_sampling(
            options,
            service.plan.model.generation,
            settings.usable_vocab,
            logprobs=options.logprobs,
        )
        shape = None if grammar is None else GrammarText(**grammar)
        given = message["asked"]
        ids = None if given["ids"] is None else tuple(given["ids"])
        asked = Asked(ids, given["text"], tuple(given["messages"]), given["variables"])
        settings = dataclasses.replace(settings, sampling=sampling, grammar=shape, think=options.think)
        request, inside = settings.request(REQUEST_ID, asked)
        service.engine.check(request)
        console = Recorded(verbose=True)
        say_before(console, options, settings, self._alone, request)
        return dataclasses.replace(request, id=service.name()), inside, console

    @property
    def _alone(self) -> Any:
        """The engine as it would be alone."""
        return SimpleNamespace(plan=self._solo, load_ms=0.0, tokenizer=self._service.tokenizer)

    def _end(
        self,
        message: Message,
        request: Request,
        inside: bool | None,
        reply: Gathered,
        metrics: RequestMetrics,
    ) -> Message:
        """What is printed about a reply, as `spd generate` says it."""
        from spd.cli.text.report import early_end, reply_fields, reply_object, stats_line

        metrics = dataclasses.replace(metrics, load_ms=0.0)
        fields = reply_fields(reply, metrics, self._alone, request, inside)
        return {
            "finish_reason": reply.finish_reason,
            "error": reply.error,
            "json": to_json(reply_object(fields, self._solo, request, message["options"]["model"])),
            "early": early_end(fields, reply.error, request),
            "stats": stats_line(metrics),
        }


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def _refusal(error: SpdError) -> Message:
    """An error that is to be raised where the prompt was typed."""
    said = {"message": error.message, "reason": error.reason, "fix": error.fix, "code": error.code}
    return {"refused": type(error).__name__, **said}
