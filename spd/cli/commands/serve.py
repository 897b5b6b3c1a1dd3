"""`spd serve`: serves an engine over HTTP and a Unix socket, to API clients and to spd itself."""

from __future__ import annotations

import dataclasses
import re
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from spd.cli.options import GenerateOptions, ModelArgument, RunOptions, main_option, option
from spd.cli.parser import bad_value
from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Session, write_stderr_line
from spd.cli.terminal.progress import loading
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.runtime import Engine
    from spd.runtime.engine.driver import EngineThread
    from spd.server.run import ServerOptions

_server_option = partial(option, "Server")
"""Makes an option in the panel `Server` of the help."""
DEFAULT_PORT = 7373
"""The TCP port of the server unless --port is set."""


def parse_seconds(text: str) -> float:
    """Return a time such as 90, 90s, 15m or 2h in seconds.

    Raises BadParameter for 0 and other texts.
    """
    match = re.fullmatch(r"([0-9]{1,9})([smh]?)", text.strip())
    if match is None or not int(match[1]):
        raise bad_value(f"{text!r} is not a time such as 90s, 15m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServeOptions(ModelArgument, RunOptions):
    """The options of `spd serve`."""

    host: str = main_option(
        "127.0.0.1", "HOST", "Address to listen on; beyond this machine only with a key."
    )
    port: int = main_option(
        DEFAULT_PORT, "PORT", f"Default: {DEFAULT_PORT}. 0: a free one.", min=0, max=65535
    )
    api_key: str | None = main_option(
        None, "KEY", "Clients send it. Better in SPD_API_KEY.", envvar="SPD_API_KEY"
    )
    concurrency: int | None = _server_option(
        None, "N", "Requests decoded together. Default: 8.", min=1, max=1024
    )
    detach: bool = _server_option(False, None, "Serve in the background; return when ready.")
    idle: float | None = _server_option(
        None, "TIME", "Exit after that long without requests.", parser=parse_seconds
    )
    alias: list[str] | None = _server_option(
        None, "NAME", "Another name of the model, '*' for any. Repeatable."
    )
    status: bool = _server_option(False, None, "List the servers that run, and exit.")
    json: bool = _server_option(False, None, "With --status, as one JSON object.")
    stop: bool = _server_option(False, None, "Stop servers: of MODEL, or all of yours.")
    kernels: Literal["auto"] = "auto"
    lag: Literal["auto"] = "auto"
    """Like `kernels` no option here, as a server is no benchmark."""

    def to_generate_options(self) -> GenerateOptions:
        """Return the options of `spd generate --jsonl` for the same engine."""
        names = {field.name for field in dataclasses.fields(GenerateOptions)}
        values = {name: value for name, value in vars(self).items() if name in names - {"json"}}
        return GenerateOptions(**{**values, "jsonl": True})

    def to_server_options(self, runtime_folder: Path) -> ServerOptions:
        """Return the options of the server without those of its engine."""
        from spd.server.run import ServerOptions

        return ServerOptions(
            model=self.model,
            runtime_folder=runtime_folder,
            host=self.host,
            port=self.port,
            api_key=self.api_key,
            idle=self.idle,
            aliases=self.alias or (),
        )


def serve(session: Session, options: ServeOptions) -> int:
    """Serve a model over HTTP on this machine, and keep it warm for spd generate and chat.

    Examples:
      spd serve Qwen/Qwen3-4B --detach --idle 15m
      spd serve --status
    """
    if options.json and (options.stop or options.detach or not options.status):
        raise UsageError("--json is for --status", fix=["spd serve --status --json"])
    if options.status or options.stop or options.detach:
        from spd.cli import served

        if options.detach:
            return served.start_detached(session, options.model)
        is_named = not {"model", "model_argument"}.isdisjoint(options.typed)
        model = options.model if is_named else None
        return served.control_servers(session, model, stop=options.stop, as_json=options.json)
    from spd.cli.commands.models import offer_downloads
    from spd.cli.run_settings import plan_settings
    from spd.server.run import check_address, load_engine_thread, open_listener, run_server

    def load_engine() -> EngineThread[Engine]:
        """Load the engine, show progress, and return its thread."""
        with loading(f"loading {options.model}", session.console) as display:
            return load_engine_thread(settings, display)

    def print_message(message: str) -> None:
        """Print a line to standard error unless --quiet is set."""
        if not session.console.quiet:
            write_stderr_line(message)

    check_address(options.host, options.api_key)
    try:
        opened = open_listener(options.host, options.port)
    except UsageError as error:
        raise _name_own_server(error, session, options.port) from None
    with opened as listener:
        offer_downloads(session, options)
        settings = plan_settings(options.to_generate_options())
        received = run_server(
            options.to_server_options(session.runtime_folder),
            settings,
            listener,
            load_engine,
            print_message,
        )
    if received == signal.SIGINT:
        raise Interrupted(received)
    return 0


def _name_own_server(error: UsageError, session: Session, port: int) -> UsageError:
    """Return the error of a port in use, with the server of this user that uses it."""
    from urllib.parse import urlsplit

    from spd.server.client import find_servers

    for connection, server_info in find_servers(session.runtime_folder, session.console.note):
        connection.close()
        if urlsplit(server_info["url"]).port == port:
            error.reason = (f"spd serves {server_info['model']} there (pid {server_info['pid']})",)
            error.fix = ("spd serve --stop", *error.fix)
    return error
