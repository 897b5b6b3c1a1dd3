"""Tool calls: which a request allows, what holds them to a schema, and what finds them in a growing reply."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from spd.cli.serve import forms
from spd.cli.serve.forms import HARMONY, HERMES, LISTED, MARKS, Form, Schemas, as_json, is_text
from spd.cli.text.structured import tail_of

if TYPE_CHECKING:
    from spd.runtime.engine.request import GrammarText

NO_CALL = re.compile(forms.BLANK + r'\{\s*[^\s"]')
_MARK = re.compile("|".join(map(re.escape, MARKS)))
MAX_CALLS = 8
"""Calls in one reply that a grammar allows."""


@dataclass(frozen=True)
class Tools:
    """The functions that a reply may call, or has to: one that is `named`, or any that are `required`.

    `strict` holds arguments to their schemas where a call may come, too. `special` are the ids of special
    tokens by name.
    """

    functions: Schemas
    form: Form = HERMES
    named: str | None = None
    required: bool = False
    parallel: bool = True
    strict: bool = False
    special: Mapping[str, int] = field(default_factory=dict)

    @property
    def written(self) -> Form:
        """The form in which calls come."""
        return LISTED if self.has_to and self.form.call is None else self.form

    @property
    def has_to(self) -> bool:
        """Whether a call has to come."""
        return self.required or self.named is not None

    @property
    def grammar(self) -> GrammarText | None:
        """What holds a call that has to come, or one that may come and is strict, in the model's own form."""
        from spd.runtime.engine.request import GrammarText

        form = self.written
        if form.call is None or not (self.has_to or (self.strict and form.opening)):
            return None
        chosen = self.functions if self.named is None else {self.named: self.functions[self.named]}
        rules = ["GAP: /\\n{0,2}/", "TEXT: /(.|\\n)*/"]
        for number, (name, schema) in enumerate(chosen.items()):
            head, end = self._literal(form.call[0] + name + form.call[1]), self._literal(form.call[2])
            rules.append(f"call_{number}: {head} {self._arguments(schema, rules)} {end}")
        opening, closing = self._literal(form.opening), self._literal(form.closing)
        one = f"({' | '.join(f'call_{number}' for number in range(len(chosen)))})"
        if form.between is None:
            one, next_one = f"{one} {closing}", f"GAP {opening} {one} {closing}"
            closing = ""
        else:
            next_one = f"{self._literal(form.between)} {one}"
        several = self.parallel and self.named is None and form is not HARMONY
        calls = f"{one} ({next_one}){{0,{MAX_CALLS - 1}}}" if several else one
        calls += f" GAP {closing}" * bool(closing)
        if self.has_to:
            start = f"GAP {self._thought if form is HARMONY else opening} {calls}"
        elif form.opening in self.special:
            start = f"TEXT | TEXT {opening} {calls}"
        else:
            start = f"TEXT | before {calls}"
            rules.append(f"before[lazy]: /(.|\\n)*{re.escape(form.opening)}/")
        return GrammarText("lark", "\n".join([f"start: {start}", *rules]))

    def answer(self, shape: GrammarText) -> GrammarText:
        """What holds the answer of gpt-oss to a schema: in its own channel, behind its thinking."""
        final = f'{self._literal(forms.CHANNEL)} "final" {self._literal(forms.MESSAGE)}'
        start = f"start: {self._thought} {final} %json {as_json(_held(json.loads(shape.text)))}"
        return dataclasses.replace(shape, kind="lark", text=f"{start}\nTEXT: /(.|\\n)*/")

    @property
    def _thought(self) -> str:
        """Thinking before a call, for gpt-oss."""
        marks = (forms.CHANNEL, forms.MESSAGE, forms.END, forms.START)
        channel, message, end, begin = map(self._literal, marks)
        return f'({channel} "analysis" {message} TEXT {end} {begin} "assistant")?'

    def _literal(self, text: str) -> str:
        """Text for a grammar, with its marks as tokens where they are special ones."""
        marks = "|".join(re.escape(mark) for mark in MARKS if mark in self.special) or "(?!)"
        parts = enumerate(re.split(f"({marks})", text))
        return " ".join(
            f"<[{self.special[part]}]>" if at % 2 else as_json(part) for at, part in parts if part
        )

    def _arguments(self, schema: Mapping[str, Any], rules: list[str]) -> str:
        """What arguments look like; a text between tags needs a rule of its own."""
        if self.written.pair is None:
            return f"%json {as_json(_held(schema))}"
        before, behind, close = self.written.pair
        shown, required = [], schema.get("required")
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for name, one in forms.properties_of(schema).items():
            end, most = self._literal(close), one.get("maxLength") if isinstance(one, dict) else None
            if is_text(one) and isinstance(values := one.get("enum"), list):
                value = f"({' | '.join(as_json(str(each)) for each in values)})"
            elif is_text(one):
                text = f"/(.|\\n){{0,{most}}}/" if isinstance(most, int) and most < 10_000 else "/(.|\\n)*/"
                value, attribute = f"text_{len(rules)}", "" if end[0] == "<" else f"[suffix={end}]"
                rules.append(f"{value}{attribute}: {text}")
                end = end if end[0] == "<" else ""
            else:
                value = f"%json {as_json(_held({**shared, **one} if isinstance(one, dict) else one))}"
            part = f"{self._literal(before + name + behind)} {value} {end}"
            shown.append(part if isinstance(required, list) and name in required else f"({part})?")
        return " ".join(shown)


def _held(schema: Any) -> Any:
    """A schema with little room for blanks."""
    from spd.runtime.engine.request import JSON_STYLE

    return {"x-guidance": JSON_STYLE, **schema} if isinstance(schema, dict) else schema


