"""What may be shown on a terminal: text without control characters, cut and broken to its width."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from typing import Any

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
"""Control characters except tab and line ends: on a terminal they could move the cursor or worse."""

MISLEADING = re.compile(CONTROL.pattern + r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Those, other line ends, and marks of direction: what follows them is shown in another order."""


def printable(text: str, misleading: re.Pattern[str] = MISLEADING) -> str:
    """Text from outside, with what is misleading spelled out; for a model's own reply CONTROL is enough."""
    spelled = misleading.sub(lambda match: ascii(match.group())[1:-1], text)
    return spelled.encode("utf-8", "backslashreplace").decode("utf-8")


def as_line(text: str) -> str:
    """The same on one line: a name with a line end must not pass for a line of ours."""
    return printable(text.replace("\n", "\\n"))


def shortened(text: str, size: int) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= size else line[: size - 1] + "…"


WIDTH = 80

LABEL = 16
"""Columns of a name, or as many as the longest needs."""

LISTED = 8
"""Members of a list that are spelled out."""

_LABEL = re.compile(r" *(?:\S+ )?\S+ {2,}(?=\S)")
"""What stands in front of a fact: one or two words and a gap."""

_PASTED = re.compile(
    r" *(?:fix: )?(?:spd|echo|export|hf|iconv|jq|pip|tail|torchrun|unset|[A-Z_]+=\S*|[-/{]\S*)(?: (?! )|$)"
)
"""The beginning of a line that is typed as it stands."""


def fit_lines(text: str, columns: int | None) -> str:
    """Wrap text to `columns`; None stands for no terminal, where nothing is wrapped.

    Further rows of a line are indented below its fact or by two blanks. A word longer than a row, and a line
    to be pasted, are left to the terminal, which copies them whole.
    """
    return (
        text if columns is None else "\n".join(_wrapped(line, columns) for line in text.split("\n"))
    )


def _wrapped(line: str, columns: int) -> str:
    if cells(line) < columns or _PASTED.match(line):
        return line
    label = _LABEL.match(line)
    indent = label.end() if label else len(line) - len(line.lstrip()) + 2
    hang = " " * (indent if indent <= columns // 3 else 2)
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, columns - 1, subsequent_indent=hang, **whole)


def cells(text: str) -> int:
    """Columns that a text takes at most."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
