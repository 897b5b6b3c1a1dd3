"""Tool calls: which a request allows, how a model writes them, and what finds them in a growing reply."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from spd.cli.text.structured import tail_of

if TYPE_CHECKING:
    from spd.runtime.engine.request import GrammarText

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", CALLS, CALLS_END, CALL, CALL_END, SEPARATOR),
)
"""Marks that may be special tokens, which have no text of their own."""
NAME = r"([\w.-]+)"
OBJECT = rf'[\s,;\[]*\{{\s*"name"\s*:\s*"{NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
"""A call as an object whose arguments come last, up to them."""
WHOLE = re.compile(r"[\s,;\[]*(?=\{)")
NO_CALL = re.compile(r'[\s,;\[]*\{\s*[^\s"]')
TEXT = r"((?:(?!</tool_call>).)*?)"
PAIR = re.compile(
    rf"<parameter={TEXT}>{TEXT}</parameter>"
    rf"|<arg_key>{TEXT}</arg_key>\s*<arg_value>{TEXT}</arg_value>|</tool_call>",
    re.DOTALL,
)
"""An argument in the form of Qwen's functions or of GLM, or the end of all."""


class Form(NamedTuple):
    """How a model writes calls: behind `opening`, as objects or as names in front of arguments."""

    signs: tuple[str, ...]
    """What a chat template of such a model holds."""
    opening: str
    closing: str = ""
    head: str = r"(?!)"
    """A call that is no object, up to its arguments."""


TAGGED, LLAMA, MISTRAL, DEEPSEEK = FORMS = (
    Form(
        ("<tool_call>",),  # JSON of Hermes and Qwen, Qwen's functions, GLM's keys and values
        "<tool_call>",
        "</tool_call>",
        rf"\s*<function={NAME}>|\A\s*{NAME}\s*(?=<arg_key>|</tool_call>)",
    ),
    Form(("<|python_tag|>", "<|start_header_id|>"), "<|python_tag|>"),
    Form(("[TOOL_CALLS]",), "[TOOL_CALLS]", "", rf"\A\s*{NAME}(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{{)"),
    Form(
        (CALLS,),
        CALLS,
        CALLS_END,
        rf"\s*{CALL}(?:\w*{SEPARATOR})?\s*{NAME}\s*(?:{SEPARATOR})?\s*(?:```json)?\s*(?=\{{)",
    ),
)


def call_form(template: str) -> Form:
    """How a model writes calls, by its chat template; tagged where nothing is told."""
    return next((form for form in FORMS if any(sign in template for sign in form.signs)), TAGGED)


@dataclass(frozen=True)
class Tools:
    """The functions that a reply may call, or has to: one that is `named`, or any that are `required`."""

    functions: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the arguments, by name."""
    form: Form = TAGGED
    named: str | None = None
    required: bool = False
    parallel: bool = True

    @property
    def grammar(self) -> GrammarText | None:
        """What holds a call that has to come: its arguments alone, or a JSON array of calls."""
        from spd.runtime.engine.request import GrammarText

        if self.named is not None:
            return GrammarText("schema", json.dumps(self.functions[self.named]))
        if not self.required:
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name in self.functions
        ]
        schema = {
            "type": "array",
            "minItems": 1,
            "maxItems": 8 if self.parallel else 1,
            "items": {"anyOf": calls},
            "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in self.functions.items()},
        }
        return GrammarText("schema", json.dumps(schema))


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` in another one: its own references lead there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(one, place) for name, one in schema.items() if name not in ("$id", "$schema")}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


class Piece(NamedTuple):
    """Content where `call` is None; else a part of a call's arguments, its first one with the name."""

    text: str
    call: int | None = None
    name: str | None = None


