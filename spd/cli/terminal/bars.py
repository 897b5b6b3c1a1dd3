"""Bars with intervals, drawn in characters: in Unicode's blocks, or in ASCII where they cannot be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spd.cli.terminal.plain_text import cells, shortened

NARROW = 60  # columns below which a bar stands under its label
WIDEST = 60  # characters of a bar at most
BEYOND = 1.25  # how far beyond the largest value the axis follows an interval


@dataclass(frozen=True)
class BarGlyphs:
    """The characters of a bar and of the interval over its end."""

    block: str
    low: str
    span: str
    value: str
    high: str
    cut: str
    """In the last place, where an interval goes on beyond the axis."""


UNICODE = BarGlyphs("█", "├", "─", "┼", "┤", "▸")
ASCII = BarGlyphs("#", "[", "-", "+", "]", ">")


@dataclass(frozen=True)
class Bar:
    """A value that is not negative, and the interval around it where there is one."""

    label: str
    value: float
    words: str
    low: float | None = None
    high: float | None = None


def bar_lines(bars: Sequence[Bar], columns: int, glyphs: BarGlyphs, axis: float = 0.0) -> list[str]:
    """Return a line a bar, or two where the terminal is narrow, each shorter than `columns`.

    axis: the value at the right end; 0: the largest value, and its interval where that is near.
    """
    if not bars:
        return []
    largest = max(bar.value for bar in bars)
    reach = max(bar.value if bar.high is None else bar.high for bar in bars)
    axis = axis or min(reach, BEYOND * largest) or 1.0
    words = max(cells(bar.words) for bar in bars)
    if columns < NARROW:
        width = max(4, min(WIDEST, columns - words - 4))
        lines = []
        for bar in bars:
            lines.append(shortened(bar.label, columns - 1))
            lines.append(f"  {_drawn(bar, width, axis, glyphs)} {bar.words}")
        return lines
    label_width = min(columns // 3, max(cells(bar.label) for bar in bars))
    width = max(4, min(WIDEST, columns - label_width - words - 5))
    return [
        f"{shortened(bar.label, label_width):<{label_width}}  "
        f"{_drawn(bar, width, axis, glyphs)} {bar.words}"
        for bar in bars
    ]


def _drawn(bar: Bar, width: int, axis: float, glyphs: BarGlyphs) -> str:
    """Return a bar of exactly `width` characters."""

    def place(value: float) -> int:
        """Return the character in which a value ends, -1 for none."""
        return min(width, round(value / axis * width)) - 1

    end = place(bar.value)
    drawn = [glyphs.block] * (end + 1) + [" "] * (width - end - 1)
    if bar.low is None or bar.high is None:
        return "".join(drawn)
    first = max(0, place(bar.low))
    last = place(bar.high)
    if first < last:
        drawn[first : last + 1] = glyphs.span * (last + 1 - first)
        drawn[first] = glyphs.low
        drawn[last] = glyphs.cut if bar.high > axis * (1 + 0.5 / width) else glyphs.high
        if first < end < last:
            drawn[end] = glyphs.value
    return "".join(drawn)
