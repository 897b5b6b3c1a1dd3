"""Text for a terminal: escaping control characters, shortening and wrapping."""

from __future__ import annotations

import re
import unicodedata

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
"""Matches control characters but tab and line ends: they could control a terminal."""

MISLEADING = re.compile(CONTROL.pattern + r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, other line ends, and direction marks, which reorder the text after them."""


def escape_controls(text: str, pattern: re.Pattern[str] = MISLEADING) -> str:
    """Return text with matches of `pattern` and lone surrogates as backslash escapes.

    For a model's reply CONTROL is enough.
    """
    escaped = pattern.sub(lambda match: ascii(match.group())[1:-1], text)
    return escaped.encode("utf-8", "backslashreplace").decode("utf-8")


def as_line(text: str) -> str:
    """Return escaped text on one line: a line end in a name must not look like a line of spd."""
    return escape_controls(text.replace("\n", "\\n"))


def shorten(text: str, size: int) -> str:
    """Return the text on one line, cut to `size` characters with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= size else line[: size - 1] + "…"


PARAGRAPH_COLUMNS = 80
"""The greatest width of a paragraph."""

LABEL_COLUMNS = 16
"""The least width of the column of names."""

LIST_LIMIT = 8
"""How many members of a list are spelled out."""

_LABEL_PATTERN = re.compile(r" *(?:\S+ )?\S+ {2,}(?=\S)")
"""Matches the label of a fact: one or two words and a gap."""

_COMMAND_LINE = re.compile(
    r" *(?:fix: )?(?:spd|echo|export|hf|iconv|jq|pip|tail|torchrun|unset|[A-Z_]+=\S*|[-/{]\S*)(?: (?! )|$)"
)
"""Matches the beginning of a line that is a command to paste."""


def fit_lines(text: str, columns: int | None) -> str:
    """Return text wrapped to `columns`; None means no terminal, and the text is unchanged.

    Continuation rows are indented to the end of the label, or by two blanks. A word longer than
    a row, and a command line, are left to the terminal, so that they can be copied in one piece.
    """
    return (
        text
        if columns is None
        else "\n".join(_wrap_line(line, columns) for line in text.split("\n"))
    )


def _wrap_line(line: str, columns: int) -> str:
    """Return one line wrapped to `columns`, see `fit_lines`."""
    if cell_width(line) < columns or _COMMAND_LINE.match(line):
        return line
    label = _LABEL_PATTERN.match(line)
    indent = label.end() if label else len(line) - len(line.lstrip()) + 2
    import textwrap  # few lines are wrapped

    hanging_indent = " " * (indent if indent <= columns // 3 else 2)
    return textwrap.fill(
        line,
        columns - 1,
        subsequent_indent=hanging_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def cell_width(text: str) -> int:
    """Return the most columns that a text takes: two for wide characters, one for others."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
