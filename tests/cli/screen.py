"""A terminal in miniature: what a person sees after bytes were written, and which rows were touched."""

from __future__ import annotations

import re

from rich.cells import cell_len

_SEQUENCE = re.compile(r"\x1b(?:\[([0-9;?]*)([A-Za-z])|([78]))")


class Screen:
    """Rows of cells, a cursor and a saved one. Knows SGR, erase to the end, up, left, save, restore."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self.styles: list[list[str]] = [[]]
        self.row = self.column = 0
        self.saved = (0, 0)
        self.style = ""
        self.redrawn: list[int] = []
        """Rows that were written to after a later row existed."""

    def feed(self, text: str) -> None:
        """Write to the terminal."""
        position = 0
        while position < len(text):
            if text[position] == "\x1b":
                match = _SEQUENCE.match(text, position)
                assert match, repr(text[position : position + 12])
                self._control(match[1] or "", match[2] or match[3])
                position = match.end()
                continue
            self._put(text[position])
            position += 1

    def _control(self, values: str, kind: str) -> None:
        if kind == "m":
            self.style = "" if values in ("", "0") else values
        elif kind == "K":
            del self.rows[self.row][self.column :], self.styles[self.row][self.column :]
        elif kind == "M":
            del self.rows[self.row : self.row + int(values or 1)]
            del self.styles[self.row : self.row + int(values or 1)]
        elif kind == "J":
            del self.rows[self.row + 1 :], self.styles[self.row + 1 :]
            del self.rows[self.row][self.column :], self.styles[self.row][self.column :]
        elif kind == "A":
            self.row -= int(values or 1)
            assert self.row >= 0
        elif kind == "D":
            self.column = max(0, self.column - int(values or 1))
        elif kind == "7":
            self.saved = (self.row, self.column)
        elif kind == "8":
            self.row, self.column = self.saved
        else:
            raise AssertionError(f"CSI {values}{kind} is not expected here")

    def _put(self, character: str) -> None:
        if character == "\n":
            self.row, self.column = self.row + 1, 0
        elif character == "\r":
            self.column = 0
        else:
            width = cell_len(character)
            if self.column + width > self.columns:
                self.row, self.column = self.row + 1, 0
            if self.row < len(self.rows) - 1:
                self.redrawn.append(self.row)
        while self.row >= len(self.rows):
            self.rows.append([])
            self.styles.append([])
        if character in "\r\n":
            return
        cells, styles = self.rows[self.row], self.styles[self.row]
        cells += [" "] * (self.column - len(cells))
        styles += [""] * (self.column - len(styles))
        cells[self.column : self.column + width] = [character, *[""] * (width - 1)]
        styles[self.column : self.column + width] = [self.style] * width
        self.column += width

    @property
    def text(self) -> str:
        """Everything on the screen, without blanks at the ends of rows."""
        return "\n".join("".join(row).rstrip() for row in self.rows)

    def style_of(self, words: str) -> str:
        """The style of the first cell of these words. Raises ValueError if they are not on one row."""
        for cells, styles in zip(self.rows, self.styles, strict=True):
            at = "".join(cell or "\0" for cell in cells).find(words)
            if at >= 0:
                return styles[at]
        raise ValueError(words)