class CallParser:
    """Finds calls in one reply that comes in pieces of any size.

    Each state takes what it can of the text, and says whether another state may go on with the rest.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._form = MISTRAL if tools.required else tools.form  # an array of calls, without its mark
        self._head = re.compile(f"{OBJECT}|{self._form.head}")
        marks = [mark for mark in (self._form.opening, self._form.closing) if mark]
        self._stop = re.compile("|".join(map(re.escape, marks)))
        self.calls = 0
        """How many have begun."""
        self._name, self._text, self._final = "", "", False
        self._pieces: list[Piece] = []
        self._opening: str | None = None
        """The mark that is content if no call follows it; None once one has."""
        self._behind_call = False
        self._depth, self._quoted, self._escaped = 0, False, False
        self._before = "{"
        """What stands before the next pair of arguments."""
        self._state = self._beginning

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """What more text brings; what may be the beginning of a mark is held back unless it is `final`."""
        self._text, self._final = self._text + text, final
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _content(self, text: str) -> None:
        if text and not (self._tools.required or self._tools.named):
            self._pieces.append(Piece(text))

    def _begin(self, name: str) -> None:
        self._pieces.append(Piece("", self.calls, name))
        self.calls, self._name, self._opening, self._before = self.calls + 1, name, None, "{"

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(text, self.calls - 1))

    # -- states: each takes text and says whether to go on -------------------------------------------

    def _beginning(self) -> bool:
        """Where a call may stand without a mark: held by a grammar, or an object of Llama."""
        if not self._text.strip():
            return False
        self._opening = ""
        if self._tools.named is not None:
            self._begin(self._tools.named)
            self._text, self._state = self._text.lstrip(), self._value
        elif self._tools.required or (self._form is LLAMA and self._text.lstrip()[0] == "{"):
            self._state = self._inside
        else:
            self._state = self._outside
        return True

    def _outside(self) -> bool:
        """Content up to an opening mark, without blanks behind a call."""
        if self._behind_call:
            self._text = self._text.lstrip()
            self._behind_call = not self._text
        content, mark, rest = self._text.partition(self._form.opening)
        held = 0 if mark or self._final else tail_of(self._form.opening, content)
        self._content(content[: len(content) - held])
        self._text = rest if mark else content[len(content) - held :]
        if mark:
            self._opening, self._state = mark, self._inside
        return bool(mark)

    def _inside(self) -> bool:
        """The beginning of a call, or what shows that none comes."""
        stop = self._stop.search(self._text)
        part = self._text[: stop.end()] if stop else self._text
        called = self._opening is None
        found = self._head.search(part) if called else self._head.match(part)
        if found and found.lastindex and self._may_be(found[found.lastindex]):
            pairs = self._form is TAGGED and found.lastindex > 1
            self._begin(found[found.lastindex])
            self._text, self._state = self._text[found.end() :], self._pairs if pairs else self._value
            return True
        if (end := self._whole_call(part)) is not None:
            self._text = self._text[end:]
            return True
        if not (stop or self._final or found or (not called and NO_CALL.match(part))):
            return False
        if not called:
            self._content(self._opening or "")
        elif stop is None:
            self._text = "" if self._form.closing else self._text.lstrip(" \t\r\n,;]}")
        else:
            self._text = self._text[stop.start() if stop[0] == self._form.opening else stop.end() :]
        self._behind_call, self._state = called, self._outside
        return True

    def _may_be(self, name: str) -> bool:
        """Whether a call can have this name: without marks, a known one only."""
        return self._form is not LLAMA or name in self._tools.functions

    def _whole_call(self, part: str) -> int | None:
        """Tell a call whose object is complete, in whatever order its fields are; where it ends, if it is."""
        begun = WHOLE.match(part)
        try:
            value, end = json.JSONDecoder().raw_decode(part, begun.end()) if begun else (None, 0)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return None
        if not self._may_be(name):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        self._begin(name)  # some models write the object of arguments into a string
        self._argue(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        return end

    def _value(self) -> bool:
        """One JSON value, handed on as it comes."""
        for at, character in enumerate(self._text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            else:
                self._quoted = character == '"'
                self._depth += (character in "[{") - (character in "]}")
            if not self._quoted and self._depth <= 0:
                self._argue(self._text[: at + 1])
                self._text, self._depth, self._state = self._text[at + 1 :], 0, self._inside
                return True
        self._argue(self._text)
        self._text = ""
        return False

    def _pairs(self) -> bool:
        """Keys and values between tags, as an object."""
        found = PAIR.search(self._text)
        if found is None:
            return False
        self._text = self._text[found.end() :]
        if not found.lastindex:
            self._argue("{}" if self._before == "{" else "}")
            self._behind_call, self._state = True, self._outside
            return True
        key, text = found[found.lastindex - 1].strip(), found[found.lastindex]
        value = self._as_json(key, text.removeprefix("\n").removesuffix("\n"))
        self._argue(f"{self._before}{json.dumps(key, ensure_ascii=False)}: {value}")
        self._before = ", "
        return True

    def _as_json(self, key: str, text: str) -> str:
        """An argument as JSON: a string where the schema says so or the text is no JSON."""
        properties = self._tools.functions.get(self._name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if isinstance(schema, dict) and schema.get("type") == "string":
            return json.dumps(text, ensure_ascii=False)
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        return text
