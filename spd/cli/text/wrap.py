"""Facts, lines and tables that people read, broken between words where their terminal is too narrow."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 80
LABEL = 16
"""Columns of a name, or as many as the longest needs."""
LISTED = 8
"""Members of a list that are spelled out."""
_LABEL = re.compile(r" *(?:\S+ )?\S+ {2,}(?=\S)")
"""What stands in front of a fact: one or two words and a gap."""
_PASTED = re.compile(
    r" *(?:fix: )?(?:spd|echo|export|hf|iconv|jq|pip|torchrun|unset|[A-Z_]+=\S*|[-/{]\S*)(?: (?! )|$)"
)
"""The beginning of a line that is typed as it stands."""


def fit_lines(text: str, columns: int | None) -> str:
    """Wrap text to `columns`; None stands for no terminal, where nothing is wrapped.

    Further rows of a line are indented below its fact or by two blanks. A word longer than a row, and a line
    to be pasted, are left to the terminal, which copies them whole.
    """
    return text if columns is None else "\n".join(_wrapped(line, columns) for line in text.split("\n"))


def _wrapped(line: str, columns: int) -> str:
    if cells(line) < columns or _PASTED.match(line):
        return line
    label = _LABEL.match(line)
    indent = label.end() if label else len(line) - len(line.lstrip()) + 2
    hang = " " * (indent if indent <= columns // 3 else 2)
    return textwrap.fill(
        line, columns - 1, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )


def cells(text: str) -> int:
    """Columns that a text takes at most."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


class Size(int):
    """Bytes: a number in JSON, and in the unit that suits them for people."""

    def __str__(self) -> str:
        from spd.runtime.plan.config import show_size

        return show_size(int(self))


def fact_lines(facts: Mapping[str, Any], indent: str = "", width: int = 0) -> Iterator[str]:
    """A JSON object for people: `name  field value · field value`, and what has fields of its own below it.

    What is empty is left out, and the name of the schema.
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
            fields = " · ".join(f"{key.replace('_', ' ')} {_words(one)}" for key, one in own.items())
            yield (label + fields).rstrip()
            yield from fact_lines(
                {key: one for key, one in each.items() if key not in own}, indent + "  ", width
            )


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
    return f"{value:,}" if type(value) is int else f"{value:.4g}" if isinstance(value, float) else str(value)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Words to the left, numbers to the right."""
    turned = []
    for column in zip(header, *rows, strict=True):
        numbers = any(cell[:1].isdigit() and " " not in cell for cell in column[1:])
        width = max(map(len, column))
        turned.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*turned, strict=True)]
