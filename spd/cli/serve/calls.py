"""Tool calls in a growing reply: text in pieces of any size in, content and pieces of calls out.

Each form is a generator that waits for text where it needs more, so that it reads as the form is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from spd.cli.serve.tools import DEEPSEEK, GLM, HERMES, LLAMA3, MISTRAL, NAMED, QWEN_XML, REQUIRED, Tools
from spd.cli.text.structured import tail_of

BLANK = " \t\r\n"
MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
"""Marks that may be special tokens, which have no text of their own."""
Wait = Generator[None, None, None]


class Piece(NamedTuple):
    """Content where `call` is None; else a part of a call's arguments, its first one with the name."""

    text: str
    call: int | None = None
    name: str | None = None


class NotACall(Exception):
    """What stands there is no call: it is content."""


class CallParser:
    """Finds calls in one reply."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.calls = 0
        """How many have begun."""
        self._buffer, self._at, self._final = "", 0, False
        self._pin: int | None = None
        """Where content goes on if what is being read turns out to be no call; kept until it is known."""
        self._pieces: list[Piece] = []
        forms: Mapping[str, Callable[[], Wait]] = {
            HERMES: self._tagged,
            QWEN_XML: self._tagged,
            GLM: self._tagged,
            LLAMA3: self._llama3,
            MISTRAL: self._mistral,
            DEEPSEEK: self._deepseek,
            NAMED: self._named,
            REQUIRED: self._required,
        }
        self._reader = forms[tools.form]()
        self._ended = False

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """What more text brings; what may be the beginning of a mark is held back unless it is `final`."""
        if self._pin is None:
            self._buffer, self._at = self._buffer[self._at :], 0
        self._buffer, self._final = self._buffer + text, final
        if not self._ended:
            self._ended = next(self._reader, self) is self
        if self._ended:
            self._content(self._take())
        pieces, self._pieces = self._pieces, []
        return pieces

    # -- what forms are made of --------------------------------------------------------------------

    def _take(self, end: int | None = None) -> str:
        text = self._buffer[self._at : end]
        self._at += len(text)
        return text

    def _rewind(self, mark: str = "") -> None:
        """What was read since the pin is no call: it is content behind its mark."""
        assert self._pin is not None
        self._at, self._pin = self._pin, None
        self._content(mark)

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(text))

    def _begin(self, name: str) -> None:
        self._pieces.append(Piece("", self.calls, name))
        self.calls, self._pin = self.calls + 1, None

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(text, self.calls - 1))

    def _more(self) -> Generator[None, None, bool]:
        """Wait for text beyond what is left; False where none comes."""
        left = len(self._buffer) - self._at
        while len(self._buffer) - self._at <= left:
            if self._final:
                return False
            yield
        return True

    def _until(self, *marks: str, out: Callable[[str], None]) -> Generator[None, None, str | None]:
        """Hand text to `out` up to the first mark, which is taken and returned; None at the end."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._buffer.find(mark, self._at)) >= 0]
            if found:
                at, mark = min(found)
                out(self._take(at))
                self._at += len(mark)
                return mark
            rest = self._buffer[self._at :]
            keep = 0 if self._final else max(tail_of(mark, rest) for mark in marks)
            out(self._take(len(self._buffer) - keep))
            if not (yield from self._more()):
                out(self._take())
                return None

    def _text_until(self, *marks: str) -> Generator[None, None, tuple[str, str | None]]:
        parts: list[str] = []
        mark = yield from self._until(*marks, out=parts.append)
        return "".join(parts), mark

    def _skip(self, characters: str = BLANK) -> Generator[None, None, str]:
        """Pass over characters; the next one, empty at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in characters:
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not (yield from self._more()):
                return ""

    def _value(self, out: Callable[[str], None]) -> Generator[None, None, bool]:
        """Hand one JSON value to `out` as it comes; whether it is whole."""
        depth, in_string, escaped, begun = 0, False, False, self._at
        yield from self._skip()
        begun = self._at
        while True:
            for at in range(begun, len(self._buffer)):
                character = self._buffer[at]
                if in_string:
                    in_string = escaped or character != '"'
                    escaped = not escaped and character == "\\"
                    ended = not in_string and not depth
                elif character in "]}" or (not depth and character in "," + BLANK):
                    if not depth:  # the end of a bare value stands behind it
                        out(self._take(at))
                        return True
                    depth -= 1
                    ended = not depth
                else:
                    depth += character in "[{"
                    in_string, ended = character == '"', False
                if ended:
                    out(self._take(at + 1))
                    return True
            out(self._take())
            if not (yield from self._more()):
                return False
            begun = self._at

    def _object(self, keys: tuple[str, ...], *, known: bool = False) -> Wait:
        """One `{"name": …, "arguments": {…}}`; arguments go out as they come once the name is known.

        Raises NotACall, having told nothing, for what is none; with `known` for a function that is not.
        """
        name: str | None = None
        early: list[str] = []
        if (yield from self._skip()) != "{":
            raise NotACall
        self._at += 1
        while True:
            if (yield from self._skip(BLANK + ",")) != '"':
                break
            parts: list[str] = []
            if not (yield from self._value(parts.append)) or (yield from self._skip()) != ":":
                break
            self._at += 1
            key = _loaded("".join(parts))
            if key in keys:
                if name is None:
                    yield from self._value(early.append)
                else:
                    yield from self._arguments()
                continue
            parts = []
            whole = yield from self._value(parts.append)
            if key == "name" and name is None:
                name = _loaded("".join(parts)) if whole else None
                if not isinstance(name, str) or (known and name not in self._tools.functions):
                    raise NotACall
                self._begin(name)
                self._argue(_as_object("".join(early)))
        if (yield from self._skip()) == "}":
            self._at += 1
        if name is None:
            raise NotACall

    def _arguments(self) -> Wait:
        """Arguments as they come; those that are an object written into a string at once, when whole."""
        if (yield from self._skip()) == "{":
            yield from self._value(self._argue)
        else:
            parts: list[str] = []
            if (yield from self._value(parts.append)):
                self._argue(_as_object("".join(parts)))

    # -- the forms -----------------------------------------------------------------------------------

    def _tagged(self) -> Wait:
        """Calls between tags: JSON of Hermes and Qwen, Qwen's functions, or GLM's keys and values."""
        while (yield from self._until("<tool_call>", out=self._content)) is not None:
            self._pin = self._at
            first = yield from self._skip()
            try:
                if first == "{":
                    yield from self._object(("arguments", "parameters"))
                    yield from self._until("</tool_call>", out=_drop)
                elif first == "<":
                    yield from self._pairs("<parameter=", ">", "", "</parameter>", self._function_name())
                else:
                    yield from self._pairs("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", None)
            except NotACall:
                self._rewind("<tool_call>")
            else:
                yield from self._skip()

    def _function_name(self) -> Generator[None, None, str]:
        text, mark = yield from self._text_until("<function=", "</tool_call>")
        if mark != "<function=" or text:
            raise NotACall
        name, mark = yield from self._text_until(">")
        if mark is None:
            raise NotACall
        return name

    def _pairs(
        self, key: str, key_end: str, value: str, value_end: str, named: Generator[None, None, str] | None
    ) -> Wait:
        """Arguments as keys and values between tags, up to the end of the call; values by the schema."""
        if named is None:
            name, mark = yield from self._text_until(key, "</tool_call>")
        else:
            name = yield from named
            _, mark = yield from self._text_until(key, "</tool_call>")
        name = name.strip()
        if mark is None or not re.fullmatch(r"[\w.-]{1,64}", name):
            raise NotACall
        self._begin(name)
        before = "{"
        while mark == key:
            parameter, _ = yield from self._text_until(key_end)
            if value:
                yield from self._until(value, out=_drop)
            said, mark = yield from self._text_until(value_end)
            if mark is None:
                return  # cut: what came stays without its end
            parameter = parameter.strip()
            said = said.removeprefix("\n").removesuffix("\n")
            self._argue(f"{before}{json.dumps(parameter)}: {self._as_json(name, parameter, said)}")
            before = ", "
            _, mark = yield from self._text_until(key, "</tool_call>")
        if mark is not None:
            self._argue("{}" if before == "{" else "}")

    def _as_json(self, name: str, parameter: str, said: str) -> str:
        """A value as JSON: a string where the schema says so or the text is no JSON."""
        properties = self._tools.functions.get(name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        if isinstance(schema, dict) and schema.get("type") == "string":
            return json.dumps(said, ensure_ascii=False)
        try:
            json.loads(said)
        except (ValueError, RecursionError):
            return json.dumps(said, ensure_ascii=False)
        return said

    def _llama3(self) -> Wait:
        """A reply that is JSON objects of known functions and nothing else, behind a tag or without it."""
        tag = "<|python_tag|>"
        while True:
            self._pin = self._at
            first = yield from self._skip(BLANK + ";" if self.calls else BLANK)
            try:
                if first == "<":
                    while len(self._buffer) - self._at < len(tag) and (yield from self._more()):
                        pass
                    if not self._buffer.startswith(tag, self._at):
                        raise NotACall
                    self._at += len(tag)
                yield from self._object(("parameters", "arguments"), known=True)
            except NotACall:
                if first:
                    self._rewind()
                return

    def _mistral(self) -> Wait:
        """Calls behind a tag: a JSON array, or each a name and its arguments."""
        while (yield from self._until("[TOOL_CALLS]", out=self._content)) is not None:
            self._pin = self._at
            try:
                if (yield from self._skip()) == "[":
                    yield from self._array("arguments")
                    continue
                name, mark = yield from self._text_until("[CALL_ID]", "[ARGS]", "{")
                if mark == "[CALL_ID]":
                    yield from self._until("[ARGS]", out=_drop)
                self._at -= mark == "{"
                if mark is None or not name.strip():
                    raise NotACall
                self._begin(name.strip())
                yield from self._arguments()
                yield from self._skip()
            except NotACall:
                self._rewind("[TOOL_CALLS]")

    def _deepseek(self) -> Wait:
        """Calls between tags, each with its name behind a separator (V3, R1) or before it (V3.1)."""
        begin, end, separator = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
        if (yield from self._until("<｜tool▁calls▁begin｜>", out=self._content)) is None:
            return
        while (yield from self._until(begin, "<｜tool▁calls▁end｜>", out=_drop)) == begin:
            name, mark = yield from self._text_until(separator, end)
            if mark != separator:
                continue
            if (yield from self._skip()) != "{":
                name, mark = yield from self._text_until("{")
                if mark is None:
                    return
                self._at -= 1
            self._begin(name.strip().partition("\n")[0].strip())
            yield from self._value(self._argue)

    def _named(self) -> Wait:
        """The arguments of the function that has to be called."""
        if (yield from self._skip()):
            self._begin(self._tools.named or "")
            yield from self._value(self._argue)
        yield from self._until("\0", out=_drop)

    def _required(self) -> Wait:
        """A JSON array of calls."""
        if (yield from self._skip()) == "[":
            with suppress(NotACall):  # cut
                yield from self._array("parameters")
        yield from self._until("\0", out=_drop)

    def _array(self, key: str) -> Wait:
        self._at += 1
        while (yield from self._skip(BLANK + ",")) == "{":
            self._pin = self._at if self._pin is None else self._pin
            yield from self._object((key, "arguments", "parameters"))
        if self._at < len(self._buffer) and self._buffer[self._at] == "]":
            self._at += 1
        yield from self._skip()


def _drop(text: str) -> None:
    """What stands between calls is nothing."""


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_object(text: str) -> str:
    """Arguments as the text of an object: some models write it into a string."""
    inner = _loaded(text)
    return inner if isinstance(inner, str) and isinstance(_loaded(inner), dict) else text
