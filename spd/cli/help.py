"""Help as plain lines: the most used options first, no name broken, no line wider than the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

FIRST, IN, OTHER, LAST = "Most used", "Prompt and sampling", "Output", "Advanced"
"""Panels: the first one, that of all that goes in, that of what names none, the last one."""
MOST, LEAST = 30, 24
"""Columns of the names at most, and the fewest that their help needs beside them."""


class Help(TyperCommand):
    """A command with such help."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Print it."""
        _print(self, ctx)


class GroupHelp(TyperGroup):
    """The same for the list of commands."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Print help."""
        _print(self, ctx)


def _print(command: Any, context: typer.Context) -> None:
    columns = shutil.get_terminal_size((80, 24)).columns
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = "\n".join(help_lines(command, context, columns))
    typer.echo(text.encode(encoding, "replace").decode(encoding), nl=False)  # Typer ends the line


def help_lines(command: Any, context: typer.Context, columns: int) -> Iterator[str]:
    """The help of a command or of all commands, on lines of so many columns."""
    yield from _filled(command.get_usage(context), columns, rest="  ")
    for paragraph in command.help.split("\n\n"):
        yield from ("", *_filled(paragraph, columns))
    panels: dict[str, list[tuple[str, str]]] = {"": [], FIRST: [], IN: []}
    if isinstance(command, TyperGroup):
        panels["Commands"] = [(name, each.help or "") for name, each in command.commands.items()]
    for param in command.get_params(context):
        other = "" if param.param_type_name == "argument" else OTHER
        panel = getattr(param, "rich_help_panel", None) or other
        panels.setdefault(panel, []).append((_names(param), param.help or ""))
    for panel in (OTHER, LAST):
        panels[panel] = panels.pop(panel, [])
    width = max(len(name) for records in panels.values() for name, _ in records if len(name) <= MOST)
    for panel, records in panels.items():
        if records:
            yield from ("", f"{panel}:") if panel else [""]
        for name, said in records:
            yield from _record(name, said, columns, width)
    yield from ("", "Examples:")
    for example in command.epilog.splitlines():
        yield from _filled(example, columns, "  ", "      ")


def _names(param: Any) -> str:
    """`-m, --model MODEL`: short names first, then what the value is."""
    if param.param_type_name == "argument":
        return str(param.metavar)
    names = sorted((*param.opts, *param.secondary_opts), key=lambda name: name.startswith("--"))
    shown = ", ".join(names) if len(names[0]) == 2 else "    " + ", ".join(names)
    choices = "|".join(map(str, getattr(param.type, "choices", ())))
    value = "" if param.is_flag or param.count else param.metavar or choices or "VALUE"
    return f"{shown} {value}".rstrip()


def _record(name: str, said: str, columns: int, width: int) -> Sequence[str]:
    """A name and its help beside it, or below it where either has no room."""
    beside = columns - width - 4
    if beside < LEAST:
        return [*_filled(name.strip(), columns, "  ", "      "), *_filled(said, columns, "      ", "      ")]
    rows = textwrap.wrap(said, beside, break_on_hyphens=False) or [""]
    if len(name) > width:
        return [f"  {name}", *(f"{'':{width + 4}}{row}" for row in rows)]
    return [f"  {'' if index else name:{width}}  {row}".rstrip() for index, row in enumerate(rows)]


def _filled(text: str, columns: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )
