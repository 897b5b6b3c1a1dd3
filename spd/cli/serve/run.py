"""A server's life: address, loading, listening, and its end by a signal or after idle time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import secrets
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import uvicorn

from spd.cli.commands.models import ensure_models
from spd.cli.options import GenerateOptions
from spd.cli.serve.forms import GUESSED, UNKNOWN_FORM, form_of
from spd.cli.serve.http import App, Service
from spd.cli.serve.local import LINE_LIMIT, identity, read_request, runtime_folder
from spd.cli.serve.replies import Call
from spd.cli.signals import Interrupted
from spd.cli.text.job import plan_settings
from spd.cli.text.output import loading, tell
from spd.cli.text.prompt import Asked
from spd.errors import EngineError, ResourceError, SpdError, UsageError
from spd.runtime.engine.driver import Answer, EngineThread
from spd.runtime.engine.request import Event, GrammarText

if TYPE_CHECKING:
    from spd.cli.commands.serve import ServeOptions
    from spd.cli.text.job import Settings
    from spd.cli.text.output import Session
    from spd.runtime import EnginePlan

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HEADER_SECONDS = 30.0
"""For which a connection may stay without a request, or take to send its head."""
CONNECTIONS = 512
PREPARERS = 2
"""Threads that encode prompts and compile grammars: for each the allocator keeps what its longest took."""
DRAIN_SECONDS = 30
"""For which replies under way may go on when the server ends."""


def run(session: Session, options: ServeOptions) -> int:
    """Load and serve until a signal comes or time runs out."""
    from spd.runtime import make_plan

    check_address(options)
    with listen(options.host, options.port) as listener:
        ensure_models(session, options)
        settings = plan_settings(options.as_generate())
        settings.vocabulary.need_tokenizer()
        folder = runtime_folder(session.runtime_folder)
        path = folder / f"{os.getpid()}.sock"
        made_of = identity(settings.config)
        solo = make_plan(dataclasses.replace(settings.config, slots=1))
        thread = load(session, options, settings)
        try:
            service = Service(
                settings,
                options.model,
                thread,
                aliases=options.alias or (),
                any_model=options.any_model,
            )
            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"http://{host}:{listener.getsockname()[1]}/v1"
            what = f"{service.slots} at once, context {service.plan.shape.ctx:,}, drafts: {service.plan.spec}"
            if not session.console.quiet:
                tell(f"serving {options.model} at {url} ({what})")
            template = settings.vocabulary.template
            if template is not None and template.takes_tools and form_of(template) is GUESSED:
                session.console.note(UNKNOWN_FORM)
            server = Server(service, options, WarmFront(service, solo, made_of, url, path))
            asyncio.run(server.serve([listener]))
        finally:
            path.unlink(missing_ok=True)
            thread.close(5.0)
    log = Path("/proc/self/fd/2").resolve()
    if log.parent == folder.resolve():  # of a detached server, which has ended as it should
        log.unlink()
    if server.received == signal.SIGINT:
        raise Interrupted(server.received)
    return 0


def check_address(options: ServeOptions) -> None:
    """Raise UsageError where other machines could ask without having been meant to."""
    if options.api_key is not None and not (options.api_key.isascii() and options.api_key.strip()):
        raise UsageError(
            "--api-key is empty or not ASCII", fix=["SPD_API_KEY=$(openssl rand -hex 16)"]
        )
    if options.host in LOOPBACK:
        return
    if options.api_key is None:
        words = f"--host {options.host} lets other machines ask, and there is no key"
        fix = ["--host with --api-key KEY, or SPD_API_KEY", "leave --host out"]
        raise UsageError(words, fix=fix, code="no_api_key")


def listen(host: str, port: int) -> socket.socket:
    """A socket that has the address. Raises UsageError where another program has it, or there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        words = f"cannot listen at {host}, port {port}: {error.strerror}"
        raise UsageError(words, fix=["--port N"]) from None


def load(session: Session, options: ServeOptions, settings: Settings) -> EngineThread:
    """The engine in a thread of its own, loaded. Raises what loading raised."""
    from spd.runtime import Engine

    with loading(f"loading {options.model}", session.console) as display:
        build, expected = (
            partial(Engine, settings.config, progress=display),
            [settings.sampling.params],
        )
        thread = EngineThread(lambda _: build(), lambda: expected, short=lambda error: None)
        thread.start()
        try:
            thread.engine()
        except BaseException:
            thread.close(1.0)
            raise
    return thread


