"""Options of the commands on the local cache of models."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import typer

from spd.cli.options import CommonOptions, cached_names

_output = functools.partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PullOptions(CommonOptions):
    """Everything `spd pull` takes."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="org/name on the Hugging Face hub.")]
    revision: Annotated[str | None, typer.Option(metavar="REV", help="Branch, tag or commit.")] = None
    dry_run: Annotated[bool, _output("--dry-run", help="List the files; download none of the weights.")] = (
        False
    )
    json: Annotated[bool, _output("--json", help="One JSON object.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ListOptions(CommonOptions):
    """Everything `spd ls` takes."""

    json: Annotated[bool, _output("--json", help="One JSON object.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RemoveOptions(CommonOptions):
    """Everything `spd rm` takes."""

    names: Annotated[
        list[str], typer.Argument(metavar="NAME…", autocompletion=cached_names, help="org/name in the cache.")
    ]
    yes: Annotated[bool, _output("-y", "--yes", help="Do not ask.")] = False
    dry_run: Annotated[bool, _output("--dry-run", help="Say what would be removed.")] = False
