"""Streaming Markdown on a terminal: finished blocks stay, the last one is redrawn as it grows."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from io import StringIO
from itertools import takewhile
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

THEME = Theme({"markdown.code": "cyan"})  # not on black
_PARTIAL_MARK = re.compile(r"(?:^|\n)[-=*+_#>|`~:.)\d \t]*\Z")
"""Matches a last line that may still become the mark of a list, a heading, a fence or a table."""
_GLYPH_JOINERS = re.compile("\ufe0f|(?<=[\U0001f000-\U0001faff\ufe0f])\u200d")
"""Matches characters that join emoji into one, whose width differs between terminals."""
_STYLE_PATTERN = r"\x1b\[[0-9;]*m"
_TRAILING_BLANKS = re.compile(rf"(?: |{_STYLE_PATTERN})+$")
DRAWING_SHARE = 0.2
"""The share of the time that drawing may take."""
CODE_INDENT = 4
"""Leading blanks of a line from which on its paragraph is taken as code without a fence."""
BLANK_PLACEHOLDER = "\ufdd0"
"""Replaces leading blanks while inline marks are parsed, as the parser drops blanks."""
_INDENT = re.compile("^ +", re.MULTILINE)
"""The blanks at the beginning of a line."""


def keep_indentation(state: StateCore) -> None:
    """Change `state.tokens` so that leading blanks of lines are kept.

    A rule that runs after the parser's block pass and before its inline pass. Small models often
    leave a fence out. A paragraph with a line that is indented like code becomes a code block; in
    other paragraphs leading blanks become `BLANK_PLACEHOLDER`. An indented code block gets the
    blanks back that the parser removed.
    """
    lines = state.src.split("\n")
    tokens: list[Token] = []
    for token in state.tokens:
        previous = tokens[-1] if tokens else None
        if token.type == "code_block" and token.map is not None:
            token.content = _restore_indent(token.content)
        if token.type == "inline" and previous is not None and previous.type == "paragraph_open":
            first = (
                lines[previous.map[0]] if previous.map is not None and previous.level == 0 else ""
            )
            blanks = first[: len(first) - len(first.lstrip(" "))]
            token.content = blanks + token.content
            if any(line.startswith(" " * CODE_INDENT) for line in token.content.split("\n")):
                previous.type = "code_block"
                previous.nesting = 0
                previous.content = token.content
                continue
            token.content = _INDENT.sub(
                lambda blanks: BLANK_PLACEHOLDER * len(blanks[0]), token.content
            )
        if (
            token.type == "paragraph_close"
            and previous is not None
            and previous.type == "code_block"
        ):
            continue
        tokens.append(token)
    state.tokens = tokens


def _restore_indent(code: str) -> str:
    """Return code with the indentation that the parser removed from its lines."""
    return re.sub(r"^(?=.)", " " * CODE_INDENT, code, flags=re.MULTILINE)


class _MarkedHeading(Heading):
    """A left-aligned heading with its # marks, because it may really be a comment in code."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the heading's text behind its marks."""
        yield Text(f"{'#' * int(self.tag[1:])} ").append_text(self.text)


class _UnwrappedCode(CodeBlock):
    """A code block without padding or wrapping, so that it can be copied.

    The terminal breaks long lines.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the highlighted code; in a list item its long lines are folded."""
        code = str(self.text).rstrip("\n")
        text = Syntax(
            code, self.lexer_name, theme="ansi_dark", background_color="default"
        ).highlight(code)
        text.rstrip()
        in_list_item = options.max_width < console.width  # a code block in a list item would be cut
        text.no_wrap = not in_list_item
        text.overflow = "fold" if in_list_item else "ignore"
        yield text


