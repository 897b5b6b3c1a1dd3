"""Tables as text that fits a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence

WIDTH = 80


def wrap_line(line: str, columns: int) -> str:
    """A line broken between words, where it is too long for so many columns; what follows is indented."""
    if len(line) < columns:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line,
        max(columns - 1, len(indent) + 8),
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_on_hyphens=False,
    )


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, expendable: int = 0) -> str:
    """Words to the left, numbers to the right, in 80 columns where they can be.

    What is too wide stands closer together, then goes without up to `expendable` of its last columns.
    """
    text = ""
    for dropped in range(expendable + 1):
        kept = len(header) - dropped
        for gap in ("  ", " "):
            text = _aligned([row[:kept] for row in (header, *rows)], gap)
            if max(map(len, text.splitlines())) <= WIDTH:
                return text
    return text


def _aligned(lines: Sequence[Sequence[str]], gap: str) -> str:
    columns = range(len(lines[0]))
    widths = [max(len(row[i]) for row in lines) for i in columns]
    left = [not any(row[i][:1].isdigit() for row in lines[1:]) for i in columns]
    text = ""
    for row in lines:
        cells = [
            cell.ljust(width) if side else cell.rjust(width)
            for cell, width, side in zip(row, widths, left, strict=True)
        ]
        text += gap.join(cells).rstrip() + "\n"
    return text


def render_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines)


def render_csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Comma-separated values with Unix line ends; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
