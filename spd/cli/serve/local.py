"""Servers of this machine's user, from outside: found, told of, started and stopped.

Each line on a socket is a JSON object. No torch here, nor anything else that takes time to import.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spd import errors
from spd.cli.text.output import Sink, clock, loading, tell, to_json, write_stderr
from spd.errors import EngineError, NotFoundError, ResourceError, SpdError
from spd.formats.hub import resolve_model
from spd.formats.thinking import MarkPair, ThinkingMarks
from spd.runtime import RequestMetrics
from spd.runtime.engine.request import (
    Event,
    GrammarText,
    Request,
    ThinkingBudget,
    ThinkingTokens,
    TokenLogprob,
)
from spd.runtime.plan.config import show_size
from spd.runtime.round.sampling_params import SamplingParams
from spd.version import __version__

if TYPE_CHECKING:
    from spd.cli.commands.serve import ServeOptions
    from spd.cli.options import GenerateOptions, ReplyOptions
    from spd.cli.text.output import Console, Session
    from spd.runtime import EngineConfig

STATUS_SCHEMA = "spd.serve.status/1"
LINE_LIMIT = 64 << 20
ANSWER_SECONDS = 5.0
"""For which a server may take to let a client in, to say how it is, and to end what was aborted."""


def runtime_folder(folder: Path) -> Path:
    """The folder of sockets, made if it is missing. Raises ResourceError if others could reach it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ResourceError(
            f"cannot use {folder}: {error.strerror}", fix=["set XDG_RUNTIME_DIR"]
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        words, why = (
            f"{folder} is not a folder of yours alone",
            ["Another user could answer in its place."],
        )
        fix = [f"rm -r {folder}", "--no-server"]
        raise ResourceError(words, reason=why, fix=fix, code="runtime_folder")
    return folder


def identity(config: EngineConfig) -> dict[str, Any]:
    """What an engine is made of, as JSON: this version, its wishes but for slots, and its folders' files."""
    shown = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del shown["slots"]
    for name in ("model", "draft_model", "mtp"):
        if (folder := shown[name]) is not None:
            files = {
                path.name: path.stat() for path in sorted(Path(folder).iterdir()) if path.is_file()
            }
            stamps = [
                [file, each.st_size, each.st_mtime_ns, each.st_ino] for file, each in files.items()
            ]
            shown[name] = [os.path.realpath(folder), *stamps]
    made_of: dict[str, Any] = json.loads(json.dumps({"version": __version__, **shown}))
    return made_of


class Line:
    """A connection that carries lines of JSON."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises OSError."""
        self._socket, self._data = socket.socket(socket.AF_UNIX), bytearray()
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


def servers(session: Session) -> Iterator[tuple[Line, dict[str, Any]]]:
    """A connection to each server, and what it says of itself."""
    if not os.path.lexists(session.runtime_folder):
        return
    for path in sorted(runtime_folder(session.runtime_folder).glob("*.sock")):
        try:
            line = Line(path)
            line.send(do="status")
            said = line.receive(ANSWER_SECONDS)
        except (OSError, EngineError) as error:  # it has ended
            if isinstance(error, ConnectionRefusedError):
                path.unlink(missing_ok=True)
            continue
        if said:
            yield line, said
        else:
            words = (
                f"the server of process {path.stem} does not answer; kill -9 {path.stem} ends it"
            )
            session.console.note(words)


def control(session: Session, options: ServeOptions) -> int:
    """Carry out --status, or --stop until servers have ended. Raises NotFoundError where none runs."""
    found = list(servers(session))
    if not {"model", "model_argument"}.isdisjoint(options.typed):
        folder = os.path.realpath(resolve_model(options.model))
        found = [one for one in found if one[1]["made_of"]["model"][0] == folder]
    if not found:
        raise NotFoundError("no server runs", fix=["spd serve --detach"], code="no_server")
    for line, _ in found:
        line.close()
    if options.stop:
        for _, said in found:
            _stop(said)
    elif options.json:
        shown = {"schema": STATUS_SCHEMA, "servers": [_status(said) for _, said in found]}
        Sink.stdout().write(to_json(shown) + "\n")
    else:
        for _, said in found:
            Sink.stdout().write(_status_line(said) + "\n")
    return 0


def _status(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what --status --json shows of a server, of what it says of itself."""
    names = ("model", "url", "pid", "slots", "running", "requests", "memory_bytes", "idle_seconds")
    plan = said["plan"]
    return {**{name: said[name] for name in names}, "spec": plan["spec"], "ctx": plan["ctx"]}


def _status_line(said: Mapping[str, Any]) -> str:
    """Return what --status shows of a server."""
    state = f"idle {clock(said['idle_seconds'])}"
    if said["running"]:
        state = f"{said['running']} running"
    parts = [said["model"], said["url"], f"pid {said['pid']}", show_size(said["memory_bytes"])]
    parts += [f"{said['requests']:,} requests", state, f"drafts {said['plan']['spec']}"]
    return " · ".join(parts)


def _stop(said: Mapping[str, Any]) -> None:
    """Stop a server, and wait until it has ended."""
    tell(f"stopping {said['model']} at {said['url']}")
    command_line = Path(f"/proc/{said['pid']}/cmdline")
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(said["pid"], signal.SIGTERM)
        while command_line.read_bytes():  # empty once it is a zombie
            time.sleep(0.05)


def detach(session: Session, options: ServeOptions) -> int:
    """Start a server in the background, and return when it is ready; where it ends, with what it said."""
    import subprocess

    folder = runtime_folder(session.runtime_folder)
    command = [sys.executable, "-m", "spd", *(word for word in sys.argv[1:] if word != "--detach")]
    path = folder / f"serve-{os.getpid()}.log"
    with path.open("wb") as log, loading(f"starting {options.model}", session.console):
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while child.poll() is None and not (folder / f"{child.pid}.sock").exists():
                time.sleep(0.05)
        except BaseException:
            child.terminate()
            raise
    said = path.read_text(encoding="utf-8", errors="replace")
    if (status := child.poll()) is not None:
        path.unlink()
        write_stderr(said or f"the server ended at once, with status {status}\n")
        return status if status > 0 else 128 - status
    if not session.console.quiet:
        write_stderr(f"{said}pid {child.pid}, log {path}; spd serve --stop ends it\n")
    return 0


def served_engine(session: Session, options: ReplyOptions, slots: int = 1) -> Any:
    """The engine of a server that has the one which these options ask for; None where none runs."""
    if options.no_server:
        return None
    from spd.cli.text.job import engine_config

    named = options.model, options.draft_model, options.mtp
    for line, said in servers(session):
        try:
            model, *_ = [resolve_model(name) for name in named if name is not None]
        except NotFoundError:
            return None  # and none serves it
        made_of = identity(engine_config(options, model))
        other = [name for name, value in said["made_of"].items() if made_of.get(name) != value]
        why = said["refuses"] or (f"another {', '.join(other)}" if other else None)
        if slots > said["slots"]:
            why = why or f"it decodes {said['slots']} together"
        session.console.detail(f"server  {said['url']}" + (f": not used: {why}" if why else ""))
        if why is None:
            return ServedEngine(line, model, {**said["plan"], "slots": slots})
        line.close()
    return None


class ServedEngine:
    """What the command line uses of an engine: requests go and events come over a connection."""

    load_ms = 0.0

    def __init__(self, line: Line, model: Path, plan: dict[str, Any]) -> None:
        self._line, self._folder = line, model
        self.plan: Any = SimpleNamespace(**plan, as_dict=lambda: plan)
        self.plan.shape = self.plan.wishes = self.plan
        """As `EnginePlan`, as far as it is asked."""
        self.tokenizer: Any = SimpleNamespace(
            token_bytes=lambda token_id: self._opened.token_bytes(token_id)
        )
        """What names tokens; it is opened when it is asked, for few replies ask."""
        self._running: set[str] = set()
        self._events: list[Event] = []
        self._metrics: dict[str, RequestMetrics] = {}

    @cached_property
    def _opened(self) -> Any:
        from spd.formats.folder import ModelFolder

        return ModelFolder(self._folder).tokenizer

    def prepare(
        self, console: Console, options: GenerateOptions
    ) -> tuple[Request, bool | None, ThinkingMarks]:
        """Return the request for one prompt, which the server encodes, after the usual notes.

        With it comes how its reply is parted: see `ThinkingSplitter`.
        """
        from spd.cli.text.prompt import gather, read_grammar

        self._line.send(
            do="prepare", grammar=read_grammar(options), options=options, asked=gather(options)
        )
        begun = self._line.receive()
        for kind, text in begun["said"]:
            getattr(console, kind)(text)
        return read_request(begun["request"]), begun["inside"], read_marks(begun["marks"])

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

    def capture_ahead(self, *params: Any, **wishes: Any) -> int:
        """Nothing: the server does so while it is idle."""
        return 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._running or self._events)

    def step(self) -> list[Event]:
        """What has come, or comes within a moment."""
        while self._running and self._take(self._line.receive(0.0 if self._events else 0.05)):
            pass
        events, self._events = self._events, []
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


def as_tuples(value: Any) -> Any:
    """A JSON value with tuples for its lists, as requests and events have them."""
    if isinstance(value, dict):
        return {name: as_tuples(one) for name, one in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def read_marks(said: dict[str, Any]) -> ThinkingMarks:
    """Marks of thinking from the JSON of their fields."""
    pairs = {name: tuple(MarkPair(**pair) for pair in found) for name, found in said.items()}
    return ThinkingMarks(**pairs)


def read_request(said: dict[str, Any]) -> Request:
    """A request from the JSON of its fields. Raises what its parts refuse."""
    fields = as_tuples(said)
    parts = {"params": SamplingParams, "grammar": GrammarText, "thinking": ThinkingBudget}
    for name, kind in parts.items():
        fields[name] = fields[name] and kind(**fields[name])
    if (grammar := fields["grammar"]) and grammar.thinking:
        tokens = ThinkingTokens(**grammar.thinking)
        fields["grammar"] = dataclasses.replace(grammar, thinking=tokens)
    return Request(**fields)
