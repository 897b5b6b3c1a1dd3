"""Markdown on a terminal while it streams: finished blocks stay, the last one is drawn anew as it grows."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from io import StringIO
from itertools import takewhile
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

THEME = Theme({"markdown.code": "cyan"})  # not on black
_UNDECIDED = re.compile(r"(?:^|\n)[-=*+_#>|`~:.)\d \t]*\Z")
"""A last line that may yet become the mark of a list, a heading, a fence or a table."""
_JOINERS = re.compile("\ufe0f|(?<=[\U0001f000-\U0001faff\ufe0f])\u200d")
"""What joins signs to one whose width terminals disagree about."""
_STYLE = r"\x1b\[[0-9;]*m"
_BLANKS = re.compile(rf"(?: |{_STYLE})+$")
DRAWING_SHARE = 0.2
"""Of the time between two drawings."""
CODE_INDENT = 4
"""Blanks before a line of a paragraph from which on the paragraph is code that no fence encloses."""
HELD_BLANK = "\ufdd0"
"""Stands for a blank at the beginning of a line while inline marks are read, which drops blanks."""
_INDENT = re.compile("^ +", re.MULTILINE)


def keep_indentation(state: StateCore) -> None:
    """Keep the blanks before lines, between a parser's reading of blocks and of what is inside them.

    Small models often leave a fence out. A paragraph with a line that is indented as code is becomes a
    block of code; elsewhere blanks are held by `HELD_BLANK`. An indented block keeps its first blanks too.
    """
    lines = state.src.split("\n")
    tokens: list[Token] = []
    for token in state.tokens:
        before = tokens[-1] if tokens else None
        if token.type == "code_block" and token.map is not None:
            token.content = _indented(token.content)
        if token.type == "inline" and before is not None and before.type == "paragraph_open":
            first = lines[before.map[0]] if before.map is not None and before.level == 0 else ""
            blanks = first[: len(first) - len(first.lstrip(" "))]
            token.content = blanks + token.content
            if any(line.startswith(" " * CODE_INDENT) for line in token.content.split("\n")):
                before.type = "code_block"
                before.nesting = 0
                before.content = token.content
                continue
            token.content = _INDENT.sub(lambda blanks: HELD_BLANK * len(blanks[0]), token.content)
        if token.type == "paragraph_close" and before is not None and before.type == "code_block":
            continue
        tokens.append(token)
    state.tokens = tokens


def _indented(code: str) -> str:
    """Return code with the blanks that made it a block."""
    return re.sub(r"^(?=.)", " " * CODE_INDENT, code, flags=re.MULTILINE)


class _Left(Heading):
    """A heading at the left, with its marks: what looks like one may be a comment of code."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{'#' * int(self.tag[1:])} ").append_text(self.text)


class _Unwrapped(CodeBlock):
    """Code as it was written, for people copy it: the terminal breaks what is too long."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n")
        text = Syntax(
            code, self.lexer_name, theme="ansi_dark", background_color="default"
        ).highlight(code)
        text.rstrip()
        inside = options.max_width < console.width  # a list's item, which would be cut
        text.no_wrap = not inside
        text.overflow = "fold" if inside else "ignore"
        yield text


class _Reply(Markdown):
    """Markdown with such headings and code."""

    elements: ClassVar[dict[str, Any]] = {
        **Markdown.elements,
        "heading_open": _Left,
        "fence": _Unwrapped,
        "code_block": _Unwrapped,
    }


class MarkdownStream:
    """Takes text without control characters but tabs and newlines; returns what a terminal is to get."""

    def __init__(self, size: Callable[[], os.terminal_size], *, color: bool) -> None:
        self._size = size
        self._color = color
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._parser.core.ruler.after("block", "indentation", keep_indentation)
        self._open = ""
        """The last block, which what comes may change."""
        self._rows: list[str] = []
        """What is drawn of it."""
        self._began = False
        self._next = 0.0

    def feed(self, text: str) -> str:
        """What to write once this text has come; it may wait for more, so that drawing takes little time."""
        self._open = _JOINERS.sub("", self._open + text.expandtabs(4))
        began = time.perf_counter()
        if began < self._next:
            return ""
        undecided = _UNDECIDED.search(self._open)
        written = self._draw_all(undecided.start() if undecided else len(self._open))
        self._next = began + (time.perf_counter() - began) / DRAWING_SHARE
        return written

    def finish(self) -> str:
        """What to write at the end; afterwards the cursor stands at the beginning of a row."""
        return self._draw_all(len(self._open)) + "\n" * self._began

    def _draw_all(self, decided: int) -> str:
        """Draw the blocks of so much of the text, and keep what may change."""
        lines = self._open[:decided].split("\n")
        tokens = self._parser.parse("\n".join(lines))
        starts = [
            token.map[0]
            for token in tokens
            if token.level == 0 and token.nesting >= 0 and token.map
        ]
        written = ""
        begin = 0
        for end in starts[1:]:
            written += self._draw("\n".join(lines[begin:end]))
            self._rows = []
            begin = end
        last = "\n".join(lines[begin:])
        self._open = last + self._open[decided:]
        return written + self._draw(last)

    def _draw(self, block: str) -> str:
        """Rows of a block in the place of those that are drawn of it and still on the screen."""
        size = self._size()
        rows = self._rendered(block, size.columns)
        old = self._rows
        if not rows or rows == old:
            return ""
        self._rows = rows
        if not old:
            gap = "\n\n" * self._began
            self._began = True
            return gap + "\n".join(rows)
        pairs = zip(old[:-1], rows[:-1], strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        # rows of the terminal from the first to be drawn to the cursor
        above = 0
        reach = len(old)
        while reach > same and above + _height(old[reach - 1], size.columns) < size.lines:
            reach -= 1
            above += _height(old[reach], size.columns)
        # Deleted, not erased: tmux keeps a copy of a screen that is erased as a whole.
        up = f"\x1b[{above - 1}A" if above > 1 else ""
        return (f"\r{up}\x1b[{above}M" if above else "\n") + "\n".join(rows[reach:])

    def _rendered(self, block: str, columns: int) -> list[str]:
        """Rows of a block, with the styles of a terminal and no blanks at their ends."""
        reply = _Reply("", hyperlinks=False)
        reply.parsed = self._parser.parse(block)
        for token in reply.parsed:
            for child in token.children or ():
                child.type = child.type.replace(
                    "softbreak", "hardbreak"
                )  # lines stay as they are written
                child.content = child.content.replace(HELD_BLANK, " ")
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
        rows = (_BLANKS.sub("", row) for row in capture.get().split("\n"))
        text = "\n".join(row + "\x1b[0m" * ("\x1b" in row) for row in rows).strip("\n")
        return text.split("\n") if text else []


def _height(row: str, columns: int) -> int:
    """Rows of the terminal that a row takes."""
    return max(1, -(-cell_len(re.sub(_STYLE, "", row)) // columns))
