"""A server's life: address, loading, listening, and its end by a signal or after idle time."""

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
from typing import TYPE_CHECKING, Any

import uvicorn

from spd.conversation.tools.call_check import UNKNOWN_FORM, checked_form
from spd.conversation.tools.call_forms import FALLBACK_FORM
from spd.errors import UsageError
from spd.runtime.engine.driver import EngineThread
from spd.server.app import App
from spd.server.local_socket import LocalSocket
from spd.server.service import Service
from spd.server.wire import identity, runtime_folder

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.runtime import Engine, Progress

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HEADER_SECONDS = 30.0
"""For which a connection may stay without a request, or take to send its head."""
CONNECTIONS = 512
PREPARERS = 2
"""Threads that encode prompts and compile grammars: for each the allocator keeps what its longest took."""
DRAIN_SECONDS = 30
"""For which replies under way may go on when the server ends."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server listens, and whom it answers."""

    model: str
    """The name by which clients ask for the model."""
    runtime_folder: Path
    """Where the socket for commands of this machine is made."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    api_key: str | None = None
    idle: float | None = None
    """Seconds without requests after which the server ends."""
    aliases: Sequence[str] = ()
    """Further names of the model."""
    any_model: bool = False
    """Whether every other name is taken, too."""


def run(
    options: ServerOptions,
    settings: Settings,
    listener: socket.socket,
    load: Callable[[], EngineThread[Engine]],
    say: Callable[[str], None],
) -> int | None:
    """Load and serve until a signal comes or time runs out; return the signal.

    load: returns the engine in its thread, loaded. say: called with what the server does, for people.
    """
    from spd.runtime import make_plan

    settings.vocabulary.need_tokenizer()
    folder = runtime_folder(options.runtime_folder)
    path = folder / f"{os.getpid()}.sock"
    made_of = identity(settings.config)
    solo = make_plan(dataclasses.replace(settings.config, slots=1))
    thread = load()
    try:
        service = Service(
            settings,
            (options.model, *options.aliases),
            thread,
            any_model=options.any_model,
            say=say,
        )
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{listener.getsockname()[1]}/v1"
        plan = service.plan
        what = f"{service.slots} at once, context {plan.shape.ctx:,}, drafts: {plan.spec}"
        say(f"serving {options.model} at {url} ({what})")
        template = settings.vocabulary.template
        if (
            template is not None
            and template.supports_tools
            and checked_form(template) is FALLBACK_FORM
        ):
            say(f"note: {UNKNOWN_FORM}")
        front = LocalSocket(service, solo, made_of, url, path)
        server = Server(service, options, front, say)
        asyncio.run(server.serve([listener]))
    finally:
        path.unlink(missing_ok=True)
        thread.close(5.0)
    log = Path("/proc/self/fd/2").resolve()
    if log.parent == folder.resolve():  # of a detached server, which has ended as it should
        log.unlink()
    return server.received


def check_address(host: str, api_key: str | None) -> None:
    """Raise UsageError where other machines could ask without having been meant to."""
    if api_key is not None and not (api_key.isascii() and api_key.strip()):
        fix = "SPD_API_KEY=$(openssl rand -hex 16)"
        raise UsageError("--api-key is empty or not ASCII", fix=[fix])
    if host in LOOPBACK:
        return
    if api_key is None:
        words = f"--host {host} lets other machines ask, and there is no key"
        fixes = ["--host with --api-key KEY, or SPD_API_KEY", "leave --host out"]
        raise UsageError(words, fix=fixes, code="no_api_key")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that has the address. Raises UsageError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        words = f"cannot listen at {host}, port {port}: {error.strerror}"
        raise UsageError(words, fix=["--port N"]) from None


def load(settings: Settings, progress: Progress) -> EngineThread[Engine]:
    """Return the engine in a thread of its own, loaded. Raises what loading raised."""
    from spd.runtime import Engine

    def build(_: Progress) -> Engine:
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
    """A server that ends as the rest of spd does: the first signal lets replies end, the second does not."""

    def __init__(
        self,
        service: Service,
        options: ServerOptions,
        front: LocalSocket | None = None,
        say: Callable[[str], None] = lambda words: None,
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
        self._service = service
        self._idle = options.idle
        self._front = front
        self._say = say
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
        self._say("stopping…")
        self.drain()

    def drain(self) -> None:
        """End when the replies under way have ended."""
        self._service.draining = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        service = self._service
        idle = self._idle
        now = time.monotonic()
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
