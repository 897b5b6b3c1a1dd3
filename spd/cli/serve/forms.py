"""How models write tool calls: a row of `FORMS` a form, with its marks, its reader, and its text.

The grammar that holds a call to its function's schema is made of the text (`Tools`); calls in a growing reply
are found by the reader (`CallParser`).
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from spd.runtime.engine.request import tail_of

if TYPE_CHECKING:
    from spd.runtime.engine.request import GrammarText

Texts = tuple[str, str, str]
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of functions' arguments, by name."""
Found = tuple[Sequence[tuple[str, ...]], int]
"""Names and arguments, and ids that the model gave, of calls that begin a text, and where they end; no calls
for what cannot become one."""
Reader = Callable[[str, Schemas], Found | bool]
"""What begins a text: calls, True for a call that goes on, False for what more text may make one."""

NAME, BLANK = r"([\w.-]+)", r"[\s,;\[]*"
QUOTE = '<|"|>'
CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = START, END, *_ = "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>"
"""What ends a message of gpt-oss or Muse-Glimmer."""


# -- readers -----------------------------------------------------------------------------------------


def _objects(head: str = "(?!)") -> Reader:
    """Calls that are objects with a name and arguments, or arguments behind a name, and an id, in `head`."""
    heads, blank = re.compile(head), re.compile(BLANK)

    def read(text: str, schemas: Schemas) -> Found | bool:
        named = heads.match(text)
        begun = named or blank.match(text)
        try:
            value, end = json.JSONDecoder().raw_decode(text, begun.end() if begun else 0)
        except (ValueError, RecursionError):
            return False
        name, arguments, ids = None, value, list[str]()
        if named is not None:
            name, *ids = named.groups()
        elif isinstance(value, dict):
            name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
            name = value.get("tool_name", name)
        if isinstance(arguments, str):  # some models write the object into a string
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return (), 0
        return [(name, text[named.end() : end] if named else as_json(arguments), *ids)], end

    return read


def _tagged(head: str, key: str, close: str, end: str) -> Reader:
    """Calls of keys and values between tags: a value is closed where a `key` or the `end` follows."""
    heads, keys, ends = (re.compile(rf"\s*{one}", re.DOTALL) for one in (head, key, end))
    closes = re.compile(rf"{close}(?=\s*(?:{key}|{end}))", re.DOTALL)

    def read(text: str, schemas: Schemas) -> Found | bool:
        if (begun := heads.match(text)) is None:
            return False
        shown, place = dict[str, str](), begun.end()
        while (ended := ends.match(text, place)) is None:
            named = keys.match(text, place)
            closed = closes.search(text, named.end()) if named else None
            if named is None or closed is None:
                return (
                    named is not None
                    or not text[place:].lstrip().strip("<")
                    or "<" in text[place : place + 9]
                )
            value = text[named.end() : closed.start()].removeprefix("\n").removesuffix("\n")
            shown[named[1].strip()], place = value, closed.end()
        schema = properties_of(schemas.get(begun[1], {}))
        written = (f"{as_json(name)}: {_value(schema.get(name), value)}" for name, value in shown.items())
        return [(begun[1], f"{{{', '.join(written)}}}")], ended.end()

    return read


def _value(schema: Any, text: str) -> str:
    """A value between tags as JSON: a string where the schema says so or the text is no JSON."""
    if not is_text(schema):
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return text
    return as_json(text)


def _python(text: str, schemas: Schemas) -> Found | bool:
    """Calls of Python, one or a list of them."""
    if re.match(rf"{BLANK}{NAME}\(", text) is None:
        return True if re.fullmatch(rf"{BLANK}{NAME}?\s*", text) else ((), 0)
    for end in (found.end() for found in re.finditer(r"[\])](?=\s*(?:\Z|<))", text)):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return [one for said in ast.parse(text[:end].strip(" ,;\n")).body for one in _called(said)], end
    return True


def _called(said: ast.stmt) -> list[tuple[str, str]]:
    """The calls of a statement. Raises ValueError for another."""
    value = said.value if isinstance(said, ast.Expr) else None
    found = []
    for call in value.elts if isinstance(value, ast.List) else [value]:
        if not isinstance(call, ast.Call) or call.args or None in [one.arg for one in call.keywords]:
            raise ValueError("not a call with names")
        values = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        try:
            found.append((ast.unparse(call.func), as_json(values)))
        except TypeError as error:
            raise ValueError("no JSON") from error
    return found