class Server(uvicorn.Server):
    """A server that ends as the rest of spd does: the first signal lets replies end, the second does not."""

    def __init__(
        self, service: Service, options: ServeOptions, front: WarmFront | None = None
    ) -> None:
        app = App(service, key=options.api_key, loopback=options.host in LOOPBACK)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # else every malformed request is told
            access_log=False,
            http="h11",
            ws="none",
            lifespan="off",
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=round(HEADER_SECONDS),
            timeout_graceful_shutdown=5,  # replies have ended by then
            h11_max_incomplete_event_size=32 << 10,
        )
        super().__init__(config)
        self._service, self._idle, self._front = service, options.idle, front
        self.received: int | None = None
        """The signal that ended it."""
        self._silent: dict[tuple[Any, Any], float] = {}
        """Connections without a whole head behind their last request, and since when they are so."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_default_executor(
            ThreadPoolExecutor(PREPARERS, "spd prepare")
        )
        await super().startup(sockets)
        if self._front is not None:
            await self._front.listen()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ends = time.monotonic() + DRAIN_SECONDS
        while self._service.open and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        for client in [*self._service.clients]:
            client.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.received = sig
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        tell("stopping…")
        self.drain()

    def drain(self) -> None:
        """End when the replies under way have ended."""
        self._service.draining = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        service, idle, now = self._service, self._idle, time.monotonic()
        if service.open or service.clients:
            service.used_at = now
        if idle is not None and now - service.used_at > idle:
            self.drain()
        connections: set[Any] = self.server_state.connections
        silent = [
            (one, one.cycle) for one in connections if not one.cycle or one.cycle.response_complete
        ]
        self._silent = {pair: self._silent.get(pair, now) for pair in silent}
        for (one, _), since in self._silent.items():
            if now - since > HEADER_SECONDS:
                one.transport.close()
        return await super().on_tick(counter)


Message = dict[str, Any]


class WarmFront:
    """Answers connections of this user's commands. `solo` is the plan that each would have had alone."""

    def __init__(
        self, service: Service, solo: EnginePlan, made_of: Message, url: str, path: Path
    ) -> None:
        self._service, self._made_of, self._url, self._path = service, made_of, url, path
        self._alone: Any = SimpleNamespace(plan=solo, load_ms=0.0)
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
        calls = dict[str, Call]()
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
        service, plan, refuses = self._service, self._alone.plan, None
        if plan.shape.ctx != service.plan.shape.ctx:
            refuses = f"alone the context would be {plan.shape.ctx:,}"
        shown = {
            "made_of": self._made_of,
            "plan": plan.as_dict(),
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
        """A prompt with its parameters, as `spd generate` makes them, and what it says before."""
        from spd.cli.commands.generate import REQUEST_ID, say_before
        from spd.cli.text.job import resolve_sampling

        said = list[Any]()
        say = {name: partial(lambda *one: said.append(one), name) for name in ("note", "detail")}
        console: Any = SimpleNamespace(verbose=True, **say)
        service, options = self._service, GenerateOptions(**message["options"])
        settings, suggested = service.settings, service.plan.model.generation
        sampling = resolve_sampling(
            options, suggested, settings.usable_vocab, logprobs=options.logprobs
        )
        shape = None if message["grammar"] is None else GrammarText(**message["grammar"])
        settings = dataclasses.replace(
            settings, sampling=sampling, grammar=shape, think=options.think
        )
        request, inside = settings.request(REQUEST_ID, Asked(**message["asked"]))
        say_before(console, options, settings, self._alone, request)
        marks = dataclasses.asdict(settings.vocabulary.marks)
        asked = dataclasses.asdict(request)
        return {"request": asked, "inside": inside, "marks": marks, "said": said}

    async def _begin(
        self, said: Message, calls: dict[str, Call], writer: asyncio.StreamWriter
    ) -> Message:
        """Begin a request, which has a name of its own here. Raises what its check raises."""
        if self._service.draining:
            raise EngineError("the server is shutting down", fix=["run it again", "--no-server"])
        request, name = read_request({**said, "id": secrets.token_hex(8)}), said["id"]
        await asyncio.to_thread(self._service.engine.check, request)
        calls[name] = Call(self._service, [request], partial(_tell, calls, name, writer))
        return {"added": name}


def _tell(
    calls: dict[str, Call], name: str, writer: asyncio.StreamWriter, _: int, answer: Answer
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
