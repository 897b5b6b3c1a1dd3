"""Markdown as it streams: however the text is cut, the screen is the same, and no row is drawn twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from spd.cli.chat.markdown import MarkdownStream
from spd.cli.chat.markdown_inline import LONGEST_WAIT, Span, parse_inline
from tests.cli.screen import Screen

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
日本語のテキストはスペースなしで続きますので折り返しが必要ですし、端末の幅を超えてしまいます。
שלום עולם זה טקסט מימין לשמאל 👩‍👩‍👧 emoji **שלום** end
\\*not emphasised\\* a ** b ~~gone~~ ~ x
unterminated **bold to the end
```
unterminated fence"""


def shown(parts: Sequence[str], columns: int = 60, *, color: bool = True, unicode: bool = True) -> Screen:
    """The screen after these parts."""
    stream = MarkdownStream(lambda: columns, color=color, unicode=unicode)
    screen = Screen(columns)
    for part in parts:
        screen.feed(stream.feed(part))
    screen.feed(stream.finish())
    assert screen.column == 0
    return screen


@pytest.mark.parametrize("columns", [12, 25, 40, 80])
def test_any_cut_gives_the_same_screen_and_finished_rows_stay(columns: int) -> None:
    whole = shown([TEXT], columns)
    source = random.Random(columns)
    for count in (1, 5, 40, 400):
        cuts = sorted(source.sample(range(1, len(TEXT)), count))
        parts = [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
        screen = shown(parts, columns)
        assert (screen.text, screen.styles) == (whole.text, whole.styles)
        assert screen.redrawn == []


def test_what_a_person_sees() -> None:
    screen = shown(list(TEXT), 60)
    text = screen.text
    for line in (
        "Title here",
        "Some bold words that are long and code and *args with",
        "• second x",
        "  • nested",
        "2) two docs (https://example.org/x) and [1] or [a](b",
        "│ on and on until it wraps",
        "longer │ 12345",
        "a b    │     1",
        "*not emphasised* a ** b gone ~ x",
        "unterminated **bold to the end",
        "unterminated fence",
    ):
        assert line in text.split("\n"), line
    assert "somewhere around here" in text and "\n  somewhere" in text
    assert screen.style_of("Title") == "1;4" and screen.style_of("here") == "1;4;3"
    assert screen.style_of("bold words") == "1" and screen.style_of("kwargs") == ""
    assert screen.style_of("gone") == "9" and screen.style_of("def f(") == "36"
    assert screen.style_of("docs") == "4" and screen.style_of("```python") == "2"


def test_no_word_is_lost_at_any_width() -> None:
    words = "".join(TEXT.split())
    kept = "".join(c for c in words if c.isalnum())
    for columns in (20, 40, 200):
        seen = "".join(c for c in shown(list(TEXT), columns).text if c.isalnum())
        assert seen == kept


def test_words_are_wrapped_and_code_is_not() -> None:
    screen = shown([TEXT], 40)
    code = "def f(**kw):  # a long comment that is not wrapped by anything, since people copy code from here"
    assert code in "".join("".join(row) for row in screen.rows)
    prose = screen.text.split("```")[0]
    assert max(map(len, prose.split("\n"))) < 40


def test_the_tail_shows_what_is_not_known_yet() -> None:
    stream, screen = MarkdownStream(lambda: 40, color=True), Screen(40)
    screen.feed(stream.feed("a **bo"))
    assert screen.text == "a **bo"
    screen.feed(stream.feed("ld** wo"))
    assert screen.text == "a bold wo" and screen.style_of("bold") == "1"
    screen.feed(stream.feed("rd\n"))
    assert screen.text == "a bold word\n"


def test_without_colour_nothing_is_coloured_and_code_keeps_its_ticks() -> None:
    screen = shown(["`x y` and **b**\n```\ncode\n```\n"], color=False)
    assert "`x y` and b" in screen.text and screen.style_of("x y") == ""
    assert screen.style_of("code") == "" and screen.style_of("b") == "1"


def test_an_encoding_without_signs_gets_plain_ones() -> None:
    assert shown(["- a\n> b\n---\n"], unicode=False).text.startswith("- a\n| b\n-----")


def test_a_terminal_that_shrinks_goes_on_in_a_new_row() -> None:
    size = [60]
    stream, screen = MarkdownStream(lambda: size[0], color=True), Screen(60)
    screen.feed(stream.feed("one two three four five six sev"))
    size[0] = screen.columns = 20
    screen.feed(stream.feed("en eight nine ten eleven twelve\n"))
    assert screen.text.split("\n")[1:] == ["seven eight nine", "ten eleven twelve", ""]
    assert screen.text.split("\n")[0].startswith("one two three four five six")


@pytest.mark.parametrize(
    ("source", "spans"),
    [
        ("a*b*c", [("a", ""), ("b", "3"), ("c", "")]),
        ("snake_case_name", [("snake_case_name", "")]),
        ("__x__ _y_", [("x", "1"), (" ", ""), ("y", "3")]),
        ("***both***", [("both", "1;3")]),
        ("``a`b``", [("a`b", "36")]),
        ("`unclosed", [("`unclosed", "")]),
        ("2 * 3 ** 4", [("2 * 3 ** 4", "")]),
        ("\\*x\\*", [("*x*", "")]),
        ("[a **b**](u)", [("a ", "4"), ("b", "4;1"), (" (u)", "2")]),
        ("[u](u)", [("u", "4")]),
        ("~~a~~", [("a", "9")]),
    ],
)
def test_inline(source: str, spans: list[tuple[str, str]]) -> None:
    found, used = parse_inline(source, final=True)
    joined = [
        Span("".join(span.text for span in group), style)
        for style, group in itertools.groupby(found, key=lambda span: span.style)
    ]
    assert joined == [Span(*span) for span in spans] and used == len(source)


def test_a_marker_waits_for_its_end_but_not_for_ever() -> None:
    for source in ("x **b", "x `b", "x [b", "x [b](c", "x *", "x \\", "x **b*"):
        assert parse_inline(source, final=False).used == 2, source
    assert parse_inline("x **" + "b" * LONGEST_WAIT, final=False).used == LONGEST_WAIT + 4


def test_a_table_that_does_not_fit_is_shown_as_written() -> None:
    table = "| a very long heading | another very long heading |\n|---|---|\n| 1 | 2 |\n"
    text = " ".join(shown([table], 30).text.split())
    assert text == " ".join(table.split())
    assert shown(["| no table\n| at all\n\nx"]).text.split("\n")[:2] == ["| no table", "| at all"]
