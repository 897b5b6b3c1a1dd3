"""What finds calls in a reply while it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from spd.conversation.tools.call_forms import MARKS, Form
from spd.conversation.tools.call_grammar import Tools
from spd.conversation.tools.call_readers import (
    BLANK,
    Calls,
    loose,
    next_call,
    read_calls,
)
from spd.runtime.engine.request import partial_match_length

NO_CALL = re.compile(BLANK + r'\{\s*[^\s"]')
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_SEPARATORS = " \t\r\n,;]}`"


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
        self._functions = tools.functions
        self._form = tools.form
        self._is_exact = tools.is_constrained or tools.trigger_token is not None
        head = rf"(?s:.*?){loose(self._form.call.partition('ARGUMENTS')[0])}\s*(?=\{{)"
        streams = tools.is_constrained and self._form.pairs is None
        self._head = re.compile(f"{self._form.head}|{head}" if streams else "(?!)")
        self._streamed: int | None = None
        """How much has been handed on of arguments, where they are handed on as they come."""
        self._openings = [self._form.opening, *_unmarked_openings(tools)]
        self._opening = re.compile("|".join(map(re.escape, self._openings)))
        marks = "|".join(
            re.escape(mark) for mark in (self._form.opening, self._form.closing) if mark
        )
        self._stop = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\Z)|({marks})', re.DOTALL)
        """A mark, or a string of JSON, in which none counts."""
        self._id_behind = re.compile(
            loose(self._form.id_behind).replace(r"\d+", r"[\w-]+") or "(?!)"
        )
        self._plain_stop = re.compile(f"({marks})")
        self._text = ""
        """What has come and is not yet handed on."""
        self._pieces: list[Piece] = []
        self._mark: str | None = None
        """What is text if no call comes: a mark with blanks before it; None outside of calls."""
        self._unmarked = ""
        """What the text begins with where a call began without its mark."""
        self._is_fresh = self._form.is_bare
        """Whether nothing has come, and the reply may be nothing but calls."""
        self._is_alone = False
        """Whether no mark has come, and the reply may be nothing but calls."""
        self._called = False
        """Whether a call has come."""
        self._drops_closing = False
        """Whether a closing mark may come next that is dropped: its opening one was missing."""
        self.notes: list[str] = []
        """What was begun as a call and is text, in words."""

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """Return what more text brings; what may begin a mark is held back unless it is `final`."""
        self._text += text
        beginning = self._text.lstrip()[:1]
        if self._is_fresh and beginning:
            self._is_fresh = False
            self._is_alone = beginning in "{["
            self._mark = "" if self._is_alone else None
        may_end = any(mark in text for mark in "{}>])")  # or what is inside goes on
        if final or may_end or self._streamed is not None or self._mark is None or self._unmarked:
            while self._outside(final) if self._mark is None else self._inside(final):
                pass
        pieces = [piece for piece in self._pieces if piece.text or piece.name]
        self._pieces = []
        return pieces

    def _outside(self, final: bool) -> bool:
        """Take text up to an opening mark and blanks before it; returns whether to go on."""
        if self._drops_closing and not self._without_closing(final):
            return False
        mark = self._opening.search(self._text)
        if mark is not None:
            content = self._text[: mark.start()]
        elif final:
            content = self._text
        else:
            may_begin = max(partial_match_length(opening, self._text) for opening in self._openings)
            content = self._text[: len(self._text) - may_begin]
        is_end = final and mark is None and not self._called
        text = content if is_end else content.rstrip()
        self._pieces.append(Piece("text", text))
        if mark is None:
            self._text = self._text[len(text) :]
            return False
        blanks = content[len(text) :]
        self._unmarked = "" if mark[0] == self._form.opening else mark[0]
        self._mark = blanks if self._unmarked else blanks + mark[0]
        self._text = self._text[mark.end() - len(self._unmarked) :]
        return True

    def _without_closing(self, final: bool) -> bool:
        """Drop a closing mark that comes next; returns False where it may still come."""
        closing = self._form.closing
        rest = self._text.lstrip()
        is_part = closing.startswith(rest)
        if is_part and not final:
            return False
        if rest and (is_part or rest.startswith(closing)):
            self._text = rest.removeprefix(closing) if not is_part else ""
        self._drops_closing = False
        return True

    def _inside(self, final: bool) -> bool:
        """Take the next call, or what shows that none comes; returns whether to go on."""
        if self._streamed is not None:
            return self._arguments()
        head = self._head.match(self._text)
        if head is not None:
            self._text = self._text[head.end() :]
            self._mark = ""
            self._called = True
            return self._arguments(*filter(None, head.groups()))
        is_exact = self._is_exact and not self._unmarked
        result = read_calls(self._text, self._form, self._functions, is_exact=is_exact)
        calls, end = result if isinstance(result, tuple) else ((), 0)
        if calls and self._is_alone and not self._called:
            if any(call[0] not in self._functions for call in calls):
                calls = ()
            elif not final and not self._text[end:].strip():
                return False
        if calls:
            self._take(calls, end)
            return True
        if self._unmarked:
            return self._without_mark(is_open=result is True, final=final)
        return self._without_call(result, final)

    def _take(self, calls: Calls, end: int) -> None:
        """Hand on calls that end at a place of the text."""
        for name, arguments, *ids in calls:
            self._pieces.append(Piece("call", arguments, name, *ids))
        self._text = self._text[end:]
        self._mark = ""
        self._called = True
        if self._unmarked:
            self._unmarked = ""
            self._mark = None
            self._drops_closing = True

    def _without_mark(self, *, is_open: bool, final: bool) -> bool:
        """End what began as a call without its mark where it is none; returns whether to go on."""
        rest = self._text[len(self._unmarked) :].lstrip()
        may_follow = any(
            rest.startswith(mark) or mark.startswith(rest) for mark in _following(self._form)
        )
        if not final and (is_open or may_follow):
            return False
        length = len(self._unmarked)
        self._pieces.append(Piece("text", (self._mark or "") + self._unmarked))
        if is_open:
            self._note()
        self._text = self._text[length:]
        self._unmarked = ""
        self._mark = None
        return True

    def _without_call(self, result: object, final: bool) -> bool:
        """End calls, or skip a broken one, where no whole one comes next; returns whether to go on.

        A broken call among others that share their marks is text by itself.
        """
        has_called = self._called and not self._mark
        stops = (match for match in self._stop.finditer(self._text) if match[1])
        stop = next(stops, None)
        if stop is None and final:  # a broken text may hold the mark
            stop = self._plain_stop.search(self._text)
        shares_marks = self._form.between is not None and not self._is_alone
        is_none = isinstance(result, tuple) or NO_CALL.match(self._text) is not None
        never = is_none and not has_called and not shares_marks
        if not (final or never or (stop is not None and result is not True)):
            return False
        section = self._text[: stop.start()] if stop else self._text
        following = None
        if shares_marks and not never:
            following = next_call(section, self._form, self._functions)
        if following is not None:
            self._hand_out_broken(section[:following])
            self._text = self._text[following:]
            self._mark = ""
            self._called = True
            return True
        if has_called:  # the rest of the calls
            has_end = stop is not None and stop[1] == self._form.closing
            self._text = self._text[stop.end() if stop and has_end else len(section) :]
            if stop is None:
                begun = max(
                    partial_match_length(mark, section) for mark in {*MARKS, self._form.closing}
                )
                section = section[: len(section) - begun]
            self._hand_out_broken(section)
        else:
            text = self._mark or ""
            if text.strip():
                self._note()
            self._pieces.append(Piece("text", text))
        self._mark = None
        return True

    def _hand_out_broken(self, text: str) -> None:
        """Hand on what stands between calls and is none; brackets and marks alone say nothing."""
        words = _MARK.sub("", self._id_behind.sub("", text))
        if words.strip(_SEPARATORS):
            self._note()
            self._pieces.append(Piece("text", words))

    def _note(self) -> None:
        opening = self._form.opening
        self.notes.append(f"what follows {opening} is no whole call in this model's form: text")

    def _arguments(self, name: str | None = None, call_id: str = "") -> bool:
        """Hand on what has come of arguments, first with a name; returns whether they have ended."""
        begin = self._streamed or 0
        end: int | None = None
        if "}" in self._text[begin:]:
            with suppress(ValueError, RecursionError):
                end = json.JSONDecoder().raw_decode(self._text)[1]
        self._pieces.append(Piece("call", self._text[begin:end], name, call_id))
        self._streamed = len(self._text) if end is None else None
        self._text = self._text[end:] if end is not None else self._text
        return end is not None


def _unmarked_openings(tools: Tools) -> list[str]:
    """Return what calls of known functions begin with where their mark is missing.

    Some models leave it out in forms whose keys stand between tags.
    """
    form = tools.form
    if form.pairs is None or form.pairs.style != "tags" or form.channels is not None:
        return []
    head = form.call.partition("ARGUMENTS")[0].strip()
    if head == "NAME":  # a name alone says nothing
        head += "\n" + form.pairs.text.partition("KEY")[0]
    return [head.replace("NAME", name) for name in tools.functions]


def _following(form: Form) -> list[str]:
    """Return what may follow the beginning of a call without a mark: a key, or its end."""
    if form.call.startswith("NAME"):  # a key has come
        return [""]
    tail = form.call.partition("ARGUMENTS")[2].strip()
    key = form.pairs.text.partition("KEY")[0] if form.pairs is not None else ""
    return [mark for mark in (tail, key, form.closing) if mark]