def _gemma(text: str, schemas: Schemas) -> Found | bool:
    """Calls of Gemma 4: keys are bare, and strings stand between marks."""
    if (begun := re.match(rf"\s*call:\s*{NAME}\s*(?=\{{)", text)) is None:
        return False
    strings = re.compile(rf"{re.escape(QUOTE)}.*?{re.escape(QUOTE)}|<tool_call\|>", re.DOTALL)
    end = next((one.start() for one in strings.finditer(text) if one[0] == "<tool_call|>"), None)
    if end is None:
        return True
    parts = text[begun.end() : end].split(QUOTE)
    parts[::2] = [re.sub(r"([{,]\s*)([\w$.-]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = map(as_json, parts[1::2])
    with suppress(ValueError, RecursionError):
        return [(begun[1], as_json(json.loads("".join(parts))))], end
    return (), 0


def _llama(text: str, schemas: Schemas) -> Found | bool:
    """Objects or calls of Python."""
    is_python = re.match(r"\s*\[\s*(?:[A-Za-z_]|\Z)", text)
    return _python(text, schemas) if is_python else _objects()(text, schemas)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


# -- the table ---------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How a model writes calls: behind `opening`, and before `closing` where it is not empty."""

    signs: tuple[str, ...]
    """What the chat template of such a model holds."""
    opening: str
    closing: str
    read: Reader
    call: Texts | None = None
    """What stands before a name, behind it, and behind the arguments; without it there is no grammar."""
    pair: Texts | None = None
    """What stands before a key, behind it, and behind its value, where arguments are no JSON."""
    between: str | None = None
    """What stands between calls that share their marks; None where each has its own."""
    is_array: bool = False
    """Whether those stand in an array."""
    bare: str = "(?!)"
    """How a reply begins that is a call without a mark."""
    ends_reply: bool = False
    """Whether calls without a mark are calls only where nothing comes behind them."""
    header: str = ""
    """What names the function in the header of a message, where replies are messages."""


def _marked(mark: str, end: str, call: Texts, read: Reader | None = None, is_array: bool = True) -> Form:
    """Calls that are objects behind a mark, by which a template is told; most stand in an array."""
    return Form((mark,), mark, end, read or _objects(), call, None, ", ", is_array)


_functions = _tagged(
    rf"<function={NAME}>",
    r"<parameter=([^>\n]+)>",
    "</parameter>",
    r"(?:</function>|(?=</(?:seed:)?tool_call>))",
)
_keys = _tagged(
    rf"{NAME}\s*(?=<arg_key>|</tool_call>)",
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>",
    "</arg_value>",
    r"(?=</tool_call>)",
)


def _tool_call(text: str, schemas: Schemas) -> Found | bool:
    """Calls between one pair of tags, whatever they are made of."""
    each = (read(text, schemas) for read in (_functions, _keys, _objects()))
    return next((found for found in each if found is not False), False)


_invoke = _tagged(
    rf'(?:.*?<atem:|<)invoke name="{NAME}">',
    r'<(?:atem:)?parameter name="([^"\n]+)">',
    "</(?:atem:)?parameter>",
    r"</(?:atem:)?invoke>\s*(?:</atem:function_calls>)?",
)
_deepseek = _objects(
    rf"\s*(?:```)?\s*(?:{CALL_END})?\s*{CALL}(?:\w*{SEPARATOR})?\s*{NAME}\s*(?:{SEPARATOR})?\s*(?:```json)?\s*(?=\{{)"
)
_kimi = _objects(
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*(?=(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<)"
    r"([\w.:-]+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_named = _objects(rf"\s*{NAME}(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{{)")

TAGS, INVOKES = ("<tool_call>", "</tool_call>"), ("<minimax:tool_call>", "</minimax:tool_call>")
PARAMETERS = ("\n<function=", ">\n", "</function>\n"), ("<parameter=", ">\n", "\n</parameter>\n")
KEYS = ("", "\n", ""), ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = ("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>")
FENCED = (f"{CALL}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}")
INVOKE = ('\n<invoke name="', '">\n', "</invoke>"), ('<parameter name="', '">', "</parameter>\n")
FINAL = f"{CHANNEL}final{MESSAGE}"
COMMENTARY = (f"{CHANNEL}commentary to=functions.", f" <|constrain|>json{MESSAGE}", "")

HERMES = Form(TAGS[:1], *TAGS, _tool_call, ('\n{"name": "', '", "arguments": ', "}\n"))
HARMONY = Form((CHANNEL, "functions"), "", "", _named, COMMENTARY, header=rf"to=functions\.{NAME}")
GEMMA = Form(("<|tool_call>",), "<|tool_call>", "<tool_call|>", _gemma)
OBJECT_CALL = ('{"name": "', '", "arguments": ', "}")
ACTION_CALL = ('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}")
LISTED = Form((), "[", "]", _objects(), OBJECT_CALL, between=", ", bare=r"\s*\[")
"""An array of objects, for calls that have to come in a form without a grammar."""
FORMS = {
    "gpt-oss": HARMONY,
    "Muse-Glimmer": Form(("<atem:",), "", "", _invoke, header=rf"to=(?!self\b|user\b){NAME}"),
    "Gemma 4": GEMMA,
    "Kimi K2": Form(("<|im_middle|>",), *KIMI, _kimi, KIMI_CALL, between=""),
    "DeepSeek V3": Form((CALLS[0], "```json"), *CALLS, _deepseek, FENCED, between="\n"),
    "DeepSeek V3.1": Form(CALLS[:1], *CALLS, _deepseek, (CALL, SEPARATOR, CALL_END), between=""),
    "MiniMax M2": Form(INVOKES[:1], *INVOKES, _invoke, *INVOKE, between=""),
    "Seed-OSS": Form(("<seed:tool_call>",), "<seed:tool_call>", "</seed:tool_call>", _functions, *PARAMETERS),
    "Qwen3-Coder, Qwen3.5": Form((*TAGS[:1], "<function="), *TAGS, _tool_call, *PARAMETERS),
    "GLM-4.5, GLM-4.7": Form((*TAGS[:1], "<arg_key>"), *TAGS, _tool_call, *KEYS),
    "Hermes, Qwen3": HERMES,
    "LFM2": Form(("List of tools: ",), "<|tool_call_start|>", "<|tool_call_end|>", _python),
    "GigaChat 3.1": _marked("<|function_call|>", "", OBJECT_CALL, is_array=False),
    "Granite 3": _marked("<|tool_call|>", "", OBJECT_CALL),
    "Nemotron Nano 2": _marked("<TOOLCALL>", "</TOOLCALL>", OBJECT_CALL),
    "Command R7B, A": _marked("<|START_ACTION|>", "<|END_ACTION|>", ACTION_CALL),
    "Mistral": Form(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "", _named, ("", "[ARGS]", "")),
    "Mistral before 2025": _marked("[TOOL_CALLS]", "", OBJECT_CALL, _named),
    "Llama 3": Form(
        ("<|start_header_id|>",), "<|python_tag|>", "", _llama, bare=r"\s*[{\[]", ends_reply=True
    ),
}
"""By the models that are known for it; a template's is the first of which it holds every sign."""
WRITTEN = str([(form.opening, form.closing, form.call, form.pair) for form in FORMS.values()])
MARKS = {QUOTE, "<|channel>", "<channel|>", *ENDS, "[CALL_ID]"}
MARKS |= set(re.findall(r"<[^<>\\]+>|\[[A-Z_]+\]", WRITTEN))
"""What may be special tokens, which have no text of their own."""


def call_form(template: str) -> Form:
    """How a model writes calls, by its chat template; as Hermes where nothing is told."""
    return next((form for form in FORMS.values() if all(sign in template for sign in form.signs)), HERMES)


NO_CALL = re.compile(BLANK + r'\{\s*[^\s"]')
_MARK = re.compile("|".join(map(re.escape, MARKS)))
NOTE = "what follows {} is no whole call in this model's form, so it is text"
"""What is said of a malformed call."""
MAX_CALLS = 8
"""Calls in one reply that a grammar allows."""


@dataclass(frozen=True)
class Tools:
    """The functions that a reply may call, or has to where it is `required`: any, or one that is `named`.

    Calls that have to come are held to their schemas by a grammar, and others once the form's opening mark
    has come, where that is a token; `strict` holds them where it is none, too. `tokens` are the ids of marks
    that are tokens.
    """

    functions: Schemas
    form: Form = HERMES
    named: str | None = None
    required: bool = False
    parallel: bool = True
    strict: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def written(self) -> Form:
        """The form in which calls come."""
        return LISTED if self.required and self.form.call is None else self.form

    @property
    def held(self) -> bool:
        """Whether a grammar holds every call, however its mark is spelt."""
        form = self.written
        return form.call is not None and (self.required or self.strict)

    @property
    def grammar(self) -> GrammarText | None:
        """What holds a call, in the model's own form."""
        from spd.runtime.engine.request import GrammarText

        form = self.written
        mark = None if self.required else self.tokens.get(form.opening)
        if form.call is None or not (self.held or mark is not None):
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
        calls = f"{one} ({next_one}){f'{{0,{MAX_CALLS - 1}}}' if self.required else '*'}" if several else one
        calls = f'"[" {calls} "]"' if form.is_array else calls
        calls += f" GAP {closing}" * bool(closing)
        if form is HARMONY:
            calls = calls if self.required else f"({calls} | {self._literal(FINAL)} TEXT)"
            start = f"{self._thought} {calls}"
        elif self.required:
            start = f"GAP {opening} {calls}"
        else:
            before = f"TEXT {opening}" if form.opening in self.tokens else "before"
            rules.append(f"before[lazy]: /(.|\\n)*{re.escape(form.opening)}/")
            start = f"TEXT | {before} {calls}" if mark is None else calls
            start += f" ({before} {calls})* TEXT" * (mark is not None and several)
        return GrammarText("lark", "\n".join([f"start: {start}", *rules]), mark, mark is not None)

    def answer(self, shape: GrammarText) -> GrammarText:
        """What holds the answer of gpt-oss to a schema: in its own channel, behind its thinking."""
        final = self._literal(FINAL)
        start = f"start: {self._thought} {final} %json {as_json(_held(json.loads(shape.text)))}"
        return dataclasses.replace(shape, kind="lark", text=f"{start}\nTEXT: /(.|\\n)*/")

    @property
    def _thought(self) -> str:
        """Thinking and words before a call or an answer, for gpt-oss."""
        heads = (self._literal(f"{CHANNEL}{kind}{MESSAGE}") for kind in ("analysis", "commentary"))
        return f"(({' | '.join(heads)}) TEXT {self._literal(f'{END}{START}assistant')})*"

    def _literal(self, text: str) -> str:
        """Text for a grammar, with its marks as tokens where they are such."""
        marks = "|".join(re.escape(mark) for mark in MARKS if mark in self.tokens) or "(?!)"
        parts = enumerate(re.split(f"({marks})", text))
        return " ".join(f"<[{self.tokens[part]}]>" if at % 2 else as_json(part) for at, part in parts if part)

    def _arguments(self, schema: Mapping[str, Any], rules: list[str]) -> str:
        """What arguments look like; a text between tags needs a rule of its own."""
        if self.written.pair is None:
            return f"%json {as_json(_held(schema))}"
        before, behind, close = self.written.pair
        shown, required = [], schema.get("required")
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for name, one in properties_of(schema).items():
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
    """Finds calls in one reply that comes in pieces of any size.

    Each is handed on when it is whole, and what is no whole call in the end is text. Arguments in JSON that a
    grammar holds are handed on as they come. Blanks between text and a call are dropped.
    """

    thinking = False

    def __init__(self, tools: Tools) -> None:
        self._functions, self._form = tools.functions, tools.written
        before, behind = map(re.escape, (self._form.call or ("", ""))[:2])
        streams = tools.held and self._form.pair is None
        self._head = re.compile(rf"(?s:.*?){before}{NAME}{behind}\s*(?=\{{)" if streams else "(?!)")
        self._told: int | None = None
        """How much has been handed on of arguments, where they are handed on as they come."""
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
        self.notes: list[str] = []
        """What was begun as a call and is text, in words."""

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """What more text brings; what may be the beginning of a mark is held back unless it is `final`."""
        self._text, self._final = self._text + text, final
        if self._is_inside is None and (self._text.strip() or final):
            self._is_inside = self._bare.match(self._text) is not None
        may_end = any(mark in text for mark in "{}>])")  # or what is inside goes on
        if final or may_end or self._told is not None or not self._is_inside:
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
        if self._told is not None:
            return self._arguments()
        if head := self._head.match(self._text):
            self._text, self._blanks = self._text[head.end() :], ""
            self._called = self._called_ever = True
            return self._arguments(head[1], f"functions.{head[1]}:0" if self._form.call is KIMI_CALL else "")
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
        said = self._opening or ""
        if self._called:
            rest = self._text[: stop.start()] if stop else self._text
            self._text = self._text[stop.end() if stop and stop[1] == self._form.closing else len(rest) :]
            rest = _MARK.sub("", rest)[: None if stop else -tail_of(self._form.closing, rest) or None]
            said = rest if rest.strip(" \t\r\n,;]}`") else ""
        self._say(said)
        if said and self._opening:
            self.notes.append(NOTE.format(self._opening))
        self._is_inside = False
        return True

    def _arguments(self, name: str | None = None, call_id: str = "") -> bool:
        """Hand on what has come of arguments, first with a call's name; says whether they have ended."""
        told, end = self._told or 0, None
        if "}" in self._text[told:]:
            with suppress(ValueError, RecursionError):
                end = json.JSONDecoder().raw_decode(self._text)[1]
        self._pieces.append(Piece("call", self._text[told:end], name, call_id))
        self._told = len(self._text) if end is None else None
        self._text = self._text[end:] if end is not None else self._text
        return end is not None


def parser_of(tools: Tools) -> CallParser | ChannelParser:
    """What finds calls in a reply."""
    return ChannelParser(tools) if tools.written.header else CallParser(tools)


class ChannelParser:
    """Parts a reply of messages, each with a header: thinking, text, or calls to functions.

    Calls are handed on when they are whole, or as they come where they are held by a grammar.
    """

    def __init__(self, tools: Tools) -> None:
        self._functions, self._form, self._held = tools.functions, tools.form, tools.held
        self.notes: list[str] = []
        self._text, self._kind, self._head, self._name, self._first = "", "", "", "", True
        self._ends = re.compile("|".join(map(re.escape, ENDS)))

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
        head, mark, rest = self._text.partition(MESSAGE)
        if self._first and not re.match(r"\s*(?:\Z|<|t\Z|to\Z|to=)", head):
            self._kind = "text"
        elif mark:
            named = re.search(self._form.header, head)
            self._head, self._name, self._text = head + mark, named[1] if named else "", rest
            is_thinking = re.search(rf"{re.escape(CHANNEL)}\s*analysis|to=self\b", head)
            self._kind = "call" if named else "thinking" if is_thinking else "text"
        elif final:
            self._kind = "text"
        return bool(self._kind)

    def _body(self, pieces: list[Piece], final: bool) -> bool:
        """Up to a message's end."""
        end = self._ends.search(self._text)
        said = self._text[: end.start()] if end else self._text
        if end is None and not final:
            is_whole = self._kind == "call" and not self._held
            held = len(said) if is_whole else max(tail_of(mark, said) for mark in ENDS)
            said = said[: len(said) - held]
        self._text = self._text[len(said) if end is None else end.end() :]
        if self._kind != "call":
            pieces.append(Piece("thinking" if self.thinking else "text", said))
        elif self._held:
            pieces.append(Piece("call", said, self._name or None))
            self._name = ""
        elif end or final:
            calls, rest = list[Piece](), self._name + said
            while isinstance(found := self._form.read(rest, self._functions), tuple) and found[0]:
                calls += [Piece("call", arguments, name) for name, arguments in found[0]]
                rest = rest[found[1] :]
            if rest.strip():
                calls = [Piece("text", self._head + said)]
                self.notes.append(NOTE.format(self._head.strip()))
            pieces += calls
        if end is not None:
            self._kind, self._first = "", False
        return end is not None