class _ReplyMarkdown(Markdown):
    """Markdown with `_MarkedHeading` and `_UnwrappedCode`."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _MarkedHeading,
        "fence": _UnwrappedCode,
        "code_block": _UnwrappedCode,
    }


class MarkdownStream:
    """Renders Markdown incrementally: `feed` and `finish` return what to write to the terminal.

    The text may hold no control characters but tabs and newlines.
    """

    def __init__(self, size: Callable[[], os.terminal_size], *, color: bool) -> None:
        self._size = size
        self._color = color
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._parser.core.ruler.after("block", "indentation", keep_indentation)
        self._pending_text = ""
        """The text of the last block, which later text may change."""
        self._drawn_rows: list[str] = []
        """The rows of the last block that are on the terminal."""
        self._has_output = False
        self._next_draw_time = 0.0

    def feed(self, text: str) -> str:
        """Add text and return what to write to the terminal.

        It is empty while drawing would exceed its share of the time. A last line that may become a
        mark waits for more text.
        """
        self._pending_text = _GLYPH_JOINERS.sub("", self._pending_text + text.expandtabs(4))
        draw_start = time.perf_counter()
        if draw_start < self._next_draw_time:
            return ""
        undecided = _PARTIAL_MARK.search(self._pending_text)
        output = self._draw_blocks(undecided.start() if undecided else len(self._pending_text))
        self._next_draw_time = draw_start + (time.perf_counter() - draw_start) / DRAWING_SHARE
        return output

    def finish(self) -> str:
        """Return what to write at the end; it leaves the cursor at the beginning of a row."""
        return self._draw_blocks(len(self._pending_text)) + "\n" * self._has_output

    def _draw_blocks(self, decided_length: int) -> str:
        """Return what draws the blocks of the first `decided_length` pending characters.

        Then only the text from the last block on is pending.
        """
        lines = self._pending_text[:decided_length].split("\n")
        tokens = self._parser.parse("\n".join(lines))
        starts = [
            token.map[0]
            for token in tokens
            if token.level == 0 and token.nesting >= 0 and token.map
        ]
        output = ""
        block_start = 0
        for block_end in starts[1:]:
            output += self._draw_block("\n".join(lines[block_start:block_end]))
            self._drawn_rows = []
            block_start = block_end
        last = "\n".join(lines[block_start:])
        self._pending_text = last + self._pending_text[decided_length:]
        return output + self._draw_block(last)

    def _draw_block(self, block: str) -> str:
        """Return output that draws a block, or redraws its changed rows that are on the screen."""
        size = self._size()
        rows = self._render_rows(block, size.columns)
        old_rows = self._drawn_rows
        if not rows or rows == old_rows:
            return ""
        self._drawn_rows = rows
        if not old_rows:
            gap = "\n\n" * self._has_output
            self._has_output = True
            return gap + "\n".join(rows)
        pairs = zip(old_rows[:-1], rows[:-1], strict=False)
        num_unchanged = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        # Terminal rows from the first redrawn row to the cursor.
        screen_rows = 0
        first_redrawn = len(old_rows)
        while first_redrawn > num_unchanged:
            height = _row_height(old_rows[first_redrawn - 1], size.columns)
            if screen_rows + height >= size.lines:
                break
            first_redrawn -= 1
            screen_rows += height
        # Deleted, not erased: tmux keeps a copy of a screen that is erased as a whole.
        cursor_up = f"\x1b[{screen_rows - 1}A" if screen_rows > 1 else ""
        erase = f"\r{cursor_up}\x1b[{screen_rows}M" if screen_rows else "\n"
        return erase + "\n".join(rows[first_redrawn:])

    def _render_rows(self, block: str, columns: int) -> list[str]:
        """Return the rows of a block, with ANSI styles and without trailing blanks."""
        reply = _ReplyMarkdown("", hyperlinks=False)
        reply.parsed = self._parser.parse(block)
        for token in reply.parsed:
            for child in token.children or ():
                # Lines are kept as they are written.
                child.type = child.type.replace("softbreak", "hardbreak")
                child.content = child.content.replace(BLANK_PLACEHOLDER, " ")
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
        rows = (_TRAILING_BLANKS.sub("", row) for row in capture.get().split("\n"))
        text = "\n".join(row + "\x1b[0m" * ("\x1b" in row) for row in rows).strip("\n")
        return text.split("\n") if text else []


def _row_height(row: str, columns: int) -> int:
    """Return how many terminal rows a row takes."""
    return max(1, -(-cell_len(re.sub(_STYLE_PATTERN, "", row)) // columns))
