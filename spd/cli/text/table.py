"""Tables as text that fits a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from spd.cli.text.output import as_line
from spd.cli.text.wrap import cells

WIDTH = 80


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, expendable: int = 0, columns: int | None = None
) -> list[str]:
    """Words to the left, numbers to the right, in a terminal's columns, or in 80 where they can be.

    What is too wide goes without up to `expendable` of its last columns, and may then be too wide still.
    """
    shown = [[as_line(cell) for cell in row] for row in (header, *rows)]
    lines: list[str] = []
    for kept in range(len(header), len(header) - expendable - 1, -1):
        lines = _aligned([row[:kept] for row in shown])
        if max(map(cells, lines)) <= (columns or WIDTH):
            break
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    turned = []
    for column in zip(*rows, strict=True):
        numbers = any(cell[:1].isdigit() and " " not in cell for cell in column[1:])
        width = max(map(len, column))
        turned.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*turned, strict=True)]
