"""Tables as text that fits a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from spd.cli.text.output import as_line
from spd.cli.text.wrap import cells, fit_lines

WIDTH = 80
NUMERIC = tuple("0123456789+-<>")


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, expendable: int = 0, columns: int | None = None
) -> str:
    """Words to the left, numbers to the right, in a terminal's columns, or in 80 where they can be.

    What is too wide stands closer together, then goes without up to `expendable` of its last columns; on a
    terminal that is narrower still each row becomes a line of named cells.
    """
    text = ""
    header, *rows = ([as_line(cell) for cell in row] for row in (header, *rows))
    for dropped in range(expendable + 1):
        kept = len(header) - dropped
        for gap in ("  ", " "):
            text = _aligned([row[:kept] for row in (header, *rows)], gap)
            if max(map(cells, text.splitlines())) <= (columns or WIDTH):
                return text
    return text if columns is None else fit_lines(_named(header, rows), columns)


def _named(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A line a row: words as they are, numbers with their names; what is left out at its start, as above."""
    text = ""
    above: Sequence[str] = ()
    for row in rows:
        given = next((i for i, cell in enumerate(row) if cell), 0)
        above = [*above[:given], *row[given:]]
        shown = [
            f"{name} {cell}" if name and cell[:1] in NUMERIC else cell
            for name, cell in zip(header, above, strict=True)
        ]
        text += " · ".join(cell for cell in shown if cell) + "\n"
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
