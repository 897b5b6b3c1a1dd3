"""Parsing of tool calls in a reply while it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from spd.conversation.tools.call_forms import CALL_MARKS, Form
from spd.conversation.tools.call_grammar import Tools
from spd.conversation.tools.call_readers import (
    SEPARATORS,
    Calls,
    loose_pattern,
    next_call_position,
    read_calls,
)
from spd.runtime.engine.request import partial_match_length

NO_CALL = re.compile(SEPARATORS + r'\{\s*[^\s"]')
"""Matches a brace that begins no JSON object."""
_MARK = re.compile("|".join(map(re.escape, CALL_MARKS)))
_BROKEN_CALL_SEPARATORS = " \t\r\n,;]}`"
"""Characters that may stand between calls of which one is broken."""


class Piece(NamedTuple):
    """Thinking, text, or a call's arguments, first with the call's name and the model's own id."""

    kind: Literal["thinking", "text", "call"]
    text: str
    name: str | None = None
    id: str = ""


class CallParser:
    """Finds calls in one reply that arrives in pieces of any size.

    A call is returned once it is complete; a call that never completes is text. Arguments in JSON
    that a grammar constrains are returned as they arrive. Blanks before a call are dropped.
    """

    def __init__(self, tools: Tools) -> None:
        self._functions = tools.functions
        self._form = tools.form
        self._is_exact = tools.is_constrained or tools.trigger_token is not None
        head = rf"(?s:.*?){loose_pattern(self._form.call.partition('ARGUMENTS')[0])}\s*(?=\{{)"
        streams = tools.is_constrained and self._form.pairs is None
        self._streamed_head = re.compile(f"{self._form.head_pattern}|{head}" if streams else "(?!)")
        self._streamed_length: int | None = None
        """Characters of streamed arguments that have been returned; None outside of such
        arguments.
        """
        self._openings = [self._form.opening, *_unmarked_openings(tools)]
        self._opening = re.compile("|".join(map(re.escape, self._openings)))
        marks = "|".join(
            re.escape(mark) for mark in (self._form.opening, self._form.closing) if mark
        )
        self._stop = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\Z)|({marks})', re.DOTALL)
        """A mark, or a JSON string, in which marks do not count."""
        self._id_behind = re.compile(
            loose_pattern(self._form.id_after_arguments).replace(r"\d+", r"[\w-]+") or "(?!)"
        )
        self._plain_stop = re.compile(f"({marks})")
        self._text = ""
        """Text that has arrived and is not returned yet."""
        self._pieces: list[Piece] = []
        self._mark: str | None = None
        """Blanks and a mark that are text if no call follows; None outside of calls."""
        self._unmarked = ""
        """The beginning of a call without its mark, which `_text` begins with; else empty."""
        self._is_at_start = self._form.is_bare
        """True until the first text, if the reply may consist of calls without a mark."""
        self._is_bare_call = False
        """True if the reply began with a bracket, so that it may consist of calls without a
        mark.
        """
        self._has_called = False
        """True once a call has been found."""
        self._drops_closing = False
        """True if a closing mark that comes next is dropped: its opening mark was missing."""
        self.notes: list[str] = []
        """Notes about texts that began as a call and are none."""

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """Return the pieces that more text adds; a text that may begin a mark is held back
        unless `final`.
        """
        self._text += text
        beginning = self._text.lstrip()[:1]
        if self._is_at_start and beginning:
            self._is_at_start = False
            self._is_bare_call = beginning in "{["
            self._mark = "" if self._is_bare_call else None
        may_end = any(mark in text for mark in "{}>])")  # else the call goes on
        if (
            final
            or may_end
            or self._streamed_length is not None
            or self._mark is None
            or self._unmarked
        ):
            while self._read_text(final) if self._mark is None else self._read_call(final):
                pass
        pieces = [piece for piece in self._pieces if piece.text or piece.name]
        self._pieces = []
        return pieces

    def _read_text(self, final: bool) -> bool:
        """Read text up to an opening mark and the blanks before it; return True to go on."""
        if self._drops_closing and not self._drop_closing(final):
            return False
        mark = self._opening.search(self._text)
        if mark is not None:
            content = self._text[: mark.start()]
        elif final:
            content = self._text
        else:
            may_begin = max(partial_match_length(opening, self._text) for opening in self._openings)
            content = self._text[: len(self._text) - may_begin]
        is_end = final and mark is None and not self._has_called
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

    def _drop_closing(self, final: bool) -> bool:
        """Drop a closing mark that comes next; return False if it may still come."""
        closing = self._form.closing
        remaining = self._text.lstrip()
        is_part = closing.startswith(remaining)
        if is_part and not final:
            return False
        if remaining and (is_part or remaining.startswith(closing)):
            self._text = remaining.removeprefix(closing) if not is_part else ""
        self._drops_closing = False
        return True

    def _read_call(self, final: bool) -> bool:
        """Read the next call, or the text that shows that none follows; return True to go on."""
        if self._streamed_length is not None:
            return self._stream_arguments()
        head = self._streamed_head.match(self._text)
        if head is not None:
            self._text = self._text[head.end() :]
            self._mark = ""
            self._has_called = True
            return self._stream_arguments(*filter(None, head.groups()))
        is_exact = self._is_exact and not self._unmarked
        result = read_calls(self._text, self._form, self._functions, is_exact=is_exact)
        calls, end = result if isinstance(result, tuple) else ((), 0)
        if calls and self._is_bare_call and not self._has_called:
            if any(call[0] not in self._functions for call in calls):
                calls = ()
            elif not final and not self._text[end:].strip():
                return False
        if calls:
            self._append_calls(calls, end)
            return True
        if self._unmarked:
            return self._end_unmarked(is_open=result is True, final=final)
        return self._end_calls(result, final)

    def _append_calls(self, calls: Calls, end: int) -> None:
        """Append calls, which end at a position of the text."""
        for name, arguments, *ids in calls:
            self._pieces.append(Piece("call", arguments, name, *ids))
        self._text = self._text[end:]
        self._mark = ""
        self._has_called = True
        if self._unmarked:
            self._unmarked = ""
            self._mark = None
            self._drops_closing = True

    def _end_unmarked(self, *, is_open: bool, final: bool) -> bool:
        """End the beginning of a call without its mark if no call follows; return True to go on."""
        remaining = self._text[len(self._unmarked) :].lstrip()
        may_follow = any(
            remaining.startswith(mark) or mark.startswith(remaining)
            for mark in _unmarked_continuations(self._form)
        )
        if not final and (is_open or may_follow):
            return False
        length = len(self._unmarked)
        self._pieces.append(Piece("text", (self._mark or "") + self._unmarked))
        if is_open:
            self._note_broken_call()
        self._text = self._text[length:]
        self._unmarked = ""
        self._mark = None
        return True

    def _end_calls(self, result: object, final: bool) -> bool:
        """End the calls, or skip a broken one, if no complete call follows; return True to go on.

        A broken call among others that share their marks is text; the others remain calls.
        """
        has_called = self._has_called and not self._mark
        stops = (match for match in self._stop.finditer(self._text) if match[1])
        stop = next(stops, None)
        if stop is None and final:  # a broken JSON string may hold the mark
            stop = self._plain_stop.search(self._text)
        shares_marks = self._form.separator is not None and not self._is_bare_call
        is_none = isinstance(result, tuple) or NO_CALL.match(self._text) is not None
        never = is_none and not has_called and not shares_marks
        if not (final or never or (stop is not None and result is not True)):
            return False
        section = self._text[: stop.start()] if stop else self._text
        following = None
        if shares_marks and not never:
            following = next_call_position(section, self._form, self._functions)
        if following is not None:
            self._append_broken_call(section[:following])
            self._text = self._text[following:]
            self._mark = ""
            self._has_called = True
            return True
        if has_called:  # text behind the last call
            has_end = stop is not None and stop[1] == self._form.closing
            self._text = self._text[stop.end() if stop and has_end else len(section) :]
            if stop is None:
                begun = max(
                    partial_match_length(mark, section)
                    for mark in {*CALL_MARKS, self._form.closing}
                )
                section = section[: len(section) - begun]
            self._append_broken_call(section)
        else:
            text = self._mark or ""
            if text.strip():
                self._note_broken_call()
            self._pieces.append(Piece("text", text))
        self._mark = None
        return True

    def _append_broken_call(self, text: str) -> None:
        """Append the text between calls, unless it consists of brackets and marks alone."""
        words = _MARK.sub("", self._id_behind.sub("", text))
        if words.strip(_BROKEN_CALL_SEPARATORS):
            self._note_broken_call()
            self._pieces.append(Piece("text", words))

    def _note_broken_call(self) -> None:
        """Append to `notes` that a call is broken."""
        opening = self._form.opening
        self.notes.append(f"what follows {opening} is no whole call in this model's form: text")

    def _stream_arguments(self, name: str | None = None, call_id: str = "") -> bool:
        """Append the arguments that have arrived, first with a name; return True at their end."""
        begin = self._streamed_length or 0
        end: int | None = None
        if "}" in self._text[begin:]:
            with suppress(ValueError, RecursionError):
                end = json.JSONDecoder().raw_decode(self._text)[1]
        self._pieces.append(Piece("call", self._text[begin:end], name, call_id))
        self._streamed_length = len(self._text) if end is None else None
        self._text = self._text[end:] if end is not None else self._text
        return end is not None


def _unmarked_openings(tools: Tools) -> list[str]:
    """Return the beginnings of known functions' calls whose mark is missing.

    Some models leave the mark out in forms whose keys stand between tags.
    """
    form = tools.form
    if form.pairs is None or form.pairs.style != "tags" or form.channels is not None:
        return []
    head = form.call.partition("ARGUMENTS")[0].strip()
    if head == "NAME":  # a name alone shows no call
        head += "\n" + form.pairs.text.partition("KEY")[0]
    return [head.replace("NAME", name) for name in tools.functions]


def _unmarked_continuations(form: Form) -> list[str]:
    """Return the texts that may follow the beginning of a call without a mark: a key, or its
    end.
    """
    if form.call.startswith("NAME"):  # a key has come
        return [""]
    tail = form.call.partition("ARGUMENTS")[2].strip()
    key = form.pairs.text.partition("KEY")[0] if form.pairs is not None else ""
    return [mark for mark in (tail, key, form.closing) if mark]
