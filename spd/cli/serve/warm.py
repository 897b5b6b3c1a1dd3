"""What answers the command line over the Unix socket: an engine for commands that use it as theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spd.cli.options import GenerateOptions
from spd.cli.serve.http import Call, Service
from spd.cli.serve.local import LINE_LIMIT, read_request
from spd.cli.text.prompt import Asked
from spd.errors import EngineError, SpdError
from spd.runtime.engine.request import GrammarText

if TYPE_CHECKING:
    from spd.runtime import EnginePlan

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
        self.clients = 0
        """Commands that use the engine as theirs."""

    async def listen(self, path: Path) -> asyncio.Server:
        """Begin to answer at a socket, in a folder that this user alone can reach."""
        server = await asyncio.start_unix_server(self._answer, path, limit=LINE_LIMIT)
        os.chmod(path, 0o600)
        return server

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it goes; what runs for it then is aborted."""
        running, names, attached = set[asyncio.Task[None]](), dict[str, str](), False
        reading = asyncio.ensure_future(reader.readline())
        try:
            while running or not self._service.draining:
                await asyncio.wait({reading}, timeout=0.5)
                if not reading.done():
                    continue
                if not (line := reading.result()):
                    return
                message, reading = json.loads(line), asyncio.ensure_future(reader.readline())
                if message["do"] == "stop":
                    self._stop()
                elif message["do"] == "status":
                    _send(writer, self._status())
                elif message["do"] == "attach":
                    attached, self.clients = True, self.clients + 1
                elif message["do"] == "abort":
                    self._service.thread.end(names[message["id"]])
                elif message["do"] == "prepare":
                    _send(writer, await _tried(asyncio.to_thread(self._prepare, message)))
                elif message["do"] == "add":
                    _send(writer, await _tried(self._begin(message["request"], running, names, writer)))
        except (OSError, ValueError, LookupError, TypeError):
            pass  # it has gone, or is not spd
        finally:
            self.clients -= attached
            for task in (reading, *running):
                task.cancel()
            with suppress(OSError):
                writer.close()

    def _status(self) -> Message:
        """What a server says of itself: what its engine is made of, and why it takes no prompt."""
        service, plan, refuses = self._service, self._alone.plan, None
        if plan.shape.ctx != service.plan.shape.ctx:
            refuses = f"alone the context would be {plan.shape.ctx:,}"
        return {
            "made_of": self._made_of,
            "plan": plan.as_dict(),
            "refuses": refuses,
            "model": service.name,
            "url": self._url,
            "pid": os.getpid(),
            "slots": service.slots,
            "running": service.open,
            "requests": service.served,
            "idle_seconds": 0.0 if service.open else round(time.monotonic() - service.used_at, 1),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _prepare(self, message: Message) -> Message:
        """A prompt with its parameters, as `spd generate` makes them, and what it says before."""
        from spd.cli.commands.generate import REQUEST_ID, say_before
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
        settings = dataclasses.replace(settings, sampling=sampling, grammar=shape, think=options.think)
        request, inside = settings.request(REQUEST_ID, Asked(**message["asked"]))
        say_before(console, options, settings, self._alone, request)
        return {"request": dataclasses.asdict(request), "inside": inside, "said": said}

    async def _begin(
        self,
        said: Message,
        running: set[asyncio.Task[None]],
        names: dict[str, str],
        writer: asyncio.StreamWriter,
    ) -> Message:
        """Begin a request, which has a name of its own here. Raises what its check raises."""
        if self._service.draining:
            raise EngineError("the server is shutting down", fix=["run it again", "--no-server"])
        name, request = said["id"], read_request({**said, "id": secrets.token_hex(8)})
        await asyncio.to_thread(self._service.engine.check, request)
        task = asyncio.ensure_future(_follow(Call(self._service, [request], admitted=True), name, writer))
        names[name] = request.id
        running.add(task)
        task.add_done_callback(running.discard)
        return {"added": name}


async def _tried(work: Awaitable[Message]) -> Message:
    """What work returns, or what is raised again where the prompt was typed."""
    try:
        return await work
    except SpdError as error:
        words = {"message": error.message, "reason": error.reason, "fix": error.fix, "code": error.code}
        return {"refused": type(error).__name__, **words}


async def _follow(call: Call, name: str, writer: asyncio.StreamWriter) -> None:
    """Send a request's events by the client's name for it, the last one with what was counted."""
    try:
        while came := await call.next():
            _, event = came
            logprobs = [(entry.token_id, entry.logprob, entry.top) for entry in event.logprobs]
            message: Message = {"event": (name, *event[1:5], logprobs, event.error)}
            if event.finish_reason is not None:
                counted = dataclasses.asdict(call.metrics(0)) | {"load_ms": 0.0}
                outcomes = counted.pop("outcomes").items()
                message |= {"metrics": counted, "outcomes": [(*pair, times) for pair, times in outcomes]}
            _send(writer, message)
    except Exception as error:  # of the engine
        _send(writer, {"event": (name, (), "", "error", (), (), str(error)), "metrics": {}, "outcomes": ()})
    finally:
        call.close()


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
