"""`spd serve`: the engine behind HTTP and a Unix socket, for the API's clients and for spd itself."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import partial

import typer

from spd.cli.options import GenerateOptions, ModelArgument, RunOptions, first, option
from spd.cli.text.output import Session
from spd.errors import UsageError

_server = partial(option, "Server")
PORT = 7373


def parse_seconds(text: str) -> float:
    """A time such as 90, 90s, 15m or 2h, in seconds. Raises BadParameter."""
    match = re.fullmatch(r"([0-9]{1,9})([smh]?)", text.strip())
    if match is None or not int(match[1]):
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 15m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServeOptions(ModelArgument, RunOptions):
    """Everything `spd serve` takes."""

    host: str = first(
        "127.0.0.1", "HOST", "Address to listen on; beyond this machine only with a key."
    )
    port: int = first(PORT, "PORT", f"Default: {PORT}. 0: a free one.", min=0, max=65535)
    api_key: str | None = first(
        None, "KEY", "Clients send it. Better in SPD_API_KEY.", envvar="SPD_API_KEY"
    )
    concurrency: int | None = _server(
        None, "N", "Requests decoded together. Default: 8.", min=1, max=1024
    )
    detach: bool = _server(False, None, "Serve in the background; return when ready.")
    idle: float | None = _server(
        None, "TIME", "Exit after that long without requests.", parser=parse_seconds
    )
    alias: list[str] | None = _server(None, "NAME", "Another name of the model. Repeatable.")
    any_model: bool = _server(False, None, "Answer whatever model a request names.")
    status: bool = _server(False, None, "List the servers that run, and exit.")
    json: bool = _server(False, None, "With --status, as one JSON object.")
    stop: bool = _server(False, None, "Stop servers: of MODEL, or all of yours.")

    def as_generate(self) -> GenerateOptions:
        """What `spd generate --jsonl` would be asked for the same engine."""
        names = {field.name for field in dataclasses.fields(GenerateOptions)}
        values = {name: value for name, value in vars(self).items() if name in names - {"json"}}
        return GenerateOptions(**{**values, "jsonl": True})


def serve(session: Session, options: ServeOptions) -> int:
    """Serve a model over HTTP on this machine, and keep it warm for spd generate and chat.

    Examples:
      spd serve Qwen/Qwen3-4B --detach --idle 15m
      spd serve --status
    """
    if options.json and (options.stop or options.detach or not options.status):
        raise UsageError("--json is for --status", fix=["spd serve --status --json"])
    if options.status or options.stop or options.detach:
        from spd.cli.serve import local

        return (local.detach if options.detach else local.control)(session, options)
    from spd.cli.serve.run import run

    return run(session, options)