# -- what finds calls --------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Thinking, text, or a call's arguments; a call begins with its name, and the model's own id."""

    kind: Literal["thinking", "text", "call"]
    text: str
    name: str | None = None
    id: str = ""


class CallParser:
    """Finds calls in one reply that comes in pieces of any size; each is handed on when it is whole.

    What is no whole call in the end is text. Blanks between text and a call are dropped.
    """

    thinking = False

    def __init__(self, tools: Tools) -> None:
        self._functions, self._form = tools.functions, tools.written
        marks = "|".join(re.escape(mark) for mark in (self._form.opening, self._form.closing) if mark)
        self._stop = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\Z)|({marks})', re.DOTALL)
        """A mark, or a string of JSON, in which none counts."""
        self._bare, self._known_only = re.compile(self._form.bare), self._form is not LISTED
        self._text, self._blanks, self._final = "", "", False
        self._pieces: list[Piece] = []
        self._is_inside: bool | None = None
        """Whether a call may come next; None at the very beginning."""
        self._opening: str | None = None
        """The mark that is text if no call follows it; None where a reply began with a call."""
        self._called = self._called_ever = False
        """Whether a call has followed the mark, and any mark."""

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """What more text brings; what may be the beginning of a mark is held back unless it is `final`."""
        self._text, self._final = self._text + text, final
        if self._is_inside is None and (self._text.strip() or final):
            self._is_inside = self._bare.match(self._text) is not None
        if final or not self._is_inside or any(end in text for end in "}>])"):  # no call ends else
            while self._is_inside is not None and (self._inside() if self._is_inside else self._outside()):
                pass
        if final and not self._called_ever:
            self._pieces.append(Piece("text", self._blanks))
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        """Text; blanks at its end are held until more of it comes."""
        said = (self._blanks + text).rstrip()
        self._blanks = (self._blanks + text)[len(said) :]
        if said:
            self._pieces.append(Piece("text", said))

    def _outside(self) -> bool:
        """Take text up to an opening mark; says whether to go on."""
        content, mark, rest = self._text.partition(self._form.opening)
        held = 0 if mark or self._final else tail_of(self._form.opening, content)
        self._say(content[: len(content) - held])
        self._text = rest if mark else content[len(content) - held :]
        if mark:
            self._opening, self._called, self._is_inside = mark, False, True
        return bool(mark)

    def _inside(self) -> bool:
        """Take the next call, or what shows that none comes; says whether to go on."""
        found = self._form.read(self._text, self._functions)
        calls, end = found if isinstance(found, tuple) else ((), 0)
        if self._known_only and self._opening is None and {name for name, *_ in calls} - {*self._functions}:
            calls = ()  # without a mark, an object with a name is a call only if there is such a function
        ends = self._form.ends_reply and self._opening is None and not self._final
        if calls and ends and not self._text[end:].strip():
            return False
        if calls:
            self._pieces += [Piece("call", arguments, name, *ids) for name, arguments, *ids in calls]
            self._text, self._blanks = self._text[end:], ""
            self._called = self._called_ever = True
            return True
        stop = next((one for one in self._stop.finditer(self._text) if one[1]), None)
        never = not self._called and (isinstance(found, tuple) or NO_CALL.match(self._text))
        if not (self._final or never or (stop and found is not True)):
            return False
        if not self._called:
            self._say(self._opening or "")
        else:
            rest = self._text[: stop.start()] if stop else self._text
            self._text = self._text[stop.end() if stop and stop[1] == self._form.closing else len(rest) :]
            rest = _MARK.sub("", rest)[: None if stop else -tail_of(self._form.closing, rest) or None]
            self._say(rest if rest.strip(" \t\r\n,;]}`") else "")
        self._is_inside = False
        return True


class ChannelParser:
    """Parts a reply of gpt-oss: messages in channels are thinking, text, or calls to functions."""

    def __init__(self) -> None:
        self._text, self._kind, self._head, self._name, self._first = "", "", "", "", True
        self._ends = re.compile("|".join(map(re.escape, forms.ENDS)))

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thinking."""
        return self._kind == "thinking"

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """As `CallParser.feed`."""
        self._text += text
        pieces: list[Piece] = []
        while self._text and (self._body(pieces, final) if self._kind else self._header(final)):
            pass
        return pieces

    def _header(self, final: bool) -> bool:
        """Up to a message; a reply that has none is text."""
        head, mark, rest = self._text.partition(forms.MESSAGE)
        if self._first and not re.match(r"\s*(?:\Z|<|t\Z|to\Z|to=)", head):
            self._kind = "text"
        elif mark:
            named = re.search(rf"to=functions\.{forms.NAME}", head)
            self._head, self._name, self._text = head + mark, named[1] if named else "", rest
            is_thinking = re.search(rf"{re.escape(forms.CHANNEL)}\s*analysis", head)
            self._kind = "call" if named else "thinking" if is_thinking else "text"
        elif final:
            self._kind = "text"
        return bool(self._kind)

    def _body(self, pieces: list[Piece], final: bool) -> bool:
        """Up to a message's end; a call is handed on when it is whole."""
        end = self._ends.search(self._text)
        said = self._text[: end.start()] if end else self._text
        if end is None and not final:
            held = len(said) if self._kind == "call" else max(tail_of(mark, said) for mark in forms.ENDS)
            said = said[: len(said) - held]
        self._text = self._text[len(said) if end is None else end.end() :]
        if self._kind != "call":
            pieces.append(Piece("thinking" if self.thinking else "text", said))
        elif end or final:
            with suppress(ValueError, RecursionError):
                if isinstance(json.loads(said), dict):
                    pieces.append(Piece("call", said.strip(), self._name))
                    said = ""
            if said:
                pieces.append(Piece("text", self._head + said))
        if end is not None:
            self._kind, self._first = "", False
        return end is not None
