"""Servers of this machine's user, from outside: found, told of, started and stopped.

Each line on a socket is a JSON object. No torch here, nor anything else that takes time to import.
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
from spd.server.wire import as_tuples, read_marks, read_request, runtime_folder

if TYPE_CHECKING:
    from spd.conversation.prompt import Prompt
    from spd.conversation.sampling import SamplingOptions
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime.engine.request import GrammarSpec
    from spd.runtime.round.sampling_params import SamplingParams

ANSWER_SECONDS = 5.0
"""For which a server may take to let a client in, to say how it is, and to end what was aborted."""


class JsonConnection:
    """A connection that carries lines of JSON."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._data = bytearray()
        self._socket.settimeout(ANSWER_SECONDS)
        self._socket.connect(str(path))

    def send(self, **message: Any) -> None:
        """Send one object. Raises EngineError where the server has gone."""
        try:
            line = json.dumps(
                message, default=lambda value: getattr(value, "__dict__", None) or str(value)
            )
            self._socket.settimeout(None)
            self._socket.sendall(line.encode() + b"\n")
        except OSError:
            raise _lost() from None

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next object, {} where none comes in time. Raises what the server refuses, and EngineError."""
        self._socket.settimeout(seconds)
        try:
            while (end := self._data.find(b"\n")) < 0:
                if not (more := self._socket.recv(1 << 20)):
                    raise _lost()
                self._data += more
            message: dict[str, Any] = json.loads(self._data[:end])
        except (TimeoutError, BlockingIOError):
            return {}
        except (OSError, ValueError):
            raise _lost() from None
        del self._data[: end + 1]
        if name := message.pop("refused", None):
            raise getattr(errors, name, SpdError)(message.pop("message"), **message)
        return message

    def close(self) -> None:
        """Hang up; the server aborts what is under way."""
        self._socket.close()


def _lost() -> EngineError:
    return EngineError(
        "the server has ended", fix=["run it again; in a chat, /model NAME", "--no-server"]
    )


def find_servers(
    folder: Path, note: Callable[[str], None]
) -> Iterator[tuple[JsonConnection, dict[str, Any]]]:
    """Yield a connection to each server of a folder of sockets, and what it says of itself.

    note: called with words about a server that does not answer.
    """
    if not os.path.lexists(folder):
        return
    for path in sorted(runtime_folder(folder).glob("*.sock")):
        try:
            line = JsonConnection(path)
            line.send(do="status")
            status = line.receive(ANSWER_SECONDS)
        except (OSError, EngineError) as error:  # it has ended
            if isinstance(error, ConnectionRefusedError):
                path.unlink(missing_ok=True)
            continue
        if status:
            yield line, status
        else:
            note(f"the server of process {path.stem} does not answer; kill -9 {path.stem} ends it")


class ServedPrompt(NamedTuple):
    """A prompt that a server has encoded."""

    request: Request
    inside_thinking: bool | None
    """Whether the reply begins inside thinking; None where it is no turn of a chat."""
    marks: ThinkingMarks
    notes: Sequence[str]
    """What the user may not expect of the run."""
    parameters: Mapping[str, Any]
    """Each sampling parameter, and where it comes from."""


class ServedEngine(EngineClient):
    """An engine of a server: requests go and events come over a connection. See `EngineClient`."""

    load_ms = 0.0
    has_tokenizer = True

    def __init__(self, line: JsonConnection, model: Path, plan: Mapping[str, Any]) -> None:
        """model: its folder; plan: the JSON of the server's plan for one command."""
        self._line = line
        self._folder = model
        self.info = EngineInfo.from_json(plan)
        self.prefilling = lambda written, wanted: None
        self._running: set[str] = set()
        self._events: list[Event] = []
        self._metrics: dict[str, RequestMetrics] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, opened when it is first used, for few replies need it."""
        from spd.formats.folder import ModelFolder

        return ModelFolder(self._folder).tokenizer

    def prepare(
        self, prompt: Prompt, wishes: SamplingOptions, grammar: GrammarSpec | None, think: str
    ) -> ServedPrompt:
        """Return the request of a prompt, which the server encodes."""
        self._line.send(do="prepare", prompt=prompt, wishes=wishes, grammar=grammar, think=think)
        answer = self._line.receive()
        return ServedPrompt(
            read_request(answer["request"]),
            answer["inside_thinking"],
            read_marks(answer["marks"]),
            answer["notes"],
            answer["parameters"],
        )

    def add(self, request: Request) -> None:
        """Begin a request. Raises what the server refuses it with."""
        self._line.send(do="add", request=request)
        while self._take(self._line.receive()):
            pass
        self._running.add(request.id)

    def abort(self, request_id: str) -> None:
        """Have a request ended within a round, if it runs, and wait for that."""
        if request_id in self._running:
            self._line.send(do="abort", id=request_id)
            while request_id in self._running and self._take(self._line.receive(ANSWER_SECONDS)):
                pass

    def capture_ahead(
        self, params: Collection[SamplingParams], limit: int | None = None, concurrency: int = 1
    ) -> int:
        """Capture nothing: the server does so while it is idle."""
        return 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._running or self._events)

    def step(self) -> list[Event]:
        """What has come, or comes within a moment."""
        while self._running and self._take(self._line.receive(0.0 if self._events else 0.05)):
            pass
        events = self._events
        self._events = []
        return events

    def _take(self, message: dict[str, Any]) -> bool:
        """Keep an event; False for a message that is none."""
        if "event" not in message:
            return False
        name, ids, text, reason, drafted, logprobs, error = as_tuples(message["event"])
        listed = tuple(TokenLogprob(*one) for one in logprobs)
        self._events.append(Event(name, ids, text, reason, drafted, listed, error))
        if reason is not None:
            self._running.discard(name)
            outcomes = {
                (drafts, accepted): times for drafts, accepted, times in message["outcomes"]
            }
            self._metrics[name] = RequestMetrics(**message["metrics"], outcomes=outcomes)
        return True

    def metrics(self, request_id: str) -> RequestMetrics:
        """Counters of a request that has ended. Raises KeyError for another."""
        return self._metrics[request_id]

    def close(self) -> None:
        """Hang up; the server ends what still runs."""
        self._line.close()
