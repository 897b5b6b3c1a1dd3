"""Plain arguments of a command, parsed by the table of its options without Typer.

Typer takes half of a short run to import. Whatever is not plain is left to it: help, every fault,
names of other tools, joined short options, and arguments that are lists.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KNOWN_SETTINGS = frozenset(
    {"autocompletion", "count", "envvar", "help", "max", "metavar", "min", "parser"}
    | {"rich_help_panel", "show_default"}
)
"""Keywords of `typer.Option` that are understood here."""


class PlainArguments(NamedTuple):
    """The values of a command's options by their fields, and the names of those that were typed."""

    values: dict[str, Any]
    typed: frozenset[str]


class _NotPlainError(Exception):
    """What was typed is left to Typer."""


class _Switch(NamedTuple):
    """The field of an option, and the value that a flag sets; None where a value follows."""

    field: dataclasses.Field[Any]
    value: bool | None


def parse_plain(
    options: type[Any], argv: Sequence[str], environ: Mapping[str, str]
) -> PlainArguments | None:
    """Return the values of a command's options and arguments; None where they are not plain.

    options: a dataclass of `options.option` and `options.argument`.
    """
    fields = [field for field in dataclasses.fields(options) if "option" in field.metadata]
    try:
        values = _parse_words(fields, argv)
        typed = frozenset(values)
        for field in fields:
            text = environ.get(field.metadata["option"].get("envvar") or "")
            if text and field.name not in values:
                values[field.name] = _convert_text(field, text)
            elif field.name not in values:
                values[field.name] = _default_value(field)
    except Exception:  # Typer finds the fault again, and words it
        return None
    return PlainArguments(values, typed)


def option_names(options: type[Any]) -> frozenset[str]:
    """Return every name of a command's options, such as --spec and --no-adaptive."""
    all_names: list[str] = []
    for field in dataclasses.fields(options):
        if field.metadata.get("names") is not None:
            long_name = f"--{field.name.replace('_', '-')}"
            all_names += [
                long_name,
                *(n for name in field.metadata["names"] for n in name.split("/")),
            ]
    return frozenset(all_names)


def _parse_words(fields: Sequence[dataclasses.Field[Any]], argv: Sequence[str]) -> dict[str, Any]:
    """Return the typed values by field. Raises an exception of any kind for what is not plain."""
    switches = _switches_by_name(fields)
    arguments = iter([field for field in fields if field.metadata["names"] is None])
    values: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith("-") or word == "-":
            field = next(arguments)
            if "list" in str(field.type):
                raise _NotPlainError
            values[field.name] = _convert_text(field, word)
            continue
        name, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        field, value = switches[name]
        if value is None:
            converted = _convert_text(field, text if equals else next(words))
            is_list = "list" in str(field.type)
            values[field.name] = [*values.get(field.name, ()), converted] if is_list else converted
        elif equals:
            raise _NotPlainError
        elif "count" in field.metadata["option"]:
            values[field.name] = values.get(field.name, 0) + 1
        else:
            values[field.name] = value
    return values


def _switches_by_name(fields: Sequence[dataclasses.Field[Any]]) -> dict[str, _Switch]:
    """Return the options by each of their names; those with an optional value are left out.

    Raises _NotPlainError for an option with settings that are not known here.
    """
    switches = {}
    for field in fields:
        names = field.metadata["names"]
        settings = field.metadata["option"]
        if not settings.keys() <= KNOWN_SETTINGS:
            raise _NotPlainError
        if names is None or str(settings["metavar"]).startswith("["):
            continue  # an argument, or an option that may stand without a value
        if not any(name.startswith("--") for name in names):
            names = (*names, f"--{field.name.replace('_', '-')}")
        is_flag = settings["metavar"] is None
        for name in names:
            on, _, off = name.partition("/")
            switches[on] = _Switch(field, True if is_flag else None)
            if off:
                switches[off] = _Switch(field, False)
    return switches


def _convert_text(field: dataclasses.Field[Any], text: str) -> Any:
    """Return text as a value of a field. Raises an exception where it is none."""
    settings = field.metadata["option"]
    annotation = str(field.type)
    if settings.get("parser") is not None:
        return settings["parser"](text)
    if "Literal" in annotation and text not in re.findall("'([^']*)'", annotation):
        raise _NotPlainError
    if re.search(r"\bPath\b", annotation):
        return Path(text)
    match = None if "Literal" in annotation else re.search(r"\b(float|int)\b", annotation)
    if match is None:
        return text
    number = float(text) if match[1] == "float" else int(text)
    if not settings.get("min", number) <= number <= settings.get("max", number):
        raise _NotPlainError
    return number


def _default_value(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field. Raises _NotPlainError for a required one."""
    if field.default is dataclasses.MISSING:
        raise _NotPlainError
    return field.default
