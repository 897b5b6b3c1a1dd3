"""Client of this user's servers: finds them, and runs requests on their engines.

Each line on a socket is a JSON object. This file imports no torch, nor anything else that is slow
to import.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spd import errors
from spd.errors import EngineError, SpdError
from spd.formats.thinking import ThinkingMarks
from spd.runtime import EngineClient, EngineInfo, RequestMetrics
from spd.runtime.engine.request import (
    Event,
    Request,
    TokenLogprob,
)
from spd.server.wire import as_tuples, make_runtime_folder, read_marks, read_request

if TYPE_CHECKING:
    from spd.conversation.prompt import Prompt
    from spd.conversation.sampling import SamplingOptions
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime.engine.request import GrammarSpec
    from spd.runtime.round.sampling_params import SamplingParams

ANSWER_SECONDS = 5.0
"""Seconds in which a server has to accept a client, to send its status, and to end an aborted
request."""


class JsonConnection:
    """A connection that carries lines of JSON."""

    def __init__(self, path: Path) -> None:
        """Connect to the socket at a path. Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._data = bytearray()
        self._socket.settimeout(ANSWER_SECONDS)
        self._socket.connect(str(path))

    def send(self, **message: object) -> None:
        """Send one object. Raises EngineError if the server has ended."""
        try:
            line = json.dumps(
                message, default=lambda value: getattr(value, "__dict__", None) or str(value)
            )
            self._socket.settimeout(None)
            self._socket.sendall(line.encode() + b"\n")
        except OSError:
            raise _server_ended_error() from None

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Return the next object; {} if none arrives within `seconds` (None: wait for ever).

        Raises the error with which the server refuses a request, and EngineError if it has ended.
        """
        self._socket.settimeout(seconds)
        try:
            while (end := self._data.find(b"\n")) < 0:
                if not (chunk := self._socket.recv(1 << 20)):
                    raise _server_ended_error()
                self._data += chunk
            message: dict[str, Any] = json.loads(self._data[:end])
        except (TimeoutError, BlockingIOError):
            return {}
        except (OSError, ValueError):
            raise _server_ended_error() from None
        del self._data[: end + 1]
        if name := message.pop("refused", None):
            raise getattr(errors, name, SpdError)(message.pop("message"), **message)
        return message

    def close(self) -> None:
        """Close the connection; the server aborts the requests that run for it."""
        self._socket.close()


def _server_ended_error() -> EngineError:
    """Return the error for a connection that the server has closed."""
    return EngineError(
        "the server has ended", fix=["run it again; in a chat, /model NAME", "--no-server"]
    )


def find_servers(
    folder: Path, note: Callable[[str], None]
) -> Iterator[tuple[JsonConnection, dict[str, Any]]]:
    """Yield a connection to each server of a folder of sockets, and its status.

    Removes the sockets of servers that have ended. note: called with a message about a server that
    does not answer. Raises ResourceError for a folder that others can access.
    """
    if not os.path.lexists(folder):
        return
    for path in sorted(make_runtime_folder(folder).glob("*.sock")):
        try:
            connection = JsonConnection(path)
            connection.send(do="status")
            status = connection.receive(ANSWER_SECONDS)
        except (OSError, EngineError) as error:  # the server has ended
            if isinstance(error, ConnectionRefusedError):
                path.unlink(missing_ok=True)
            continue
        if status:
            yield connection, status
        else:
            note(f"the server of process {path.stem} does not answer; kill -9 {path.stem} ends it")


class ServedPrompt(NamedTuple):
    """A prompt that a server has encoded."""

    request: Request
    inside_thinking: bool | None
    """True if the reply begins inside thinking; None if it is no turn of a chat."""
    marks: ThinkingMarks
    notes: Sequence[str]
    """Notes for the user about limits of the run."""
    parameters: Mapping[str, object]
    """Each sampling parameter, some with their source."""


class ServedEngine(EngineClient):
    """The engine of a server: requests and events go over a connection. See `EngineClient`."""

    load_ms = 0.0
    has_tokenizer = True

    def __init__(self, connection: JsonConnection, model: Path, plan: Mapping[str, Any]) -> None:
        """Use a connection.

        model: the model's folder. plan: the JSON of the server's plan for one command.
        """
        self._connection = connection
        self._folder = model
        self.info = EngineInfo.from_json(plan)
        self.prefilling = lambda written, total: None
        self._running: set[str] = set()
        self._events: list[Event] = []
        self._metrics: dict[str, RequestMetrics] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, opened at its first use, for few replies need it."""
        from spd.formats.folder import ModelFolder

        return ModelFolder(self._folder).tokenizer

    def prepare_request(
        self, prompt: Prompt, options: SamplingOptions, grammar: GrammarSpec | None, think: str
    ) -> ServedPrompt:
        """Have the server encode a prompt; return the request with its marks, notes and parameters.

        think: the value of --think. Waits as long as the server takes. Raises the error with which
        the server refuses it, or EngineError if the server has ended.
        """
        self._connection.send(
            do="prepare", prompt=prompt, options=options, grammar=grammar, think=think
        )
        answer = self._connection.receive()
        return ServedPrompt(
            request=read_request(answer["request"]),
            inside_thinking=answer["inside_thinking"],
            marks=read_marks(answer["marks"]),
            notes=answer["notes"],
            parameters=answer["parameters"],
        )

    def add(self, request: Request) -> None:
        """Send a request and wait until it is accepted.

        Raises the error with which the server refuses it.
        """
        self._connection.send(do="add", request=request)
        while self._store_event(self._connection.receive()):
            pass
        self._running.add(request.id)

    def abort(self, request_id: str) -> None:
        """Abort a request, if it runs, and wait until it has ended."""
        if request_id in self._running:
            self._connection.send(do="abort", id=request_id)
            while request_id in self._running and self._store_event(
                self._connection.receive(ANSWER_SECONDS)
            ):
                pass

    def capture_ahead(
        self, params: Collection[SamplingParams], limit: int | None = None, concurrency: int = 1
    ) -> int:
        """Capture nothing: the server does so while it is idle."""
        return 0

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or events have not been returned."""
        return bool(self._running or self._events)

    def step(self) -> list[Event]:
        """Return the events that have arrived; wait up to 50 ms for the first."""
        while self._running and self._store_event(
            self._connection.receive(0.0 if self._events else 0.05)
        ):
            pass
        events = self._events
        self._events = []
        return events

    def _store_event(self, message: dict[str, Any]) -> bool:
        """Store the event of a message, and of a last one the metrics; False without an event."""
        if "event" not in message:
            return False
        name, ids, text, reason, drafted, logprobs, error = as_tuples(message["event"])
        entries = tuple(TokenLogprob(*entry) for entry in logprobs)
        self._events.append(
            Event(
                request_id=name,
                token_ids=ids,
                text=text,
                finish_reason=reason,
                drafted=drafted,
                logprobs=entries,
                error=error,
            )
        )
        if reason is not None:
            self._running.discard(name)
            outcomes = {
                (drafts, accepted): times for drafts, accepted, times in message["outcomes"]
            }
            self._metrics[name] = RequestMetrics(**message["metrics"], outcomes=outcomes)
        return True

    def metrics(self, request_id: str) -> RequestMetrics:
        """Return the counters of a request that has ended. Raises KeyError for another one."""
        return self._metrics[request_id]

    def close(self) -> None:
        """Close the connection; the server ends the requests that still run for it."""
        self._connection.close()
