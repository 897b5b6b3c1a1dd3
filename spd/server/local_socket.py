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

from spd.conversation.notes import notes_before_run
from spd.conversation.prompt import Prompt
from spd.conversation.sampling import SamplingOptions, resolve_sampling
from spd.conversation.settings import REQUEST_ID
from spd.errors import EngineError, ResourceError, SpdError
from spd.runtime import EngineInfo
from spd.runtime.engine.driver import Update
from spd.runtime.engine.request import Event, GrammarSpec
from spd.server.replies import RequestGroup
from spd.server.service import Service
from spd.server.wire import MAX_LINE_BYTES, as_tuples, read_request

if TYPE_CHECKING:
    from spd.runtime import EnginePlan


Message = dict[str, Any]
"""The JSON object of one line."""


class LocalSocket:
    """Answers connections of this user's commands.

    solo_plan: the plan that a command would have without the server. identity: the engine's, as
    `engine_identity` returns it. path: that of the socket.
    """

    def __init__(
        self, service: Service, solo_plan: EnginePlan, identity: Message, url: str, path: Path
    ) -> None:
        self._service = service
        self._identity = identity
        self._url = url
        self._path = path
        self._solo_info = EngineInfo.from_plan(solo_plan)
        """The engine that a command would have without the server."""

    async def listen(self) -> None:
        """Make the socket and begin to answer.

        Raises ResourceError, for example for a path that is too long for a socket.
        """
        try:
            await asyncio.start_unix_server(self._serve_client, self._path, limit=MAX_LINE_BYTES)
        except OSError as error:
            message = f"cannot listen at {self._path}: {error}"
            raise ResourceError(message, fix=["set XDG_RUNTIME_DIR"]) from None

    async def _serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one client until it disconnects; requests that still run for it are aborted."""
        groups = dict[str, RequestGroup]()
        self._service.clients.add(writer)
        try:
            while line := await reader.readline():
                message = json.loads(line)
                try:
                    if message["do"] == "status":
                        _send_message(writer, self._status_message())
                    elif message["do"] == "prepare":
                        _send_message(
                            writer, await asyncio.to_thread(self._prepare_prompt, message)
                        )
                    elif message["do"] == "add":
                        _send_message(
                            writer, await self._begin_request(message["request"], groups, writer)
                        )
                    elif message["id"] in groups:
                        groups[message["id"]].close()
                except SpdError as error:  # the client raises it again
                    refusal: Message = {
                        "refused": type(error).__name__,
                        "message": error.message,
                        "reason": error.reason,
                        "fix": error.fix,
                        "code": error.code,
                    }
                    _send_message(writer, refusal)
        except (OSError, ValueError, LookupError, TypeError):
            pass  # the client has disconnected, or is not spd
        finally:
            self._service.clients.discard(writer)
            for group in groups.values():
                group.close()
            writer.close()

    def _status_message(self) -> Message:
        """Return the server's status: its engine's identity, and the reason if it accepts no
        prompt.
        """
        service = self._service
        refuses = None
        if self._solo_info.ctx != service.plan.shape.ctx:
            refuses = f"alone the context would be {self._solo_info.ctx:,}"
        status: Message = {
            "made_of": self._identity,
            "plan": self._solo_info.plan,
            "refuses": refuses,
            "model": service.name,
        }
        status |= {
            "url": self._url,
            "pid": os.getpid(),
            "slots": service.slots,
            "running": service.open_requests,
        }
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        status |= {"requests": service.ended_requests, "memory_bytes": memory}
        return {**status, "idle_seconds": time.monotonic() - service.used_at}

    def _prepare_prompt(self, message: Message) -> Message:
        """Encode a message's prompt; return it as a request, its parameters, and notes about it.

        Raises what encoding and checking raise.
        """
        service = self._service
        options = SamplingOptions(**as_tuples(message["options"]))
        suggested = service.plan.model.generation
        sampling = resolve_sampling(options, suggested, service.settings.usable_vocab)
        grammar = None if message["grammar"] is None else GrammarSpec(**message["grammar"])
        settings = dataclasses.replace(
            service.settings, sampling=sampling, grammar=grammar, think=message["think"]
        )
        vocabulary = settings.vocabulary
        request, inside_thinking = settings.prepare_request(REQUEST_ID, Prompt(**message["prompt"]))
        return {
            "request": dataclasses.asdict(request),
            "inside_thinking": inside_thinking,
            "marks": dataclasses.asdict(vocabulary.marks),
            "notes": notes_before_run(self._solo_info, settings.think, vocabulary, request),
            "parameters": sampling.describe(),
        }

    async def _begin_request(
        self, message: Message, groups: dict[str, RequestGroup], writer: asyncio.StreamWriter
    ) -> Message:
        """Begin a request, under an id of the server's own, and add it to `groups`.

        Raises EngineError if the server is ending, and what `Engine.check` raises.
        """
        if self._service.is_draining:
            raise EngineError("the server is shutting down", fix=["run it again", "--no-server"])
        request = read_request({**message, "id": secrets.token_hex(8)})
        client_id = message["id"]
        await asyncio.to_thread(self._service.engine.check, request)
        send = partial(_send_event, groups, client_id, writer)
        groups[client_id] = RequestGroup(self._service, [request], send)
        return {"added": client_id}


def _send_event(
    groups: dict[str, RequestGroup],
    client_id: str,
    writer: asyncio.StreamWriter,
    _: int,
    update: Update,
) -> None:
    """Send an update with the client's id of its request; remove it from `groups` at its end.

    The last event has the request's counters.
    """
    event = (
        Event(client_id, (), "", "error", error=str(update))
        if isinstance(update, BaseException)
        else update
    )
    logprobs = [(entry.token_id, entry.logprob, entry.top) for entry in event.logprobs]
    message: Message = {"event": (client_id, *event[1:5], logprobs, event.error)}
    if event.finish_reason is not None:
        counters = dataclasses.asdict(groups.pop(client_id).metrics(0)) | {"load_ms": 0.0}
        outcomes = counters.pop("outcomes").items()
        message |= {"metrics": counters, "outcomes": [(*pair, times) for pair, times in outcomes]}
    _send_message(writer, message)


def _send_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Write a message as a line of JSON."""
    writer.write(json.dumps(message).encode() + b"\n")
