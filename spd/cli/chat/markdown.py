"""Markdown on a terminal while it streams: finished blocks stay, the last one is drawn anew as it grows.

Rows above the top of the screen cannot be drawn again; they stay as they were.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from io import StringIO
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.theme import Theme

THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        **dict.fromkeys((f"markdown.h{level}" for level in range(2, 7)), "bold"),
        **dict.fromkeys(("markdown.item.bullet", "markdown.item.number"), "none"),
        "markdown.block_quote": "dim",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
        "markdown.hr": "dim",
        "markdown.link": "underline",
        "markdown.link_url": "dim",
    }
)
ASCII_SIGNS = {ord("•"): "-", ord("▌"): "|", ord("─"): "-", ord("━"): "-"}
_UNDECIDED = re.compile(r"[ \t]*(?:[-=*+_#>|`~:.) \t]|\d{1,9})+")
"""A last line that may yet become the mark of a list, a heading, a fence or a table."""
_JOINERS = re.compile("\ufe0f|(?<=[\U0001f000-\U0001faff\ufe0f])\u200d")
"""What joins signs to one whose width terminals disagree about."""
DRAWING_SHARE = 0.2
"""Of the time between two drawings."""


class _Left(Heading):
    """A heading at the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _Unwrapped(CodeBlock):
    """Code as it was written, for people copy it: the terminal breaks what is too long."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n")
        text = Syntax(code, self.lexer_name, theme="ansi_dark", background_color="default").highlight(code)
        text.rstrip()
        inside = options.max_width < console.width  # a list's item, which would be cut
        text.no_wrap, text.overflow = not inside, "fold" if inside else "ignore"
        yield text


OWN = {"heading_open": _Left, "fence": _Unwrapped, "code_block": _Unwrapped}


class _Reply(Markdown):
    """Markdown with such headings and code."""

    elements: ClassVar[dict[str, Any]] = {**Markdown.elements, **OWN}


class MarkdownStream:
    """Takes text piece by piece and returns what is to be written to a terminal.

    The text holds no control characters but tabs and newlines. `size` is that of the terminal now.
    """

    def __init__(self, size: Callable[[], os.terminal_size], *, color: bool, unicode: bool = True) -> None:
        self._size, self._color, self._signs = size, color, {} if unicode else ASCII_SIGNS
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._open = ""
        """The last block, which what comes may change."""
        self._rows: list[str] = []
        """What is drawn of it."""
        self._columns = 0
        self._began = False
        self._next = 0.0

    def feed(self, text: str) -> str:
        """What to write once this text has come; it may wait for more, so that drawing takes little time."""
        self._open = _JOINERS.sub("", self._open + text.expandtabs(4))
        began = time.perf_counter()
        if began < self._next:
            return ""
        written = self._draw_all(final=False)
        now = time.perf_counter()
        self._next = now + (now - began) / DRAWING_SHARE
        return written

    def finish(self) -> str:
        """What to write at the end; afterwards the cursor stands at the beginning of a row."""
        written = self._draw_all(final=True)
        self._open, self._rows, began, self._began = "", [], self._began, False
        return written + ("\n" if began else "")

    def _draw_all(self, *, final: bool) -> str:
        lines = self._open.split("\n")
        held = "" if final or not _UNDECIDED.fullmatch(lines[-1]) else lines.pop()
        tokens = self._parser.parse("\n".join(lines))
        starts = [token.map[0] for token in tokens if token.level == 0 and token.nesting >= 0 and token.map]
        written, begin = "", 0
        for end in starts[1:]:
            written += self._draw("\n".join(lines[begin:end]))
            self._rows, begin = [], end
        rest = "\n".join(lines[begin:])
        written += self._draw(rest)
        self._open = "\n".join([rest, held]) if held and lines else rest + held
        return written

    def _draw(self, block: str) -> str:
        """Rows of a block in the place of those that are drawn of it."""
        size = self._size()
        rows, old = self._rendered(block, size.columns), self._rows
        if not rows or (rows == old and size.columns == self._columns):
            return ""
        if not old:
            gap, self._began = "\n\n" if self._began else "", True
            self._rows, self._columns = rows, size.columns
            return gap + "\n".join(rows)
        same = next((i for i, pair in enumerate(zip(old, rows, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(old), len(rows)) - 1 if same is None else same
        if size.columns != self._columns:
            same = 0
        above, reach = 0, len(old)  # rows of the terminal between the first to be drawn and the cursor
        while reach > same and above + _height(old[reach - 1], size.columns) < size.lines:
            reach -= 1
            above += _height(old[reach], size.columns)
        self._rows, self._columns = rows, size.columns
        up = f"\x1b[{above - 1}A" if above > 1 else ""
        first, *more = rows[reach:] or [""]
        # Not erased from its beginning: tmux keeps a copy of a screen that is erased as a whole.
        erase = "\n\x1b[J" if more else "" if first and not _cells(first) % size.columns else "\x1b[J"
        return f"{up}\r\x1b[K{first}{erase}" + "\n".join(more)

    def _rendered(self, block: str, columns: int) -> list[str]:
        """Rows of a block, with the styles of a terminal and no blanks at their ends."""
        reply = _Reply("", hyperlinks=False, code_theme="ansi_dark")
        reply.parsed = self._parser.parse(block)
        for token in reply.parsed:
            for child in token.children or ():
                child.type = child.type.replace("softbreak", "hardbreak")  # lines stay as they are written
        console = Console(
            file=StringIO(),
            width=max(columns - 1, 10),
            force_terminal=True,
            color_system="standard",
            no_color=not self._color,
            theme=THEME,
            highlight=False,
            legacy_windows=False,
        )
        with console.capture() as capture:
            console.print(reply, crop=False, end="")
        rows = [_without_last_blanks(row) for row in capture.get().split("\n")]
        while rows and not rows[-1]:
            rows.pop()
        while rows and not rows[0]:
            rows.pop(0)
        return [row.translate(self._signs) for row in rows]


_BLANKS = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")


def _without_last_blanks(row: str) -> str:
    end = _BLANKS.search(row)
    if end is None or not end.start():
        return "" if end else row
    return row[: end.start()] + ("\x1b[0m" if "\x1b" in end[0] else "")


def _height(row: str, columns: int) -> int:
    """Rows of the terminal that a row takes."""
    return max(1, -(-_cells(row) // columns))


def _cells(row: str) -> int:
    return cell_len(re.sub(r"\x1b\[[0-9;]*m", "", row))
