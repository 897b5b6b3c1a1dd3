"""Horizontal bars with intervals in Unicode blocks, or in ASCII_GLYPHS if those cannot be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spd.cli.terminal.plain_text import cell_width

NARROW_COLUMNS = 60  # terminal columns below which a bar is drawn under its label
MAX_BAR_WIDTH = 60  # characters
MAX_AXIS_STRETCH = 1.25  # an interval stretches the axis to at most so many times the largest value


@dataclass(frozen=True)
class BarGlyphs:
    """The characters that draw a bar and the interval over its end."""

    block: str
    low: str
    span: str
    value: str
    high: str
    cut: str
    """Stands at the end of the axis where an interval continues beyond it."""


UNICODE_GLYPHS = BarGlyphs(block="█", low="├", span="─", value="┼", high="┤", cut="▸")
ASCII_GLYPHS = BarGlyphs(block="#", low="[", span="-", value="+", high="]", cut=">")
"""The glyphs of bars where the output's encoding has all of Unicode, and where it does not."""


@dataclass(frozen=True)
class Bar:
    """A value of at least 0, its label and text, and the interval around it if there is one."""

    label: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


def bar_lines(bars: Sequence[Bar], columns: int, glyphs: BarGlyphs, axis: float = 0.0) -> list[str]:
    """Return one line per bar, or two on a narrow terminal, each shorter than `columns`.

    axis: the value at the right end; 0 means the largest value, or the end of its interval
    where that is at most MAX_AXIS_STRETCH times as large.
    """
    if not bars:
        return []
    largest = max(bar.value for bar in bars)
    highest = max(bar.value if bar.high is None else bar.high for bar in bars)
    axis = axis or min(highest, MAX_AXIS_STRETCH * largest) or 1.0
    text_width = max(cell_width(bar.text) for bar in bars)
    if columns < NARROW_COLUMNS:
        width = max(4, min(MAX_BAR_WIDTH, columns - text_width - 4))
        lines = []
        for bar in bars:
            lines.append(_cut_label(bar.label, columns - 1))
            lines.append(f"  {_draw_bar(bar, width, axis, glyphs)} {bar.text}")
        return lines
    label_width = min(columns // 3, max(cell_width(bar.label) for bar in bars))
    width = max(4, min(MAX_BAR_WIDTH, columns - label_width - text_width - 5))
    return [
        f"{_cut_label(bar.label, label_width):<{label_width}}  "
        f"{_draw_bar(bar, width, axis, glyphs)} {bar.text}"
        for bar in bars
    ]


def _cut_label(label: str, columns: int) -> str:
    """Return a label cut at its beginning to `columns` characters: the end tells bars apart."""
    return label if len(label) <= columns else "…" + label[len(label) - columns + 1 :]


def _draw_bar(bar: Bar, width: int, axis: float, glyphs: BarGlyphs) -> str:
    """Return a bar with its interval, padded to exactly `width` characters."""

    def character_index(value: float) -> int:
        """Return the index of the last character of a value; -1 if the value has none."""
        return min(width, round(value / axis * width)) - 1

    end = character_index(bar.value)
    characters = [glyphs.block] * (end + 1) + [" "] * (width - end - 1)
    if bar.low is None or bar.high is None:
        return "".join(characters)
    first = max(0, character_index(bar.low))
    last = character_index(bar.high)
    if first < last:
        characters[first : last + 1] = glyphs.span * (last + 1 - first)
        characters[first] = glyphs.low
        characters[last] = glyphs.cut if bar.high > axis * (1 + 0.5 / width) else glyphs.high
        if first < end < last:
            characters[end] = glyphs.value
    return "".join(characters)
