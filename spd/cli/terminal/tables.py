"""JSON objects as lines for people, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spd.cli.terminal.plain_text import LABEL_COLUMNS, LIST_LIMIT
from spd.runtime.plan.config import format_size


class Size(int):
    """A size in bytes: a number in JSON, and with a suitable unit in text."""

    def __str__(self) -> str:
        """Return the size with its unit."""
        return format_size(int(self))


PIPE_COLUMNS = 100
"""The width of lines of facts in a pipe or a file."""


def fact_lines(
    facts: Mapping[str, object], indent: str = "", width: int = 0, columns: int | None = None
) -> Iterator[str]:
    """Yield lines of a JSON object for people: `name  field value · field value`.

    Nested objects follow on lines of their own; empty values are left out.
    columns: the width at which a line is broken between fields; None breaks none.
    """
    width = width or max(LABEL_COLUMNS, *map(len, facts))
    for name, value in facts.items():
        if name == "schema" or _is_empty(value):
            continue
        label = f"{indent + name.replace('_', ' '):<{width}}  "
        entries = value if isinstance(value, list) and _is_nested(value) else [value]
        for entry in entries:
            if not isinstance(entry, Mapping):
                yield label + _format_value(entry)
                continue
            simple_fields = {
                key: field
                for key, field in entry.items()
                if not (_is_empty(field) or _is_nested(field))
            }
            texts = [
                f"{key.replace('_', ' ')} {_format_value(field)}"
                for key, field in simple_fields.items()
            ]
            yield from _break_fields(label, texts, columns)
            nested_fields = {key: field for key, field in entry.items() if key not in simple_fields}
            yield from fact_lines(nested_fields, indent + "  ", width, columns)


def _break_fields(label: str, fields: Sequence[str], columns: int | None) -> Iterator[str]:
    """Yield `label field · field` in rows of at most `columns`.

    A longer field gets a row of its own.
    """
    row = label
    for number, field in enumerate(fields):
        if number and columns is not None and len(f"{row} · {field} ·") > columns:
            yield f"{row} ·"
            row = " " * len(label) + field
        else:
            row += f" · {field}" if number else field
    yield row.rstrip()


def _is_empty(value: object) -> bool:
    """True if a value is None, an empty text or collection, or a size of 0."""
    return value in (None, "", [], (), {}) or (isinstance(value, Size) and not value)


def _is_nested(value: object) -> bool:
    """True if a value is an object or a list of objects."""
    return isinstance(value, Mapping) or (isinstance(value, list) and isinstance(value[0], Mapping))


def _format_value(value: object) -> str:
    """Return a value as text: yes or no, lists cut to LIST_LIMIT, thousands separated."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        num_omitted = len(value) - LIST_LIMIT
        return ", ".join(map(_format_value, value[:LIST_LIMIT])) + (
            f" and {num_omitted:,} more" if num_omitted > 0 else ""
        )
    return (
        f"{value:,}"
        if type(value) is int
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: text left-aligned, numbers right-aligned."""
    padded_columns = []
    for column in zip(header, *rows, strict=True):
        is_numeric = any(cell[:1].isdigit() and " " not in cell for cell in column[1:])
        width = max(map(len, column))
        padded_columns.append(
            [cell.rjust(width) if is_numeric else cell.ljust(width) for cell in column]
        )
    return ["  ".join(row).rstrip() for row in zip(*padded_columns, strict=True)]
