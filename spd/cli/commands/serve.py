"""`spd serve`: the engine behind HTTP and a Unix socket, for the API's clients and for spd itself."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Annotated

import typer

from spd.cli.help import FIRST
from spd.cli.options import (
    AdvancedOptions,
    CommonOptions,
    ContextOption,
    GenerateOptions,
    MemoryOption,
    ModelOptions,
    Session,
    SpeculationOptions,
    model_names,
)
from spd.errors import UsageError

_first = functools.partial(typer.Option, rich_help_panel=FIRST)
_server = functools.partial(typer.Option, rich_help_panel="Server")
PORT = 7373


def parse_seconds(text: str) -> float:
    """A time such as 90, 90s, 15m or 2h, in seconds. Raises BadParameter."""
    match = re.fullmatch(r"([0-9]{1,9})([smh]?)", text.strip())
    if match is None or not int(match[1]):
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 15m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServeOptions(
    MemoryOption, AdvancedOptions, CommonOptions, SpeculationOptions, ContextOption, ModelOptions
):
    """Everything `spd serve` takes."""

    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", autocompletion=model_names, help="A folder, org/name, or demo. Default: demo."
        ),
    ] = None
    host: Annotated[
        str, _first(metavar="HOST", help="Listen there; beyond this machine with a key only.")
    ] = "127.0.0.1"
    port: Annotated[int, _first(metavar="PORT", help=f"0: a free one. Default: {PORT}.")] = PORT
    api_key: Annotated[
        str | None,
        _first(metavar="KEY", envvar="SPD_API_KEY", help="Clients have to send it. Better in SPD_API_KEY."),
    ] = None
    concurrency: Annotated[
        int | None, _server(metavar="N", help="Requests that decode together. Default: 8.")
    ] = None
    detach: Annotated[bool, _server("--detach", help="Serve in the background; return when ready.")] = False
    idle: Annotated[
        float | None,
        _server(parser=parse_seconds, metavar="TIME", help="End after such a time without requests: 15m."),
    ] = None
    status: Annotated[bool, _server("--status", help="Tell which servers run, and end.")] = False
    stop: Annotated[bool, _server("--stop", help="Stop servers: of MODEL, or all of yours.")] = False
    typed: frozenset[str] = frozenset()
    """Names of these fields that stood on the command line."""

    def as_generate(self) -> GenerateOptions:
        """What `spd generate --jsonl` would be asked for the same engine."""
        names = {field.name for field in dataclasses.fields(GenerateOptions)}
        values = {name: value for name, value in vars(self).items() if name in names}
        return GenerateOptions(**{**values, "jsonl": True})


def serve(session: Session, options: ServeOptions) -> int:
    """Serve a model over HTTP on this machine, and keep it warm for spd generate and spd chat."""
    if {"model_argument", "model"} <= options.typed and options.model_argument != options.model:
        raise UsageError(
            "the model is given twice: as an argument and with --model",
            fix=["use one of them"],
            code="conflict_two_models",
        )
    options = dataclasses.replace(options, model=options.model_argument or options.model)
    from spd.cli.serve.run import run

    return run(session, options)
