"""Inline Markdown as it grows: what is certain becomes styled spans, what later text could change waits.

Nothing is lost: a marker that closes nothing stays as it was written.
"""

from __future__ import annotations

import re
from typing import NamedTuple

BOLD, DIM, ITALIC, UNDERLINE, STRIKE, CODE = "1", "2", "3", "4", "9", "36"
"""Styles as the numbers of a terminal; a style may be several, joined by semicolons."""

DELIMITERS = (("**", BOLD), ("__", BOLD), ("~~", STRIKE), ("*", ITALIC), ("_", ITALIC))
LONGEST_WAIT = 400
"""Characters for which a marker may wait for its end before it is taken as text."""

_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
_TICKS = re.compile(r"`+")
_LINK = re.compile(r"\[([^\[\]\n]*)\]\(([^()\s]*)\)")
_LINK_BEGINNING = re.compile(r"\[[^\[\]\n]*(?:\](?:\([^()\s]*)?)?")
_MARKERS = frozenset("\\`*_~[")


class Span(NamedTuple):
    """Text in one style; "" is none."""

    text: str
    style: str


class Parsed(NamedTuple):
    """Spans that are certain, and how many characters of the source they used."""

    spans: list[Span]
    used: int


def parse_inline(source: str, *, final: bool, style: str = "", before: str = " ") -> Parsed:
    """Spans of a piece of one line; `before` is the character in front of it.

    Unless `final`, stops before the first marker whose meaning text still to come could change.
    """
    spans: list[Span] = []
    position = start = 0
    while position < len(source):
        if source[position] not in _MARKERS:
            position += 1
            continue
        previous = source[position - 1] if position else before
        late = final or len(source) - position > LONGEST_WAIT
        found = _marked(source, position, previous, style, late)
        if found is None:
            break
        if found.used:
            spans += [Span(source[start:position], style), *found.spans]
            start = position = position + found.used
        else:
            position += 1
    spans.append(Span(source[start:position], style))
    return Parsed([span for span in spans if span.text], position)


def _marked(source: str, at: int, before: str, style: str, final: bool) -> Parsed | None:
    """What begins at a marker: nothing used if it is plain text, None if that is not known yet."""
    character = source[at]
    if character == "\\":
        if at + 1 == len(source) and not final:
            return None
        escaped = _ESCAPED.match(source, at)
        return Parsed([Span(escaped[1], style)], 2) if escaped else Parsed([], 0)
    if character == "`":
        return _code(source, at, style, final)
    if character == "[":
        return _link(source, at, style, final)
    return _emphasis(source, at, before, style, final)


def _code(source: str, at: int, style: str, final: bool) -> Parsed | None:
    ticks = _TICKS.match(source, at)
    assert ticks is not None
    for closing in _TICKS.finditer(source, ticks.end()):
        if len(closing[0]) == len(ticks[0]):
            if closing.end() == len(source) and not final:
                return None  # one more tick would make it another run
            text = source[ticks.end() : closing.start()]
            if text.startswith(" ") and text.endswith(" ") and text.strip():
                text = text[1:-1]
            return Parsed([Span(text, joined(style, CODE))], closing.end() - at)
    return Parsed([Span(ticks[0], style)], len(ticks[0])) if final else None


def _link(source: str, at: int, style: str, final: bool) -> Parsed | None:
    link = _LINK.match(source, at)
    if link is not None:
        words = parse_inline(link[1], final=True, style=joined(style, UNDERLINE)).spans
        address = [] if link[2] in ("", link[1]) else [Span(f" ({link[2]})", joined(style, DIM))]
        return Parsed([*words, *address], len(link[0]))
    beginning = _LINK_BEGINNING.match(source, at)
    assert beginning is not None
    return None if beginning.end() == len(source) and not final else Parsed([], 0)


def _emphasis(source: str, at: int, before: str, style: str, final: bool) -> Parsed | None:
    for mark, added in DELIMITERS:
        if not source.startswith(mark, at):
            continue
        begin = at + len(mark)
        if begin == len(source):
            return Parsed([], 0) if final else None
        if source[begin].isspace() or (mark[0] == "_" and before.isalnum()):
            return Parsed([Span(mark, style)], len(mark))
        end = _closing(source, begin, mark, final)
        if end is None:
            return None
        if end < 0:
            return Parsed([Span(mark, style)], len(mark))
        inner = parse_inline(source[begin:end], final=True, style=joined(style, added), before=mark[-1])
        return Parsed(inner.spans, end + len(mark) - at)
    return None if source[at:] == "~" and not final else Parsed([], 0)


def _closing(source: str, begin: int, mark: str, final: bool) -> int | None:
    """Where a delimiter closes: -1 if it does not, None if that is not known yet."""
    position = begin
    while (position := source.find(mark[0], position)) >= 0:
        run = len(source) - position - len(source[position:].lstrip(mark[0]))
        if position + run == len(source) and not final:
            return None
        after = source[position + run : position + run + 1]
        closes = run >= len(mark) if len(mark) == 2 else run != 2
        if mark[0] == "_" and after.isalnum():
            closes = False
        if closes and position > begin and not source[position - 1].isspace():
            return position + run - len(mark)
        position += run
    return -1 if final else None


def joined(style: str, added: str) -> str:
    """One style on top of another."""
    return f"{style};{added}" if style else added
