"""Streaming Markdown: any cut of the text gives the same screen, and finished blocks stay."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence

import pytest
from rich.cells import cell_len

from spd.cli.terminal.markdown import MarkdownStream


class Screen:
    """A terminal of rows of cells and a cursor; it supports SGR, cursor up and deletion of rows."""

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
        for values, kind, character in re.findall(r"\x1b\[([0-9;]*)([AMm])|(.)", text, re.DOTALL):
            assert character != "\x1b", text
            self._put(character) if character else self._control(values, kind)

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
            self.row = self.row + 1
            self.column = 0
        elif character == "\r":
            self.column = 0
        else:
            width = cell_len(character)
            if self.column + width > self.columns:
                self.row = self.row + 1
                self.column = 0
            if self.row < len(self.rows) - 1:
                self.redrawn.append(self.row)
        while self.row >= len(self.rows):
            self.rows.append([])
            self.styles.append([])
        if character in "\r\n":
            return
        cells = self.rows[self.row]
        styles = self.styles[self.row]
        cells += [" "] * (self.column - len(cells))
        styles += [""] * (self.column - len(styles))
        cells[self.column : self.column + width] = [character, *[""] * (width - 1)]
        styles[self.column : self.column + width] = [self.style] * width
        self.column += width

    @property
    def text(self) -> str:
        """Everything on the screen, without blanks at the ends of rows."""
        return "\n".join("".join(row).rstrip() for row in self.rows)

    def style_of(self, text: str) -> str:
        """Return the style of the first cell of a text. Raises ValueError if it is on no row."""
        for cells, styles in zip(self.rows, self.styles, strict=True):
            index = "".join(cell or "\0" for cell in cells).find(text)
            if index >= 0:
                return styles[index]
        raise ValueError(text)


TEXT = """# Title *here*
Some **bold words that are long** and `code` and *args with **kwargs, 2 * 3 * 4, snake_case and _it_.

- first item with a fairly long text that has to be wrapped somewhere around here
* second `x`
  - nested
1. one
2) two [docs](https://example.org/x) and [1] or [a](b

> quoted text that goes on and on and on and on and on and on and on until it wraps

| name | value |
|:-----|------:|
| a `b` | 1 |
| longer | 12345 |

```python
def f(**kw):  # a long comment that is not wrapped by anything, since people copy code from here
    return `no`
```
---
def first(items):
    '''Return the first __item__ *of* them.'''
	return items[0]

    # behind an empty row
  two *blanks*
日本語のテキストはスペースなしで続きますので折り返しが必要ですし、端末の幅を超えてしまいます。
שלום עולם זה טקסט מימין לשמאל 👩‍👩‍👧 emoji **שלום** end
\\*not emphasised\\* a ** b ~~gone~~ ~ x
unterminated **bold to the end
```
unterminated fence"""


def stream_of(columns: int, lines: int = 1000) -> tuple[MarkdownStream, Screen]:
    """Return a Markdown stream and the screen for its output."""
    return MarkdownStream(lambda: os.terminal_size((columns, lines)), color=True), Screen(columns)


def render(parts: Sequence[str], columns: int = 60) -> Screen:
    """Return the screen after these parts."""
    stream, screen = stream_of(columns)
    for part in parts:
        screen.feed(stream.feed(part))
    screen.feed(stream.finish())
    assert screen.column == 0
    return screen


@pytest.mark.parametrize("columns", [12, 25, 40, 80])
def test_any_cut_gives_the_same_screen(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spd.cli.terminal.markdown.DRAWING_SHARE", float("inf"))
    uncut = render([TEXT], columns)
    source = random.Random(columns)
    for count in (1, 5, 40, 400):
        cuts = sorted(source.sample(range(1, len(TEXT)), count))
        parts = [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
        screen = render(parts, columns)
        assert (screen.text, screen.styles) == (uncut.text, uncut.styles)


EXPECTED_ROWS = """# Title here
Some bold words that are long and code and *args with
 • second x
    • nested
 2 two docs (https://example.org/x) and [1] or [a](b
▌ and on and on until it wraps
 longer  12345
 a b         1
*not emphasised* a ** b gone ~ x
unterminated **bold to the end
unterminated fence"""


def test_markdown_becomes_rows_and_styles() -> None:
    screen = render(list(TEXT), 60)
    assert set(EXPECTED_ROWS.split("\n")) <= set(screen.text.split("\n"))
    styles = {
        "Title": "1;4",
        "here": "1;3;4",
        "bold words": "1",
        "kwargs": "",
        "gone": "9",
        "docs": "94",
    }
    assert {text: screen.style_of(text) for text in styles} == styles


CODE = """Use it so:
def first(items):
    \"\"\"Return the first __item__ *of* them.\"\"\"
    if items:
      return items[0]

    # behind an empty row
    return None

# Example usage:

  print(first([1]))
    print(first([2]))"""


def test_code_outside_of_fences_can_be_copied() -> None:
    """Leading blanks, marks within indented code, and comments are shown as written."""
    assert render(list(CODE), 80).text == CODE + "\n"
    assert render([CODE], 80).text == CODE + "\n"
    listed = render(["- item\n  continued\n   *more*\n\n  behind\n    it\n"], 80).text
    assert listed == " • item\n   continued\n    more\n   behind\n     it\n"
    assert render(["  two *blanks*\n one **b**"]).text == "  two blanks\n one b\n"


def test_a_block_that_changes_is_redrawn() -> None:
    """A word is redrawn once its style is known; the full block when the terminal shrinks."""
    stream, screen = stream_of(40, 24)
    screen.feed(stream.feed("a **bo"))
    stream._next_draw_time = 0.0
    assert screen.text == "a **bo"
    screen.feed(stream.feed("ld** word\n") + stream.finish())
    assert screen.text == "a bold word\n" and screen.style_of("bold") == "1"
    size = [os.terminal_size((60, 24))]
    stream = MarkdownStream(lambda: size[0], color=True)
    stream.feed("one two three four five six seven eight nine ten elev")
    size[0] = os.terminal_size((20, 24))
    stream._next_draw_time = 0.0
    again = stream.feed("en")
    assert again == "\r\x1b[2A\x1b[3Mone two three four\nfive six seven\neight nine ten\neleven"


def test_what_has_left_the_screen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows that are still on the screen are redrawn."""
    monkeypatch.setattr("spd.cli.terminal.markdown.DRAWING_SHARE", float("inf"))
    stream, screen = stream_of(40, 5)
    for number in range(30):
        screen.feed(stream.feed(f"line {number} **b"))
        top = len(screen.rows) - 5
        screen.redrawn.clear()
        screen.feed(stream.feed("**\n"))
        assert all(row >= top for row in screen.redrawn)
    screen.feed(stream.finish())
    assert screen.text.split("\n")[:-1] == [f"line {number} b" for number in range(30)]
