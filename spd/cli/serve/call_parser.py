"""What finds calls in a reply while it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from spd.cli.serve.call_forms import MARKS
from spd.cli.serve.call_grammar import Tools
from spd.cli.serve.call_readers import BLANK, loose, read_calls
from spd.runtime.engine.request import tail_of

NO_CALL = re.compile(BLANK + r'\{\s*[^\s"]')
_MARK = re.compile("|".join(map(re.escape, MARKS)))


class Piece(NamedTuple):
    """Thinking, text, or a call's arguments, first with the call's name and the model's own id."""

    kind: Literal["thinking", "text", "call"]
    text: str
    name: str | None = None
    id: str = ""


class CallParser:
    """Finds calls in one reply that comes in pieces of any size.

    Each is handed on when it is whole, and what is no whole call in the end is text. Arguments in
    JSON that a grammar holds are handed on as they come. Blanks before a call are dropped.
    """

    def __init__(self, tools: Tools) -> None:
        self._functions, self._form = tools.functions, tools.form
        head = rf"(?s:.*?){loose(self._form.call.partition('ARGUMENTS')[0])}\s*(?=\{{)"
        streams = tools.held and self._form.pairs is None
        self._head = re.compile(f"{self._form.head}|{head}" if streams else "(?!)")
        self._told: int | None = None
        """How much has been handed on of arguments, where they are handed on as they come."""
        marks = "|".join(
            re.escape(mark) for mark in (self._form.opening, self._form.closing) if mark
        )
        self._stop = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\Z)|({marks})', re.DOTALL)
        """A mark, or a string of JSON, in which none counts."""
        self._text, self._is_fresh = "", self._form.is_bare
        self._pieces: list[Piece] = []
        self._mark: str | None = None
        """What is text if no call comes: a mark with blanks before it; None outside of calls."""
        self._called = False
        """Whether a call has come."""
        self.notes: list[str] = []
        """What was begun as a call and is text, in words."""

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """Return what more text brings; what may begin a mark is held back unless it is `final`."""
        self._text += text
        if self._is_fresh and (begun := self._text.lstrip()):
            self._is_fresh, self._mark = False, "" if begun[0] in "{[" else None
        may_end = any(mark in text for mark in "{}>])")  # or what is inside goes on
        if final or may_end or self._told is not None or self._mark is None:
            while self._outside(final) if self._mark is None else self._inside(final):
                pass
        pieces, self._pieces = [one for one in self._pieces if one.text or one.name], []
        return pieces

    def _outside(self, final: bool) -> bool:
        """Take text up to an opening mark and blanks before it; says whether to go on."""
        content, mark, rest = self._text.partition(self._form.opening)
        held = 0 if mark or final else tail_of(self._form.opening, content)
        said = content[: len(content) - held]
        said = said if final and not mark and not self._called else said.rstrip()
        self._pieces.append(Piece("text", said))
        self._text, self._mark = (
            (rest, content[len(said) :] + mark) if mark else (content[len(said) :], None)
        )
        return bool(mark)

    def _inside(self, final: bool) -> bool:
        """Take the next call, or what shows that none comes; says whether to go on."""
        if self._told is not None:
            return self._arguments()
        has_called = self._called and not self._mark
        if head := self._head.match(self._text):
            self._text, self._mark, self._called = self._text[head.end() :], "", True
            return self._arguments(*filter(None, head.groups()))
        found = read_calls(self._text, self._form, self._functions)
        calls, end = found if isinstance(found, tuple) else ((), 0)
        if (
            calls and not self._mark and not self._called
        ):  # nothing but the whole reply, and a known function
            if {name for name, *_ in calls} - {*self._functions}:
                calls = ()
            elif not final and not self._text[end:].strip():
                return False
        if calls:
            self._pieces += [
                Piece("call", arguments, name, *ids) for name, arguments, *ids in calls
            ]
            self._text, self._mark, self._called = self._text[end:], "", True
            return True
        stop = next((one for one in self._stop.finditer(self._text) if one[1]), None)
        never = not has_called and (isinstance(found, tuple) or NO_CALL.match(self._text))
        if not (final or never or (stop and found is not True)):
            return False
        said, self._mark = self._mark or "", None
        if has_called:  # the rest of the calls; brackets alone say nothing
            rest = self._text[: stop.start()] if stop else self._text
            self._text = self._text[
                stop.end() if stop and stop[1] == self._form.closing else len(rest) :
            ]
            rest = _MARK.sub("", rest)[
                : None if stop else -tail_of(self._form.closing, rest) or None
            ]
            said = rest if rest.strip(" \t\r\n,;]}`") else ""
        if said.strip():
            self.notes.append(
                f"what follows {self._form.opening} is no whole call in this model's form: text"
            )
        self._pieces.append(Piece("text", said))
        return True

    def _arguments(self, name: str | None = None, call_id: str = "") -> bool:
        """Hand on what has come of arguments, first with a name; says whether they have ended."""
        told, end = self._told or 0, None
        if "}" in self._text[told:]:
            with suppress(ValueError, RecursionError):
                end = json.JSONDecoder().raw_decode(self._text)[1]
        self._pieces.append(Piece("call", self._text[told:end], name, call_id))
        self._told = len(self._text) if end is None else None
        self._text = self._text[end:] if end is not None else self._text
        return end is not None
