"""The server's end of its socket for commands of this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import secrets
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.conversation.notes import notes_before
from spd.conversation.prompt import Prompt
from spd.conversation.sampling import SamplingOptions, resolve_sampling
from spd.conversation.settings import REQUEST_ID
from spd.errors import EngineError, ResourceError, SpdError
from spd.runtime import EngineInfo
from spd.runtime.engine.driver import Update
from spd.runtime.engine.request import Event, GrammarSpec
from spd.server.replies import RequestGroup
from spd.server.service import Service
from spd.server.wire import LINE_LIMIT, as_tuples, read_request

if TYPE_CHECKING:
    from spd.runtime import EnginePlan


Message = dict[str, Any]


class LocalSocket:
    """Answers connections of this user's commands. `solo` is the plan that each would have had alone."""

    def __init__(
        self, service: Service, solo: EnginePlan, made_of: Message, url: str, path: Path
    ) -> None:
        self._service = service
        self._made_of = made_of
        self._url = url
        self._path = path
        self._alone = EngineInfo.from_plan(solo)
        """The engine as it would be alone."""

    async def listen(self) -> None:
        """Begin to answer. Raises ResourceError for a path too long for a socket, for one."""
        try:
            await asyncio.start_unix_server(self._answer, self._path, limit=LINE_LIMIT)
        except OSError as error:
            words = f"cannot listen at {self._path}: {error}"
            raise ResourceError(words, fix=["set XDG_RUNTIME_DIR"]) from None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it goes; what runs for it then is aborted."""
        calls = dict[str, RequestGroup]()
        self._service.clients.add(writer)
        try:
            while line := await reader.readline():
                message = json.loads(line)
                try:
                    if message["do"] == "status":
                        _send(writer, self._status())
                    elif message["do"] == "prepare":
                        _send(writer, await asyncio.to_thread(self._prepare, message))
                    elif message["do"] == "add":
                        _send(writer, await self._begin(message["request"], calls, writer))
                    elif message["id"] in calls:
                        calls[message["id"]].close()
                except SpdError as error:  # it is raised again where the prompt was typed
                    words = {"reason": error.reason, "fix": error.fix, "code": error.code}
                    _send(
                        writer, {"refused": type(error).__name__, "message": error.message, **words}
                    )
        except (OSError, ValueError, LookupError, TypeError):
            pass  # it has gone, or is not spd
        finally:
            self._service.clients.discard(writer)
            for call in calls.values():
                call.close()
            writer.close()

    def _status(self) -> Message:
        """What a server says of itself: what its engine is made of, and why it takes no prompt."""
        service = self._service
        refuses = None
        if self._alone.ctx != service.plan.shape.ctx:
            refuses = f"alone the context would be {self._alone.ctx:,}"
        shown: Message = {
            "made_of": self._made_of,
            "plan": self._alone.plan,
            "refuses": refuses,
            "model": service.name,
        }
        shown |= {
            "url": self._url,
            "pid": os.getpid(),
            "slots": service.slots,
            "running": service.open,
        }
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        shown |= {"requests": service.served, "memory_bytes": memory}
        return {**shown, "idle_seconds": time.monotonic() - service.used_at}

    def _prepare(self, message: Message) -> Message:
        """Return a prompt as a request, its parameters, and notes about it."""
        service = self._service
        wishes = SamplingOptions(**as_tuples(message["wishes"]))
        suggested = service.plan.model.generation
        sampling = resolve_sampling(wishes, suggested, service.settings.usable_vocab)
        grammar = None if message["grammar"] is None else GrammarSpec(**message["grammar"])
        settings = dataclasses.replace(
            service.settings, sampling=sampling, grammar=grammar, think=message["think"]
        )
        vocabulary = settings.vocabulary
        request, inside_thinking = settings.prepare(REQUEST_ID, Prompt(**message["prompt"]))
        return {
            "request": dataclasses.asdict(request),
            "inside_thinking": inside_thinking,
            "marks": dataclasses.asdict(vocabulary.marks),
            "notes": notes_before(self._alone, settings.think, vocabulary, request),
            "parameters": sampling.describe(),
        }

    async def _begin(
        self, said: Message, calls: dict[str, RequestGroup], writer: asyncio.StreamWriter
    ) -> Message:
        """Begin a request, which has a name of its own here. Raises what its check raises."""
        if self._service.draining:
            raise EngineError("the server is shutting down", fix=["run it again", "--no-server"])
        request = read_request({**said, "id": secrets.token_hex(8)})
        name = said["id"]
        await asyncio.to_thread(self._service.engine.check, request)
        calls[name] = RequestGroup(self._service, [request], partial(_tell, calls, name, writer))
        return {"added": name}


def _tell(
    calls: dict[str, RequestGroup], name: str, writer: asyncio.StreamWriter, _: int, answer: Update
) -> None:
    """Send an event by the client's name for its request, the last one with what was counted."""
    event = (
        Event(name, (), "", "error", error=str(answer))
        if isinstance(answer, BaseException)
        else answer
    )
    logprobs = [(entry.token_id, entry.logprob, entry.top) for entry in event.logprobs]
    message: Message = {"event": (name, *event[1:5], logprobs, event.error)}
    if event.finish_reason is not None:
        counted = dataclasses.asdict(calls.pop(name).metrics(0)) | {"load_ms": 0.0}
        outcomes = counted.pop("outcomes").items()
        message |= {"metrics": counted, "outcomes": [(*pair, times) for pair, times in outcomes]}
    _send(writer, message)


def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
