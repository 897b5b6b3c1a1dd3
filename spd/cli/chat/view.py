"""A reply on the screen while it comes: thinking apart, Markdown or coloured drafts, or plain text.

Control characters of the reply never reach a terminal.
"""

from __future__ import annotations

import codecs
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from spd.cli.text.output import CONTROL, Console, Sink, is_terminal, paint, printable, write_stderr
from spd.cli.text.progress import Ticker

if TYPE_CHECKING:
    from spd.cli.chat.markdown import MarkdownStream
    from spd.cli.text.structured import ThinkingSplitter
    from spd.runtime import Event

DIM, GREEN, UNDERLINE = "2", "32", "4"


class DraftedText:
    """Which characters of a reply came from accepted drafts: those whose last byte did."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._known: list[bool] = []
        """Of each character that is still to come."""

    def take(self, event: Event) -> Iterator[tuple[str, bool]]:
        """The event's text in stretches, and whether each was drafted; text may come later than tokens."""
        for token_id, drafted in zip(event.token_ids, event.drafted, strict=False):
            self._known += [drafted] * len(self._decoder.decode(self._token_bytes(token_id)))
        begin = 0
        known = self._known[: len(event.text)]
        known += [False] * (len(event.text) - len(known))
        for drafted, stretch in itertools.groupby(known):
            end = begin + len(list(stretch))
            yield event.text[begin:end], drafted
            begin = end
        del self._known[:begin]


class Thoughts:
    """Thinking on a terminal's standard error, dimmed and apart from the answer; nothing elsewhere.

    A line says meanwhile what there is to wait for: what comes next takes it away.
    """

    def __init__(self, console: Console, *, hidden: bool) -> None:
        self._shows, self._color = is_terminal(sys.stderr) and not console.quiet, console.color
        self._hidden, self._ticker, self._ticks = hidden, Ticker(console), False
        self._last = ""

    def wait(self, words: str) -> None:
        """Say what there is to wait for."""
        self._ticker.write(words)
        self._ticks = True

    def write(self, text: str) -> None:
        """Show what was thought next, or that there is thinking."""
        if self._hidden:
            self.wait("thinking…")
        elif self._shows and text:
            self._go_on()
            write_stderr(_styled_lines(printable(text), DIM if self._color else ""), styled=True)
            self._last = text[-1]

    def end(self) -> None:
        """Leave a blank line before the answer, once."""
        self._go_on()
        write_stderr("\n" * (bool(self._last) + (self._last not in ("", "\n"))))
        self._last = ""

    def _go_on(self) -> None:
        if self._ticks:
            self._ticker.write("")
            self._ticks = False


class ReplyView:
    """Writes one reply, of which `splitter` may have taken a beginning that was shown before.

    `drafted` colours drafts on a terminal, `markdown` draws it there; without both the text stays plain.
    """

    def __init__(
        self,
        sink: Sink,
        console: Console,
        splitter: ThinkingSplitter,
        thoughts: Thoughts,
        drafted: DraftedText | None,
        markdown: MarkdownStream | None,
    ) -> None:
        self._sink, self._splitter, self._thoughts = sink, splitter, thoughts
        self._drafted, self._markdown = drafted, markdown
        self._style = GREEN if console.color else UNDERLINE
        self._at_row_start = True

    def take(self, event: Event) -> None:
        """Show what a round brought."""
        for text, drafted in [(event.text, False)] if self._drafted is None else self._drafted.take(event):
            self._feed(text, drafted)

    def finish(self) -> None:
        """Show what is still held back, and leave the cursor at the beginning of a row."""
        self._feed("", False, final=True)
        self._thoughts.end()
        if self._markdown is not None:
            self._sink.write_styled(self._markdown.finish())
        elif not self._at_row_start:
            self._sink.write("\n")

    def _feed(self, text: str, drafted: bool, *, final: bool = False) -> None:
        for thinking, part in self._splitter.feed(text, final=final):
            if thinking:
                self._thoughts.write(part)
            elif part:
                self._thoughts.end()
                self._at_row_start = part.endswith("\n")
                self._show(part, drafted)

    def _show(self, text: str, drafted: bool) -> None:
        if self._markdown is not None:
            self._sink.write_styled(self._markdown.feed(printable(text.replace("\r\n", "\n"), CONTROL)))
        elif drafted:
            self._sink.write_styled(_styled_lines(printable(text, CONTROL), self._style))
        else:
            self._sink.write(text)


def shortened(text: str, size: int) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= size else line[: size - 1] + "…"


def _styled_lines(text: str, style: str) -> str:
    """Text in a style that never crosses the end of a line."""
    return "\n".join(paint(line, style, bool(style and line)) for line in text.split("\n"))
