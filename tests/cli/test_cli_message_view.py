"""The display of a typed message: wrapped between words, and every position at its place."""

from __future__ import annotations

import random

import pytest
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.layout.controls import BufferControl
from prompt_toolkit.layout.processors import TransformationInput

from spd.cli.chat.message_view import MessageView, shown_texts

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
THUMB = "\U0001f44d\U0001f3fd"


def screen_rows(line: str, columns: int) -> list[str]:
    """Return the rows of a screen that is full of narrow characters."""
    text = "".join(shown_texts(line, columns))
    return [text[start : start + columns] for start in range(0, len(text), columns)]


@pytest.mark.parametrize("columns", [7, 38, 78, 118])
def test_rows_end_between_words_and_nothing_is_lost(columns) -> None:
    draw = random.Random(columns)
    lengths = [draw.randint(1, 2 * columns if draw.random() < 0.05 else 7) for _ in range(200)]
    words = ["x" * length for length in lengths]
    rows = screen_rows(" ".join(words), columns)
    words_shown = [word for row in rows for word in row.split()]
    assert "".join(words_shown) == "".join(words) and len(rows) > 3
    long_words = [word for word in words if len(word) > columns]
    if not long_words:
        assert words_shown == words
    assert not any(row.startswith(" ") for row in rows)


def test_a_word_without_room_begins_a_row_and_a_blank_at_the_end_takes_none() -> None:
    assert screen_rows("one two three", 8) == ["one two ", "three"]
    assert screen_rows("one two three", 7) == ["one two", "three"]
    assert screen_rows("a\tb\tc", 20) == ["a   b   c"]
    assert screen_rows("two 日本", 7) == ["two    ", "日本"], "two columns each"


def test_joined_pictures_take_the_place_of_their_first_one() -> None:
    line = f"A {FAMILY} B {THUMB} C"
    assert "".join(shown_texts(line, 40)) == f"A {FAMILY[0]} B {THUMB[0]} C"
    indic = "क\u200dष \u2764\ufe0f"
    assert "".join(shown_texts(indic, 40)) == indic, "a joiner between letters is part of a word"


def test_positions_are_those_of_what_is_shown() -> None:
    line = f"one {FAMILY} twos\tend"
    view = MessageView(margin=2)
    control = BufferControl(Buffer())
    typed = TransformationInput(
        control, control.buffer.document, 0, lambda place: place, [("", line)], 10, 5, lambda n: []
    )
    done = view.apply_transformation(typed)
    text = "".join(fragment[1] for fragment in done.fragments)
    for mark in ("one", FAMILY[0], "twos", "end"):
        place = done.source_to_display(line.index(mark))
        assert text[place:].startswith(mark)
        assert done.display_to_source(place) in (
            line.index(mark),
            line.index(mark) + len(FAMILY) - 1,
        )
    assert done.source_to_display(len(line)) == len(text)
    assert done.display_to_source(len(text)) == len(line)
