"""Tool calls: which a request allows, how a model writes them, and what finds them in a growing reply."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
WHOLE = re.compile(r"[\s,;\[]*(?=\{)")
"""What stands before a call that is one object."""
NO_CALL = re.compile(r'[\s,;\[]*\{\s*[^\s"]')
PAIR = re.compile(
    r"<parameter=(.*?)>(.*?)</parameter>|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)
"""An argument in the form of Qwen's functions or of GLM."""


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
    """Content where `call` is None; else a call's arguments or a part of them, the first with the name."""

    text: str
    call: int | None = None
    name: str | None = None


class CallParser:
    """Finds calls in one reply that comes in pieces of any size; each is handed on when it is whole.

    Where a grammar holds the reply to one function's arguments, these are handed on as they come.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._form = MISTRAL if tools.required else tools.form  # an array of calls, without its mark
        self._head = re.compile(self._form.head)
        marks = [mark for mark in (self._form.opening, self._form.closing) if mark]
        self._stop = re.compile("|".join(map(re.escape, marks)))
        self.calls = 0
        """How many have begun."""
        self._text, self._final = "", False
        self._pieces: list[Piece] = []
        self._state = self._beginning
        self._opening = ""
        """The mark that is content if no call follows it."""
        self._called = False
        """Whether a call has followed the last mark."""

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """What more text brings; what may be the beginning of a mark is held back unless it is `final`."""
        self._text, self._final = self._text + text, final
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _content(self, text: str) -> None:
        if text and not self._tools.required:
            self._pieces.append(Piece(text))

    # -- states: each takes text and says whether to go on -------------------------------------------

    def _beginning(self) -> bool:
        """Where a call may stand without a mark: held by a grammar, or an object of Llama."""
        self._text = self._text if self._tools.named is None else self._text.lstrip()
        if not self._text.strip():
            return False
        if self._tools.named is not None:
            self._state = self._arguments
        elif self._tools.required or (self._form is LLAMA and self._text.lstrip()[0] == "{"):
            self._state = self._inside
        else:
            self._state = self._outside
        return True

    def _arguments(self) -> bool:
        """Nothing but arguments comes."""
        if self._text:
            self._pieces.append(Piece(self._text, 0, None if self.calls else self._tools.named))
        self.calls, self._text = 1, ""
        return False

    def _outside(self) -> bool:
        """Content up to an opening mark, without blanks behind a call."""
        if self._called:
            self._text = self._text.lstrip()
            self._called = not self._text
        content, mark, rest = self._text.partition(self._form.opening)
        held = 0 if mark or self._final else tail_of(self._form.opening, content)
        self._content(content[: len(content) - held])
        self._text = rest if mark else content[len(content) - held :]
        if mark:
            self._opening, self._called, self._state = mark, False, self._inside
        return bool(mark)

    def _inside(self) -> bool:
        """The next call, or what shows that none comes."""
        stop = self._stop.search(self._text)
        part = self._text[: stop.end()] if stop else self._text
        found = self._whole(part)
        if found and found[0]:
            name, arguments, end = found
            self._pieces.append(Piece(arguments, self.calls, name))
            self.calls, self._called, self._text = self.calls + 1, True, self._text[end:]
            return True
        if not (stop or self._final or found or (not self._called and NO_CALL.match(part))):
            return False
        if not self._called:
            self._content(self._opening)
        elif stop is None:
            self._text = "" if self._form.closing else self._text.lstrip(" \t\r\n,;]}")
        else:
            self._text = self._text[stop.start() if stop[0] == self._form.opening else stop.end() :]
        self._state = self._outside
        return True

    def _whole(self, part: str) -> tuple[str, str, int] | None:
        """A complete call's name, arguments and end; without a name for a complete object that is none."""
        head = self._head.search(part) if self._called else self._head.match(part)
        if head is not None and self._form is TAGGED:
            name, end = head[head.lastindex or 0], part.find(self._form.closing, head.end())
            return None if end < 0 else (name, self._joined(name, part[head.end() : end]), end)
        begun = head or WHOLE.match(part)
        try:
            value, end = json.JSONDecoder().raw_decode(part, begun.end()) if begun else (None, 0)
        except (ValueError, RecursionError):
            return None
        if head is not None:
            return head[1], part[head.end() : end], end
        if not isinstance(value, dict):
            return None
        name = value.get("name")
        if not isinstance(name, str) or (self._form is LLAMA and name not in self._tools.functions):
            return "", "", 0
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):  # some models write the object into a string
            arguments = json.dumps(arguments, ensure_ascii=False)
        return name, arguments, end

    def _joined(self, name: str, text: str) -> str:
        """Keys and values between tags, as an object."""
        pairs = [found.groups()[(found.lastindex or 0) - 2 :][:2] for found in PAIR.finditer(text)]
        shown = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in pairs}
        written = (
            f"{json.dumps(key, ensure_ascii=False)}: {self._as_json(name, key, shown[key])}" for key in shown
        )
        return f"{{{', '.join(written)}}}"

    def _as_json(self, name: str, key: str, text: str) -> str:
        """An argument as JSON: a string where the schema says so or the text is no JSON."""
        properties = self._tools.functions.get(name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            with suppress(ValueError, RecursionError):
                json.loads(text)
                return text
        return json.dumps(text, ensure_ascii=False)
