"""A server's life: address, loading, listening, and its end by a signal or after idle time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from spd.cli.serve.http import LOOPBACK, build
from spd.cli.serve.local import identity, runtime_folder, socket_name
from spd.cli.serve.service import Service
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
    from spd.cli.options import Session
    from spd.cli.text.job import Settings
    from spd.runtime import Engine, Progress

HEADER_SECONDS = 20.0
"""For which a client may take to send a request's head."""
HEADER_LIMIT = 32 << 10
CONNECTIONS = 512
DRAIN_SECONDS = 30
"""For which replies under way may go on when the server ends."""


def run(session: Session, options: ServeOptions) -> int:
    """Load and serve until a signal comes or time runs out."""
    from spd.runtime import make_plan

    check_address(options)
    listener = listen(options.host, options.port)
    with listener:
        settings = plan_settings(options.as_generate())
        settings.vocabulary.need_tokenizer()
        folder = runtime_folder(session.runtime_folder, create=True)
        assert folder is not None
        made_of = identity(settings.config)
        solo = make_plan(dataclasses.replace(settings.config, slots=1))
        thread = load(session, options, settings)
        try:
            service = Service(settings, [options.model], thread)
            loopback = options.host in LOOPBACK
            app = build(service, key=options.api_key, loopback=loopback)
            port = listener.getsockname()[1]
            host = f"[{options.host}]" if ":" in options.host else options.host
            plan = service.plan
            what = f"{service.slots} at once, context {plan.shape.ctx:,}, drafts: {plan.spec}"
            words = f"serving {options.model} at http://{host}:{port}/v1 ({what})"
            server = Server(app, service, options.idle)
            server.warm = WarmFront(service, solo, made_of, server.drain, f"http://{host}:{port}/v1")
            server.words = None if session.console.quiet else words
            assert isinstance(settings.config.model, ModelFolder)
            server.path = folder / socket_name(settings.config.model, os.getpid())
            received = server.run_until_signal(listener)
        finally:
            thread.close(5.0)
    if received == signal.SIGINT:
        raise Interrupted(received)
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
        taken = error.errno == errno.EADDRINUSE
        why = "another program listens there" if taken else error.strerror or str(error)
        raise UsageError(f"cannot listen at {host}, port {port}: {why}", fix=["--port N"]) from None
    return listener


def load(session: Session, options: ServeOptions, settings: Settings) -> EngineThread:
    """The engine in a thread of its own, loaded. Raises what loading raised."""

    def start(progress: Progress) -> Engine:
        from spd.runtime import Engine

        return Engine(settings.config, progress=progress)

    expected = [settings.sampling.params]
    thread = EngineThread(start, lambda: expected, goes_on=True, short=lambda error: None)
    thread.start()
    try:
        with loading(f"loading {options.model}", session.console) as display:
            while not thread.ready.wait(0.05):
                session.guard.check()
                if display is not None and thread.progress is not None:
                    display(thread.progress)
        thread.engine()
    except BaseException:
        thread.close(1.0)
        raise
    return thread


class TimedProtocol(H11Protocol):
    """HTTP whose heads have to come in time: a client that sends a byte a minute holds no connection."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        """Run the clock while a head is awaited or half there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """A server that ends as the rest of spd does: the first signal lets replies end, the second does not."""

    def __init__(self, app: Any, service: Service, idle: float | None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else every malformed request is told
        config = uvicorn.Config(
            app,
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            h11_max_incomplete_event_size=HEADER_LIMIT,
        )
        super().__init__(config)
        self._service, self._idle = service, idle
        self._received: int | None = None
        self.warm: WarmFront | None = None
        self.path = Path()
        """Where the command line finds it."""
        self.words: str | None = None
        """Said when it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.warm is not None:
            try:
                self.servers.append(await self.warm.listen(self.path))
            except OSError as error:  # a path too long for a socket, for one
                tell(f"spd generate will not find this server: {self.path}: {error.strerror or error}")
        if self.words is not None:
            tell(self.words)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.warm is not None:
            self.path.unlink(missing_ok=True)
        await super().shutdown(sockets)
        ends = time.monotonic() + DRAIN_SECONDS
        while self._service.open and time.monotonic() < ends:  # those of the command line
            await asyncio.sleep(0.05)

    def run_until_signal(self, *listeners: socket.socket) -> int | None:
        """Serve; returns the signal that ended it, None where none did."""
        asyncio.run(self.serve(sockets=list(listeners)))
        return self._received

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals over while the loop runs."""
        loop = asyncio.get_running_loop()
        watched = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) != signal.SIG_IGN]
        for signum in watched:
            loop.add_signal_handler(signum, self._end, signum, watched)
        yield

    def _end(self, signum: int, watched: list[signal.Signals]) -> None:
        self._received = signum
        loop = asyncio.get_running_loop()
        for each in watched:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.write(2, "stopping…\n".encode())
        self.drain()

    def drain(self) -> None:
        """End when the replies under way have ended."""
        self._service.draining = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        service, idle = self._service, self._idle
        if idle is not None and not service.open and time.monotonic() - service.used_at > idle:
            self.drain()
        return await super().on_tick(counter)
