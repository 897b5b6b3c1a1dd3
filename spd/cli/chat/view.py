"""A reply on the screen while it comes: thinking apart, Markdown or coloured drafts, or plain text.

Control characters of the reply never reach a terminal.
"""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from spd.cli.text.output import CONTROL, Console, Sink, is_terminal, paint, printable, write_stderr

if TYPE_CHECKING:
    from spd.cli.chat.markdown import MarkdownStream
    from spd.cli.text.structured import ThinkingSplitter
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Event

DIM, DIM_ITALIC, GREEN, UNDERLINE = "2", "2;3", "32", "4"


@dataclass(frozen=True)
class Look:
    """How replies are shown; `styled` needs a terminal that knows escape sequences."""

    terminal: bool
    styled: bool
    color: bool
    unicode: bool
    size: Callable[[], os.terminal_size]
    markdown: bool
    drafts: bool = False
    hide_thinking: bool = False


class Piece(NamedTuple):
    """A stretch of text from one kind of token."""

    text: str
    drafted: bool


class DraftedText:
    """Which characters of a reply came from accepted drafts: those whose last byte did."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._known: list[Piece] = []

    def take(self, event: Event) -> Iterator[Piece]:
        """The event's text in pieces; text may come later than its tokens."""
        for token_id, drafted in zip(event.token_ids, event.drafted, strict=False):
            self._known.append(Piece(self._decoder.decode(self._token_bytes(token_id)), drafted))
        left = event.text
        while left:
            known = self._known.pop(0) if self._known else Piece(left, False)
            size = min(len(known.text), len(left))
            if size:
                yield Piece(left[:size], known.drafted)
            left = left[size:]
            if size < len(known.text):
                self._known.insert(0, Piece(known.text[size:], known.drafted))


class Thoughts:
    """Thinking on a terminal's standard error, dimmed and apart from the answer; nothing elsewhere."""

    def __init__(self, console: Console, *, hidden: bool) -> None:
        self._shows, self._color = is_terminal(sys.stderr) and not (hidden or console.quiet), console.color
        self._last = ""

    def write(self, text: str) -> None:
        """Show what was thought next."""
        if self._shows and text:
            write_stderr(_styled_lines(printable(text), DIM if self._color else ""), styled=True)
            self._last = text[-1]

    def end(self) -> None:
        """Leave a blank line before the answer, once."""
        write_stderr("\n" * (bool(self._last) + (self._last not in ("", "\n"))))
        self._last = ""


class ReplyView:
    """Writes one reply, of which `splitter` may have taken a beginning that was shown before."""

    def __init__(
        self,
        sink: Sink,
        look: Look,
        tokenizer: Tokenizer | None,
        splitter: ThinkingSplitter,
        thoughts: Thoughts,
    ) -> None:
        self._sink, self._look = sink, look
        self._splitter, self._thoughts = splitter, thoughts
        self._drafted = None if tokenizer is None else DraftedText(tokenizer.token_bytes)
        self._markdown: MarkdownStream | None = None
        if look.styled and look.markdown and not look.drafts:
            from spd.cli.chat.markdown import MarkdownStream

            self._markdown = MarkdownStream(look.size, color=look.color, unicode=look.unicode)
        self._return = ""
        self._thinking_since: float | None = None
        self._thinking_tokens = 0
        self._at_row_start = True

    def take(self, event: Event) -> None:
        """Show what a round brought."""
        if self._splitter.part != "answer":
            self._thinking_tokens += len(event.token_ids)
        pieces = [Piece(event.text, False)]
        if self._look.drafts and self._drafted is not None:
            pieces = list(self._drafted.take(event))
        for piece in pieces:
            for thinking, text in self._splitter.feed(piece.text):
                self._show(thinking, text, piece.drafted)

    def finish(self, remark: str = "") -> None:
        """Show what is still held back, a remark, and leave the cursor at the beginning of a row."""
        for thinking, text in self._splitter.feed("", final=True):
            self._show(thinking, text, False)
        self._end_thinking()
        self._thoughts.end()
        if self._markdown is not None:
            self._sink.write_styled(self._markdown.finish())
            self._at_row_start = True
        elif not self._at_row_start:
            self._sink.write("\n")
        if remark and self._look.styled:
            self._sink.write_styled(f"\x1b[{DIM}m{remark}\x1b[0m\n")

    def _show(self, thinking: bool, text: str, drafted: bool) -> None:
        if not self._look.styled:
            if thinking:
                self._thoughts.write(text)
            elif text:
                self._thoughts.end()
                self._sink.write(text)
                self._at_row_start = text.endswith("\n")
            return
        text = self._harmless(text)
        if thinking:
            self._show_thinking(text)
            return
        self._end_thinking()
        if self._markdown is not None:
            self._sink.write_styled(self._markdown.feed(text))
        elif text:
            style = (GREEN if self._look.color else UNDERLINE) if drafted else ""
            self._sink.write_styled(_styled_lines(text, style))
            self._at_row_start = text.endswith("\n")

    def _show_thinking(self, text: str) -> None:
        if self._thinking_since is None:
            self._thinking_since = time.perf_counter()
            self._sink.write_styled(f"\x1b7\x1b[{DIM}mthinking…\x1b[0m" if self._look.hide_thinking else "")
        if not self._look.hide_thinking and text:
            self._sink.write_styled(_styled_lines(text, DIM_ITALIC))
            self._at_row_start = text.endswith("\n")

    def _end_thinking(self) -> None:
        """Set the thinking apart from the answer, or put one line in its place."""
        if self._thinking_since is None:
            return
        seconds, self._thinking_since = time.perf_counter() - self._thinking_since, None
        if self._look.hide_thinking:
            words = f"thought for {seconds:.1f} s · {self._thinking_tokens} tok"
            self._sink.write_styled(f"\x1b8\x1b[K\x1b[{DIM}m{words}\x1b[0m\n\n")
        else:
            self._sink.write("\n" if self._at_row_start else "\n\n")
        self._at_row_start = True

    def _harmless(self, text: str) -> str:
        """Text without control characters; a carriage return waits for the newline it may belong to."""
        text, self._return = self._return + text, ""
        if text.endswith("\r"):
            text, self._return = text[:-1], "\r"
        return printable(text.replace("\r\n", "\n"), CONTROL)


def _styled_lines(text: str, style: str) -> str:
    """Text in a style that never crosses the end of a line."""
    return "\n".join(paint(line, style, bool(style and line)) for line in text.split("\n"))
