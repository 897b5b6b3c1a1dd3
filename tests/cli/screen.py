"""A terminal in miniature: what a person sees after bytes were written, and which rows were touched."""

from __future__ import annotations

import re

from rich.cells import cell_len

_SEQUENCE = re.compile(r"\x1b\[([0-9;]*)([AMm])")


class Screen:
    """Rows of cells and a cursor. Knows SGR, up, and the deletion of rows."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self.styles: list[list[str]] = [[]]
        self.row = self.column = 0
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
                self._control(match[1], match[2])
                position = match.end()
                continue
            self._put(text[position])
            position += 1

    def _control(self, values: str, kind: str) -> None:
        if kind == "m":
            self.style = "" if values in ("", "0") else values
        elif kind == "M":
            del self.rows[self.row : self.row + int(values or 1)]
            del self.styles[self.row : self.row + int(values or 1)]
        else:
            self.row -= int(values or 1)
            assert self.row >= 0

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
