"""Rows of a terminal, written once: words are wrapped, and only the tail of the last row is ever redrawn.

The tail begins at a cursor position that the terminal itself saves, so that no measured width decides
where it is erased from. Rows with text whose width terminals disagree about get no tail at all.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

from rich.cells import cell_len

from spd.cli.chat.markdown_inline import CODE, Span

SAVE, RESTORE, ERASE = "\x1b7", "\x1b8", "\x1b[K"
NARROWEST = 10


def cells(text: str) -> int:
    """Columns that a text takes at most: terminals that join characters into one sign take fewer."""
    return sum(map(cell_len, text))


class RowWriter:
    """Turns spans into what is to be written; every method adds to `out`.

    `columns` says how wide the terminal is now. Without `color` nothing is coloured, though bold and its like
    stay.
    """

    def __init__(self, columns: Callable[[], int], *, color: bool) -> None:
        self.out: list[str] = []
        self._columns, self._color = columns, color
        self._width = 0
        self._column = 0
        self._hang = Span("", "")
        self._word: list[Span] = []
        self._gap: Span | None = None
        self._tail, self._tail_cells = "", 0
        self._plain = True

    def begin(self, first: Span, hang: Span) -> None:
        """Start a line with `first`; further rows of it start with `hang`, as wide."""
        self._width = self._measure()
        self._hang = hang if cells(hang.text) < self._width // 2 else Span("", "")
        self._put(first)

    def write(self, spans: Sequence[Span]) -> None:
        """Add text; the last word stays open until something follows it."""
        self._clear_tail()
        for span in spans:
            is_code = CODE in span.style.split(";")
            self._add(Span(f"`{span.text}`", span.style) if is_code and not self._color else span)

    def show(self, text: str) -> None:
        """Show the open word and, after it, text whose look is not known yet: all that fits the row."""
        self._resized()
        word = "".join(span.text for span in self._word)
        gap = self._gap.text if self._gap else ""
        if not self._plain or not _is_plain(word + text):
            return
        room = self._width - self._column
        rest = _first_cells(text, room - cells(gap + word))
        shown = [Span(gap, ""), *self._word, Span(rest, "")]
        if cells(gap + word) > room or not (word + rest).strip():
            return
        tail = "".join(self._styled(span) for span in shown)
        if tail != self._tail:
            self.out.append(f"{RESTORE}{ERASE}{tail}" if self._tail else f"{SAVE}{tail}")
            self._tail, self._tail_cells = tail, cells(gap + word + rest)

    def end(self) -> None:
        """Finish the line."""
        self._clear_tail()
        self._close_word()
        self._gap = None
        self.out.append("\n")
        self._column, self._plain = 0, True
        self._hang = Span("", "")

    def unwrapped(self, span: Span) -> None:
        """Write text as it is: the terminal breaks it where it must."""
        self._clear_tail()
        self._put(span)

    def _add(self, span: Span) -> None:
        for character in span.text:
            if character.isspace():
                self._close_word()
                if self._gap is None and self._column:
                    self._gap = Span(" ", span.style)
                elif self._gap is not None:
                    self._gap = Span(self._gap.text + " ", span.style)
                continue
            if self._word and self._word[-1].style == span.style:
                self._word[-1] = Span(self._word[-1].text + character, span.style)
            else:
                self._word.append(Span(character, span.style))
            if cells(character) == 2 and unicodedata.category(character) == "Lo":
                self._close_word()  # scripts without spaces may be broken anywhere

    def _close_word(self) -> None:
        if not self._word:
            return
        self._resized()
        width = sum(cells(span.text) for span in self._word)
        gap = cells(self._gap.text) if self._gap else 0
        if self._column + gap + width > self._width and self._column > cells(self._hang.text):
            self.out.append("\n")
            self._column, self._plain, self._gap = 0, True, None
            self._put(self._hang)
        if self._gap is not None:
            self._put(self._gap)
        for span in self._word:
            self._put(span)
        self._gap, self._word = None, []

    def _put(self, span: Span) -> None:
        self.out.append(self._styled(span))
        self._plain = self._plain and _is_plain(span.text)
        # A word longer than the row is broken by the terminal.
        self._column = (self._column + cells(span.text)) % max(self._width + 1, NARROWEST)

    def _styled(self, span: Span) -> str:
        style = span.style
        if not self._color:
            style = ";".join(part for part in style.split(";") if part != CODE)
        return f"\x1b[{style}m{span.text}\x1b[0m" if style and span.text else span.text

    def _clear_tail(self) -> None:
        if self._tail:
            self.out.append(RESTORE + ERASE)
            self._tail = ""

    def _resized(self) -> None:
        """After a change of width the row's place is unknown: go on in a new one."""
        width = self._measure()
        if width == self._width:
            return
        self._width = width
        if self._column or self._tail:
            back = f"\x1b[{self._tail_cells}D{ERASE}" if self._tail else ""
            self.out.append(f"{back}\n")
            self._tail, self._column, self._plain, self._gap = "", 0, True, None
            self._put(self._hang)

    def _measure(self) -> int:
        return max(self._columns() - 1, NARROWEST)


def _is_plain(text: str) -> bool:
    """Whether every terminal agrees how wide a text is and in which direction it runs."""
    return all(
        character.isascii()
        or (
            unicodedata.bidirectional(character) not in ("R", "AL", "AN", "RLE", "RLO", "RLI")
            and unicodedata.category(character) not in ("Mn", "Me", "Mc", "Cf", "So", "Sk")
            and ord(character) < 0x1F000
        )
        for character in text
    )


def _first_cells(text: str, room: int) -> str:
    while text and cells(text) > max(room, 0):
        text = text[: max(0, min(len(text) - 1, room))]
    return text
