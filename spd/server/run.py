"""The run of a server: address, loading, listening, and its end by a signal or after idle time."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from spd.conversation.tools.call_check import UNKNOWN_FORM_NOTE, checked_form
from spd.conversation.tools.call_forms import FALLBACK_FORM
from spd.errors import UsageError
from spd.runtime.engine.driver import EngineThread
from spd.server.app import App
from spd.server.local_socket import LocalSocket
from spd.server.service import Service
from spd.server.wire import engine_identity, make_runtime_folder

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.runtime import Engine, Progress

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
HEADER_SECONDS = 30.0
"""Seconds in which a connection has to send the complete head of a request."""
MAX_CONNECTIONS = 512
"""Connections that are open or wait at the socket."""
PREPARE_THREADS = 2
"""Threads that encode prompts and compile grammars.

For each the allocator retains the memory of its longest request.
"""
DRAIN_SECONDS = 30
"""Seconds for which running replies may continue when the server ends."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server's address, names and limits, and its clients' key."""

    model: str
    """The name by which clients ask for the model."""
    runtime_folder: Path
    """The folder of the socket for commands of this machine."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 chooses a free one."""
    api_key: str | None = None
    idle: float | None = None
    """Seconds without requests after which the server ends."""
    aliases: Sequence[str] = ()
    """Further names of the model; "*" stands for every other one."""


def run_server(
    options: ServerOptions,
    settings: Settings,
    listener: socket.socket,
    load: Callable[[], EngineThread[Engine]],
    report: Callable[[str], None],
) -> int | None:
    """Load and serve until a signal comes or time runs out; return the signal, None without one.

    load: returns the engine in its thread, loaded. report: called with messages for the user.
    Removes its socket and an empty run's log at the end. Raises what loading and listening raise.
    """
    from spd.runtime import make_plan

    settings.vocabulary.need_tokenizer()
    folder = make_runtime_folder(options.runtime_folder)
    path = folder / f"{os.getpid()}.sock"
    solo_identity = engine_identity(settings.config)
    thread = load()
    try:
        solo_plan = make_plan(dataclasses.replace(settings.config, slots=1))
        service = Service(
            settings,
            (options.model, *(name for name in options.aliases if name != "*")),
            thread,
            accepts_any_model="*" in options.aliases,
            report=report,
        )
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{listener.getsockname()[1]}/v1"
        plan = service.plan
        summary = f"{service.slots} at once, context {plan.shape.ctx:,}, drafts: {plan.spec}"
        report(f"serving {options.model} at {url} ({summary})")
        template = settings.vocabulary.template
        if (
            template is not None
            and template.supports_tools
            and checked_form(template) is FALLBACK_FORM
        ):
            report(f"note: {UNKNOWN_FORM_NOTE}")
        local_socket = LocalSocket(
            service=service, solo_plan=solo_plan, identity=solo_identity, url=url, path=path
        )
        server = Server(service, options, local_socket, report)
        asyncio.run(server.serve([listener]))
    finally:
        path.unlink(missing_ok=True)
        thread.close(5.0)
    log = Path("/proc/self/fd/2").resolve()
    if (
        log.parent == folder.resolve()
    ):  # the log of a detached server, which has ended without an error
        log.unlink()
    return server.received_signal


def check_address(host: str, api_key: str | None) -> None:
    """Raise UsageError for a key that is no text, or an address of other machines without a key."""
    if api_key is not None and not (api_key.isascii() and api_key.strip()):
        fix = "SPD_API_KEY=$(openssl rand -hex 16)"
        raise UsageError("--api-key is empty or not ASCII", fix=[fix])
    if host in LOOPBACK_HOSTS:
        return
    if api_key is None:
        message = f"--host {host} lets other machines ask, and there is no key"
        fixes = ["--host with --api-key KEY, or SPD_API_KEY", "leave --host out"]
        raise UsageError(message, fix=fixes, code="no_api_key")


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address. Raises UsageError if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        message = f"cannot listen at {host}, port {port}: {reason}"
        raise UsageError(message, fix=["--port N"]) from None


def load_engine_thread(settings: Settings, progress: Progress) -> EngineThread[Engine]:
    """Load the engine in a thread of its own and return that. Raises what loading raises."""
    from spd.runtime import Engine

    def build(_: Progress) -> Engine:
        """Load the engine and report the progress."""
        return Engine(settings.config, progress=progress)

    expected = [settings.sampling.params]
    thread = EngineThread(build, lambda: expected, on_out_of_memory=lambda error: None)
    thread.start()
    try:
        thread.engine()
    except BaseException:
        thread.close(1.0)
        raise
    return thread


class Server(uvicorn.Server):
    """A uvicorn server whose first signal lets running replies end; the second one ends it at
    once.
    """

    def __init__(
        self,
        service: Service,
        options: ServerOptions,
        local_socket: LocalSocket | None = None,
        report: Callable[[str], None] = lambda words: None,
    ) -> None:
        app = App(service, key=options.api_key, loopback=options.host in LOOPBACK_HOSTS)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # else every malformed request is logged
            access_log=False,
            http="h11",
            ws="none",
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=round(HEADER_SECONDS),
            timeout_graceful_shutdown=5,  # replies have ended by then
            h11_max_incomplete_event_size=32 << 10,
        )
        super().__init__(config)
        self._service = service
        self._idle = options.idle
        self._local_socket = local_socket
        self._report = report
        self.received_signal: int | None = None
        """The signal that ended the server."""
        self._inactive: dict[tuple[H11Protocol, RequestResponseCycle | None], float] = {}
        """Since when a connection has sent no complete head behind its last request, by both."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, also at the local socket."""
        asyncio.get_running_loop().set_default_executor(
            ThreadPoolExecutor(PREPARE_THREADS, "spd prepare")
        )
        await super().startup(sockets)
        if self._local_socket is not None:
            await self._local_socket.listen()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running replies, up to DRAIN_SECONDS, then close all connections."""
        ends = time.monotonic() + DRAIN_SECONDS
        while self._service.open_requests and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        for client in [*self._service.clients]:
            client.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end at the first signal; a second one has its default effect."""
        self.received_signal = sig
        for handled_signal in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled_signal, signal.SIG_DFL)
        self._report("stopping…")
        self.start_draining()

    def start_draining(self) -> None:
        """Accept no more requests, and end once the running replies have ended."""
        self._service.is_draining = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """End after idle time; close connections that send no request. Return True to stop."""
        service = self._service
        idle = self._idle
        now = time.monotonic()
        if service.open_requests or service.clients:
            service.used_at = now
        if idle is not None and now - service.used_at > idle:
            self.start_draining()
        inactive = [
            (connection, connection.cycle)
            for connection in self.server_state.connections
            if isinstance(connection, H11Protocol)
            and (not connection.cycle or connection.cycle.response_complete)
        ]
        self._inactive = {pair: self._inactive.get(pair, now) for pair in inactive}
        for (connection, _), since in self._inactive.items():
            if now - since > HEADER_SECONDS:
                connection.transport.close()
        return await super().on_tick(counter)
