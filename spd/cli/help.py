"""Help that cuts no name: Typer's tables where they fit, else each name with its help below it."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from spd.cli.output import is_terminal

_CUT = re.compile(r"[\w-]+…")
"""How a table ends a word that its column has no room for, and how a few words end anyway."""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
WIDE = 10_000


class Help(TyperCommand):
    """A command whose help names every option whole at any width."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Print help."""
        _print(self, ctx, lambda: super(Help, self).format_help(ctx, formatter))


class GroupHelp(TyperGroup):
    """The same for the list of commands."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Print help."""
        _print(self, ctx, lambda: super(GroupHelp, self).format_help(ctx, formatter))


class _Shown(io.StringIO):
    """What would go to standard output, which is a terminal or not and has an encoding."""

    def __init__(self) -> None:
        super().__init__()
        self._output = sys.stdout

    def isatty(self) -> bool:
        return is_terminal(self._output)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._output, "encoding", None) or "utf-8"


def _print(command: Any, context: typer.Context, print_tables: Callable[[], None]) -> None:
    """Print the tables if no word of theirs is cut and no line too wide, else the lines."""
    from rich.console import Console

    with contextlib.redirect_stdout(_Shown()) as shown:
        print_tables()
    # rich takes a terminal that cannot move its cursor for 80 columns, whatever it says
    columns = min(Console().width, shutil.get_terminal_size((WIDE, 24)).columns)
    help_text, seen = shown.getvalue(), _STYLE.sub("", shown.getvalue())
    meant = _CUT.findall("\n".join(help_lines(command, context, WIDE)))
    if not set(_CUT.findall(seen)) <= set(meant) or any(len(line) > columns for line in seen.splitlines()):
        help_text = "\n".join(help_lines(command, context, columns)) + "\n"
    typer.echo(help_text, nl=False, color=True)


def help_lines(command: Any, context: typer.Context, columns: int) -> Iterator[str]:
    """The help of a command or of all commands, on lines of so many columns."""

    def filled(text: str, first: str = "", rest: str = "") -> list[str]:
        wrapper = textwrap.TextWrapper(columns, first, rest, break_on_hyphens=False)
        return wrapper.wrap(" ".join(text.split()))

    yield from filled(command.get_usage(context), rest="  ")
    for paragraph in command.help.split("\n\n"):
        yield from ("", *filled(paragraph))
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(context):
        if (record := param.get_help_record(context)) is not None:
            panel = getattr(param, "rich_help_panel", None) or f"{param.param_type_name}s".capitalize()
            panels.setdefault(panel, []).append(record)
    if isinstance(command, TyperGroup):
        panels["Commands"] = [(name, each.help or "") for name, each in command.commands.items()]
    for panel, records in panels.items():
        yield from ("", f"{panel}:") if records else ()
        for name, said in records:
            yield from (*filled(name, "  ", "      "), *filled(said, "      ", "      "))
    for paragraph in command.epilog.strip().split("\n\n"):
        yield from ("", *filled(paragraph, rest="  "))
