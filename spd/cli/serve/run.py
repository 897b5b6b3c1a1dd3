"""A server's life: address, loading, listening, and its end by a signal or after idle time."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from spd.cli.commands.models import ensure_models
from spd.cli.serve.http import App, Service
from spd.cli.serve.local import identity, runtime_folder, socket_name
from spd.cli.serve.warm import WarmFront
from spd.cli.signals import Interrupted
from spd.cli.text.job import plan_settings
from spd.cli.text.output import tell
from spd.cli.text.progress import loading
from spd.errors import UsageError
from spd.formats.folder import ModelFolder
from spd.runtime.engine.driver import EngineThread

if TYPE_CHECKING:
    from spd.cli.commands.serve import ServeOptions
    from spd.cli.text.job import Settings
    from spd.cli.text.output import Session
    from spd.runtime import Engine, Progress

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HEADER_SECONDS = 30.0
"""For which a connection may stay without a request, or take to send its head."""
HEADER_LIMIT = 32 << 10
CONNECTIONS = 512
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
        folder = runtime_folder(session.runtime_folder, create=True)
        assert folder is not None and isinstance(settings.config.model, ModelFolder)
        path = folder / socket_name(settings.config.model, os.getpid())
        made_of = identity(settings.config)
        solo = make_plan(dataclasses.replace(settings.config, slots=1))
        thread = load(session, options, settings)
        try:
            service = Service(settings, options.model, thread)
            server = Server(service, options)
            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"http://{host}:{listener.getsockname()[1]}/v1"
            server.warm = WarmFront(service, solo, made_of, server.drain, url), path
            what = f"{service.slots} at once, context {service.plan.shape.ctx:,}, drafts: {service.plan.spec}"
            server.words = "" if session.console.quiet else f"serving {options.model} at {url} ({what})"
            asyncio.run(server.serve([listener]))
        finally:
            path.unlink(missing_ok=True)
            thread.close(5.0)
    if server.received == signal.SIGINT:
        raise Interrupted(server.received)
    return 0


def check_address(options: ServeOptions) -> None:
    """Raise UsageError where other machines could ask without having been meant to."""
    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port {options.port} is out of range", reason=["valid: 0 to 65535"])
    if options.api_key is not None and not (options.api_key.isascii() and options.api_key.strip()):
        raise UsageError("--api-key is empty or not ASCII", fix=["SPD_API_KEY=$(openssl rand -hex 16)"])
    if options.host in LOOPBACK:
        return
    if "host" not in options.typed:
        raise UsageError("--host beyond this machine has to be typed", fix=[f"--host {options.host}"])
    if options.api_key is None:
        raise UsageError(
            f"--host {options.host} lets other machines ask, and there is no key",
            fix=["--host with --api-key KEY, or SPD_API_KEY", "leave --host out"],
            code="no_api_key",
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that has the address. Raises UsageError where another program has it, or there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}, port {port}: {error.strerror}", fix=["--port N"]
        ) from None
    return listener


def load(session: Session, options: ServeOptions, settings: Settings) -> EngineThread:
    """The engine in a thread of its own, loaded. Raises what loading raised."""

    def start(progress: Progress) -> Engine:
        from spd.runtime import Engine

        return Engine(settings.config, progress=progress)

    expected = [settings.sampling.params]
    thread = EngineThread(start, lambda: expected, short=lambda error: None)
    thread.start()
    try:
        with loading(f"loading {options.model}", session.console) as display:
            while not thread.ready.wait(0.05):
                session.guard.check()
                if thread.progress is not None:
                    display(thread.progress)
        thread.engine()
    except BaseException:
        thread.close(1.0)
        raise
    return thread


class Server(uvicorn.Server):
    """A server that ends as the rest of spd does: the first signal lets replies end, the second does not."""

    def __init__(self, service: Service, options: ServeOptions) -> None:
        app = App(service, key=options.api_key, loopback=options.host in LOOPBACK)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # else every malformed request is told
            access_log=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=round(HEADER_SECONDS),
            timeout_graceful_shutdown=DRAIN_SECONDS,
            h11_max_incomplete_event_size=HEADER_LIMIT,
        )
        super().__init__(config)
        self._service, self._idle = service, options.idle
        self.received: int | None = None
        """The signal that ended it."""
        self.warm: tuple[WarmFront, Path] | None = None
        """What answers the command line, and where."""
        self.words = ""
        """Said when it listens."""
        self._silent: dict[tuple[Any, Any], float] = {}
        """Connections without a whole head behind their last request, and since when they are so."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.warm is not None:
            front, path = self.warm
            try:
                self.servers.append(await front.listen(path))
            except OSError as error:  # a path too long for a socket, for one
                tell(f"spd generate will not find this server: {path}: {error.strerror or error}")
        if self.words:
            tell(self.words)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        ends = time.monotonic() + DRAIN_SECONDS
        while self._service.open and time.monotonic() < ends:  # those of the command line
            await asyncio.sleep(0.05)

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
        if service.open or (self.warm and self.warm[0].clients):
            service.used_at = now
        if idle is not None and now - service.used_at > idle:
            self.drain()
        connections: set[Any] = self.server_state.connections
        silent = [(one, one.cycle) for one in connections if not one.cycle or one.cycle.response_complete]
        self._silent = {pair: self._silent.get(pair, now) for pair in silent}
        for (one, _), since in self._silent.items():
            if now - since > HEADER_SECONDS:
                one.transport.close()
        return await super().on_tick(counter)
