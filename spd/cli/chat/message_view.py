"""The display of a typed message: rows end between words, and columns stay true."""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate

from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.screen import Char
from prompt_toolkit.layout.utils import explode_text_fragments

TAB_COLUMNS = 4
WORDS = re.compile(r"\s+|\S+")
_PICTURE = r"[\u2190-\u2bff\U0001f000-\U0001faff]"
JOINED_PICTURES = re.compile(
    rf"(?<={_PICTURE})\ufe0f?(?:\u200d{_PICTURE}\ufe0f?|[\U0001f3fb-\U0001f3ff])+"
)
"""What follows the first picture of a family, a profession or a skin: terminals differ in whether
they draw it as one, so that the column behind it is not known."""


class MessageView(Processor):
    """Shows a line wrapped between words, tabs as blanks and joined pictures as their first one.

    The message itself keeps all of it.
    """

    def __init__(self, margin: int) -> None:
        """margin: the columns that each row of the screen begins with, for the prompt."""
        self._margin = margin

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        """Return the line's fragments as they are shown, and how positions correspond."""
        fragments = explode_text_fragments(transformation_input.fragments)
        line = "".join(fragment[1] for fragment in fragments)
        texts = shown_texts(line, transformation_input.width - self._margin)
        starts = list(accumulate(map(len, texts), initial=0))
        return Transformation(
            [(style, text) for (style, *_), text in zip(fragments, texts, strict=True) if text],
            source_to_display=lambda place: (
                starts[place] if place < len(starts) else starts[-1] + place - len(texts)
            ),
            display_to_source=lambda place: (
                bisect_right(starts, place) - 1 if place < starts[-1] else len(texts)
            ),
        )


def shown_texts(line: str, columns: int) -> list[str]:
    """Return what is shown for each character of a line on a screen of that many columns.

    A blank before a word that begins a row takes up the rest of the row before it, or nothing.
    """
    texts = list(line)
    for match in JOINED_PICTURES.finditer(line):
        texts[match.start() : match.end()] = [""] * len(match[0])
    column = 0
    for word in WORDS.finditer(line):
        places = range(word.start(), word.end())
        if word[0].isspace():
            column = _place_blanks(texts, places, column, columns)
            continue
        width = sum(map(_columns, texts[word.start() : word.end()]))
        if column > 0 and width <= columns < column + width:
            texts[word.start() - 1] += " " * (columns - column)
            column = 0
        for place in places:
            column = _next_column(column, _columns(texts[place]), columns)
    return texts


def _place_blanks(texts: list[str], places: range, column: int, columns: int) -> int:
    """Set the texts of blanks from a column on, and return the column behind them."""
    for place in places:
        count = TAB_COLUMNS - column % TAB_COLUMNS if texts[place] == "\t" else 1
        texts[place] = " " * min(count, columns - column)
        column += len(texts[place])
    return column


def _next_column(column: int, width: int, columns: int) -> int:
    """Return the column behind a character of `width`, which the next row takes if it must."""
    return column + width if column + width <= columns else width


def _columns(text: str) -> int:
    """Return the columns of a character."""
    return Char(text).width if text else 0
