"""Facts in lines and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spd.cli.terminal.plain_text import LABEL, LISTED
from spd.runtime.plan.config import format_size


class Size(int):
    """Bytes: a number in JSON, and in the unit that suits them for people."""

    def __str__(self) -> str:
        return format_size(int(self))


PIPE_COLUMNS = 100
"""Where lines of facts are broken for a pipe or a file."""


def fact_lines(
    facts: Mapping[str, Any], indent: str = "", width: int = 0, columns: int | None = None
) -> Iterator[str]:
    """Yield a JSON object for people: `name  field value · field value`, what is nested below, nothing empty.

    columns: where a line is broken between fields; None leaves the line whole.
    """
    width = width or max(LABEL, *map(len, facts))
    for name, value in facts.items():
        if name == "schema" or _is_empty(value):
            continue
        label = f"{indent + name.replace('_', ' '):<{width}}  "
        for each in value if _is_nested(value) and not isinstance(value, Mapping) else (value,):
            if not isinstance(each, Mapping):
                yield label + _words(each)
                continue
            own = {key: one for key, one in each.items() if not (_is_empty(one) or _is_nested(one))}
            fields = [f"{key.replace('_', ' ')} {_words(one)}" for key, one in own.items()]
            yield from _broken(label, fields, columns)
            below = {key: one for key, one in each.items() if key not in own}
            yield from fact_lines(below, indent + "  ", width, columns)


def _broken(label: str, fields: Sequence[str], columns: int | None) -> Iterator[str]:
    """Yield `label field · field`, in rows of `columns` below each other; a longer field has its own row."""
    row = label
    for number, field in enumerate(fields):
        if number and columns is not None and len(f"{row} · {field} ·") > columns:
            yield f"{row} ·"
            row = " " * len(label) + field
        else:
            row += f" · {field}" if number else field
    yield row.rstrip()


def _is_empty(value: Any) -> bool:
    return value in (None, "", [], (), {}) or (isinstance(value, Size) and not value)


def _is_nested(value: Any) -> bool:
    """Whether it is an object or a list of them."""
    return isinstance(value, Mapping) or (isinstance(value, list) and isinstance(value[0], Mapping))


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        more = len(value) - LISTED
        return ", ".join(map(_words, value[:LISTED])) + (f" and {more:,} more" if more > 0 else "")
    return (
        f"{value:,}"
        if type(value) is int
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Words to the left, numbers to the right."""
    turned = []
    for column in zip(header, *rows, strict=True):
        numbers = any(cell[:1].isdigit() and " " not in cell for cell in column[1:])
        width = max(map(len, column))
        turned.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*turned, strict=True)]
