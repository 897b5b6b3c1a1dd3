"""Markdown on a terminal while it streams: what is printed stays, and nothing is drawn twice.

A line's kind is decided by its first characters, its words are printed as they end, a table when it
ends. What this does not know is printed as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from spd.cli.chat.markdown_inline import BOLD, CODE, DIM, UNDERLINE, Span, parse_inline
from spd.cli.chat.rows import RowWriter, cells

_FENCE = re.compile(r"(`{3,}|~{3,})(.*)")
_HEADING = re.compile(r"(#{1,6})(?: +|$)")
_RULE = re.compile(r"([-*_])(?: *\1)* *")
_BULLET = re.compile(r"[-*+] +")
_NUMBER = re.compile(r"(\d{1,9}[.)]) +")
_UNDECIDED = re.compile(r"#{1,6}|[-*+_]|\d{1,9}[.)]?|`{1,2}|~{1,2}|>|[-*+] +")
_CELL = re.compile(r"(?<!\\)\|")
_DELIMITER_ROW = re.compile(r"\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *")

NOTHING = Span("", "")
LIST_SIGN, QUOTE_SIGN, RULE_SIGN, BAR = "• ", "│ ", "─", " │ "
ASCII_SIGNS = {ord("•"): "-", ord("│"): "|", ord("─"): "-"}


class MarkdownStream:
    """Takes text piece by piece and returns what is to be written to a terminal.

    The text holds no control characters but tabs and newlines.
    """

    def __init__(self, columns: Callable[[], int], *, color: bool, unicode: bool = True) -> None:
        self._rows = RowWriter(columns, color=color)
        self._columns, self._signs = columns, {} if unicode else ASCII_SIGNS
        self._line = ""
        self._body: str | None = None
        """What is left of the line once its kind is known; None while it is not."""
        self._before, self._style = " ", ""
        self._fence = ""
        self._table: list[str] = []

    def feed(self, text: str) -> str:
        """What to write once this text has come."""
        *lines, rest = text.expandtabs(4).split("\n")
        for line in lines:
            self._take(line)
            self._end_line()
        self._take(rest)
        return self._taken()

    def finish(self) -> str:
        """What to write at the end; afterwards the cursor stands at the beginning of a row."""
        if self._line or self._body is not None:
            self._end_line()
        self._end_table()
        self._fence = ""
        return self._taken()

    def _taken(self) -> str:
        written = "".join(self._rows.out).translate(self._signs)
        self._rows.out.clear()
        return written

    def _take(self, text: str) -> None:
        if not text:
            return
        self._line += text
        if self._body is None:
            self._decide(final=False)
        elif self._fence:
            self._rows.unwrapped(Span(text, CODE))
        else:
            self._body += text
            self._advance(final=False)

    def _advance(self, *, final: bool) -> None:
        """Print of the open line what is certain, and show the rest."""
        body = self._body or ""
        parsed = parse_inline(body, final=final, style=self._style, before=self._before)
        self._rows.write(parsed.spans)
        self._before = body[parsed.used - 1] if parsed.used else self._before
        self._body = body[parsed.used :]
        if not final:
            self._rows.show(self._body)

    def _end_line(self) -> None:
        if self._body is None:
            self._decide(final=True)
        if self._body is not None:
            if not self._fence:
                self._advance(final=True)
            self._rows.end()
        self._line, self._body, self._before, self._style = "", None, " ", ""

    def _decide(self, *, final: bool) -> None:
        """Find out what kind of line it is, and print what stands in front of its text."""
        line = self._line
        rest = line.lstrip(" ")
        if self._fence:
            self._decide_code(rest, final)
        elif rest.startswith("|") or (final and self._table and not rest):
            if final and rest:
                self._table.append(line)
                self._body = None
            elif rest:
                self._rows.show(line)
            else:
                self._end_table()
                self._begin(NOTHING, NOTHING, "")
        elif not rest:
            if final:
                self._end_table()
                self._begin(NOTHING, NOTHING, "")
        elif final or not self._is_open(rest):
            self._end_table()
            self._begin_text(line, rest, final)

    @staticmethod
    def _is_open(rest: str) -> bool:
        """Whether characters to come decide what kind of line this is."""
        return bool(_UNDECIDED.fullmatch(rest) or _RULE.fullmatch(rest) or _FENCE.match(rest))

    def _decide_code(self, rest: str, final: bool) -> None:
        """Inside a fence: the fence that closes it, or code that is printed as it comes."""
        closing = rest.rstrip(" ")
        could_close = len(self._line) - len(rest) < 4 and set(closing) <= {self._fence[0]}
        if could_close and not final:
            return
        if could_close and len(closing) >= len(self._fence):
            self._begin(Span(self._line, DIM), NOTHING, "")
            self._fence = ""
        else:
            self._rows.begin(NOTHING, NOTHING)
            self._rows.unwrapped(Span(self._line, CODE))
            self._body = ""

    def _begin_text(self, line: str, rest: str, final: bool) -> None:
        indent = line[: len(line) - len(rest)]
        pad = Span(indent, "")
        fence, heading = _FENCE.fullmatch(rest), _HEADING.match(rest)
        if fence is not None and "`" not in fence[2]:
            self._fence = fence[1]
            self._rows.begin(Span(line, DIM), NOTHING)
            self._body = ""
        elif heading is not None:
            self._style = f"{BOLD};{UNDERLINE}" if len(heading[1]) == 1 else BOLD
            self._begin(NOTHING, NOTHING, rest[heading.end() :])
        elif final and _RULE.fullmatch(rest) and sum(map(rest.count, "-*_")) >= 3:
            width = max(4, min(self._columns() - 1, 40))
            self._begin(Span(RULE_SIGN * width, DIM), NOTHING, "")
        elif bullet := _BULLET.match(rest):
            self._begin(Span(indent + LIST_SIGN, ""), Span(indent + "  ", ""), rest[bullet.end() :])
        elif number := _NUMBER.match(rest):
            sign = f"{indent}{number[1]} "
            self._begin(Span(sign, ""), Span(" " * len(sign), ""), rest[number.end() :])
        elif rest.startswith(">"):
            bar = Span(indent + QUOTE_SIGN, DIM)
            self._begin(bar, bar, rest[1:].removeprefix(" "))
        else:
            self._begin(pad, pad, rest)

    def _begin(self, first: Span, hang: Span, body: str) -> None:
        self._rows.begin(first, hang)
        self._body = body
        self._advance(final=False)

    def _end_table(self) -> None:
        """Print the rows that were kept: aligned where they are a table that fits, else as written."""
        lines, self._table = self._table, []
        if not lines:
            return
        aligned = _aligned(lines, self._columns() - 1)
        for line in aligned or [parse_inline(line, final=True).spans for line in lines]:
            self._rows.begin(NOTHING, NOTHING)
            if aligned is None:
                self._rows.write(line)
            else:
                for span in line:
                    self._rows.unwrapped(span)
            self._rows.end()


def _aligned(lines: list[str], width: int) -> list[list[Span]] | None:
    """The rows of a table with columns of one width each; None if it is none or is too wide."""
    if len(lines) < 2 or not _DELIMITER_ROW.fullmatch(lines[1].strip()):
        return None
    table = [_cells(line) for line in lines]
    columns = len(table[0])
    styled = [
        [parse_inline(cell, final=True, style=BOLD if number == 0 else "").spans for cell in row[:columns]]
        for number, row in enumerate(table)
        if number != 1
    ]
    sizes = [max((_size(row[i]) for row in styled if i < len(row)), default=0) for i in range(columns)]
    if sum(sizes) + len(BAR) * (columns - 1) > width:
        return None
    shown: list[list[Span]] = []
    for row in styled:
        line: list[Span] = []
        for i, size in enumerate(sizes):
            spans = row[i] if i < len(row) else []
            mark = table[1][i] if i < len(table[1]) else ""
            line += [Span(BAR, DIM)] if i else []
            line += _padded(spans, size - _size(spans), mark)
        shown.append(line)
    rule = "─┼─".join(RULE_SIGN * size for size in sizes)
    return [shown[0], [Span(rule.replace("┼", "│"), DIM)], *shown[1:]]


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    if inner.endswith("|") and not inner.endswith("\\|"):
        inner = inner[:-1]
    return [cell.strip().replace("\\|", "|") for cell in _CELL.split(inner)]


def _padded(spans: list[Span], missing: int, mark: str) -> list[Span]:
    left = missing if mark.endswith(":") else 0
    if mark.startswith(":") and left:
        left //= 2
    return [Span(" " * left, ""), *spans, Span(" " * (missing - left), "")]


def _size(spans: list[Span]) -> int:
    return sum(cells(span.text) for span in spans)
