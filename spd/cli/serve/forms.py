"""How models write tool calls: a row of `FORMS` a form, with its marks, its text, and its reader.

The grammar that holds a call to its function's schema is made of the text (`Tools`); calls in a growing reply
are found by the reader (`CallParser`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from spd.cli.text.channels import (
    CALL,
    CHANNEL,
    ENDS,
    HARMONY,
    MESSAGE,
    MUSE,
    Channels,
    json_of,
    literal,
)
from spd.runtime.engine.request import JSON_STYLE, GrammarText, tail_of

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of functions' arguments, by name."""
Found = tuple[Sequence[tuple[str, ...]], int]
"""Names and arguments, and ids that the model gave, of calls that begin a text, and where they end; no calls
for what cannot become one."""
Reader = Callable[[str, "Form", Schemas], Found | bool]
"""What begins a text: calls, True for a call that goes on, False for what more text may make one."""

NAME, BLANK, NUMBER = r"([\w.-]+)", r"[\s,;\[]*", "#"
QUOTE = '<|"|>'


# -- readers -----------------------------------------------------------------------------------------


def _objects(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Calls that are objects with a name and arguments, or arguments behind the form's head."""
    named = re.match(form.head, text)
    begun = named or re.match(BLANK, text)
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


def _loose(text: str) -> str:
    """A form's text as an expression, with any blanks where it has some."""
    words = r"\s*".join(map(re.escape, text.split()))
    return (
        words.replace("NAME", NAME)
        .replace("KEY", r"([^<>\n]+?)")
        .replace(re.escape(NUMBER), r"\d+")
    )


def _tagged(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Calls of keys and values between tags: a value is closed where a key or the call's end follows."""
    pair = form.pairs.text if form.pairs else ""
    (head, tail), (key, close) = (
        map(_loose, re.split("ARGUMENTS|VALUE", one)) for one in (form.call, pair)
    )
    edge = "\n" * ("\nVALUE\n" in pair)
    end = rf"\s*(?:{tail or '(?!)'}|(?={re.escape(form.closing)}))"
    if (begun := re.match(rf"\s*{head}(?=\s*{key}|{end})", text)) is None:
        return False
    shown, place = dict[str, str](), begun.end()
    while (ended := re.compile(end).match(text, place)) is None:
        named = re.compile(rf"\s*{key}").match(text, place)
        closed = (
            re.compile(rf"{close}(?=\s*{key}|{end})").search(text, named.end()) if named else None
        )
        if named is None or closed is None:
            return True
        value = text[named.end() : closed.start()].removeprefix(edge).removesuffix(edge)
        shown[named[1].strip()], place = value, closed.end()
    schema = properties_of(schemas.get(begun[1], {}))
    written = (
        f"{as_json(name)}: {_value(schema.get(name), value)}" for name, value in shown.items()
    )
    return [(begun[1], f"{{{', '.join(written)}}}")], ended.end()


def _value(schema: Any, text: str) -> str:
    """A value between tags as JSON: a string where the schema says so or the text is no JSON."""
    if not is_text(schema):
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return text
    return as_json(text)


def _python(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Calls of Python, one or a list of them; values may be JSON, too."""
    if re.match(rf"{BLANK}{NAME}\(", text) is None:
        return True if re.fullmatch(rf"{BLANK}{NAME}?\s*", text) else ((), 0)
    for end in (found.end() for found in re.finditer(r"[\])](?=\s*(?:\Z|<))", text)):
        with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            source = text[:end].strip(" ,;\n")
            return [one for said in ast.parse(source).body for one in _called(said, source)], end
    return True


def _called(said: ast.stmt, source: str) -> list[tuple[str, str]]:
    """The calls of a statement. Raises ValueError for another, TypeError for values that JSON has not."""
    value = said.value if isinstance(said, ast.Expr) else None
    found = []
    for call in value.elts if isinstance(value, ast.List) else [value]:
        if (
            not isinstance(call, ast.Call)
            or call.args
            or None in [one.arg for one in call.keywords]
        ):
            raise ValueError("not a call with names")
        values = dict[str, Any]()
        for one in call.keywords:
            try:
                values[str(one.arg)] = json.loads(ast.get_source_segment(source, one.value) or "")
            except ValueError:
                values[str(one.arg)] = ast.literal_eval(one.value)
        found.append((ast.unparse(call.func), as_json(values)))
    return found


def _gemma(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Calls of Gemma 4: keys are bare, and strings stand between marks, or are JSON."""
    if (begun := re.match(rf"\s*call:\s*{NAME}\s*(?=\{{)", text)) is None:
        return False
    quote, end = map(re.escape, (QUOTE, form.closing))
    parts = re.compile(
        rf'"(?:[^"\\]|\\.)*(?:"|\Z)|{quote}(.*?)(?:{quote}|\Z)|([\w$.-]+)(?=\s*:)|({end})',
        re.DOTALL,
    )
    stop = next((part.start() for part in parts.finditer(text, begun.end()) if part[3]), None)
    if stop is None:
        return True

    def as_text(part: re.Match[str]) -> str:
        return part[0] if part[0][0] == '"' else as_json(part[2] if part[1] is None else part[1])

    with suppress(ValueError, RecursionError):
        return [(begun[1], as_json(json.loads(parts.sub(as_text, text[begun.end() : stop]))))], stop
    return (), 0


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


# -- the table ---------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Arguments that are no JSON object: a text with KEY and VALUE for each."""

    text: str
    read: Reader = _tagged
    quote: str | None = ""
    """What stands around a text as VALUE; None where it is JSON."""
    comma: str = ""
    """What stands between them."""


class Form(NamedTuple):
    """How a model writes calls: behind `opening`, and before `closing` where it is not empty."""

    opening: str
    closing: str
    call: str = '{"name": "NAME", "arguments": ARGUMENTS}'
    """A call, with NAME and ARGUMENTS in their places, and # for its number in the conversation."""
    pairs: Pairs | None = None
    signs: tuple[str, ...] = ()
    """What the chat template of such a model holds, where that is not the opening mark alone."""
    head: str = "(?!)"
    """What is read before arguments where no object holds the name; groups: the name, an id."""
    between: str | None = None
    """What stands between calls that share their marks; None where each has its own."""
    is_array: bool = False
    """Whether those stand in an array."""
    is_bare: bool = False
    """Whether the opening mark may be missing where a reply is nothing but calls."""
    channels: Channels | None = None
    """How replies of messages are written."""

    def read(self, text: str, schemas: Schemas) -> Found | bool:
        """What begins a text: see `Reader`."""
        is_python = self.is_bare and re.match(r"\s*\[\s*(?:[A-Za-z_]|\Z)", text)
        reader = _python if is_python else self.pairs.read if self.pairs else _objects
        return reader(text, self, schemas)


SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK = f"{CALL_BEGIN}NAME{SEPARATOR}ARGUMENTS{CALL_END}"
FENCED = f"{CALL_BEGIN}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CALL_END}"
DEEPSEEK_HEAD = rf"[^{{]*?{CALL_BEGIN}[^{{]*?{NAME}\s*(?:{SEPARATOR}|```json)?\s*(?=\{{)"
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = (
    "<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
)
KIMI_HEAD = (
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*(?=(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<)"
    r"([\w.:-]+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
HARMONY_CALL = f"NAME <|constrain|>json{MESSAGE}ARGUMENTS"
HARMONY_HEAD = rf"\s*{NAME}[^{{]*?{re.escape(MESSAGE)}\s*(?=\{{)"
ATEM = "<atem:function_calls>", "</atem:function_calls>"
ATEM_CALL = '\n<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>\n'
ATEM_PAIRS = Pairs('<atem:parameter name="KEY">VALUE</atem:parameter>\n')
MINIMAX = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE = (
    '\n<invoke name="NAME">\nARGUMENTS</invoke>',
    Pairs('<parameter name="KEY">VALUE</parameter>\n'),
)
TAGS, SEED = ("<tool_call>", "</tool_call>"), ("<seed:tool_call>", "</seed:tool_call>")
CODER = "\n<function=NAME>\nARGUMENTS</function>\n", Pairs("<parameter=KEY>\nVALUE\n</parameter>\n")
GLM = "NAME\nARGUMENTS", Pairs("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
LFM = (
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "NAME(ARGUMENTS)",
    Pairs("KEY=VALUE", _python, None, ", "),
)
GEMMA = (
    "<|tool_call>",
    "<tool_call|>",
    "call:NAME{ARGUMENTS}",
    Pairs("KEY:VALUE", _gemma, QUOTE, ","),
)
ACTION = '{"tool_call_id": "#", "tool_name": "NAME", "parameters": ARGUMENTS}'
LLAMA = '{"name": "NAME", "parameters": ARGUMENTS}'
MISTRAL = rf"\s*{NAME}(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{{)"
HERMES = Form(*TAGS, '\n{"name": "NAME", "arguments": ARGUMENTS}\n')
FORMS = {
    "gpt-oss": Form(
        *(CALL, "", HARMONY_CALL), signs=(CHANNEL, "functions"), head=HARMONY_HEAD, channels=HARMONY
    ),
    "Muse-Glimmer": Form(*ATEM, ATEM_CALL, ATEM_PAIRS, signs=("<atem:",), channels=MUSE),
    "Gemma 4": Form(*GEMMA),
    "Kimi K2": Form(*KIMI, KIMI_CALL, signs=("<|im_middle|>",), head=KIMI_HEAD, between=""),
    "DeepSeek V3": Form(
        *SECTION, FENCED, signs=(SECTION[0], "```json"), head=DEEPSEEK_HEAD, between="\n"
    ),
    "DeepSeek V3.1": Form(*SECTION, DEEPSEEK, head=DEEPSEEK_HEAD, between=""),
    "MiniMax M2": Form(*MINIMAX, *INVOKE, between=""),
    "Seed-OSS": Form(*SEED, *CODER),
    "Qwen3-Coder, Qwen3.5": Form(*TAGS, *CODER, signs=(*TAGS[:1], "<function=")),
    "GLM-4.5, GLM-4.7": Form(*TAGS, *GLM, signs=(*TAGS[:1], "<arg_key>")),
    "Hermes, Qwen3": HERMES,
    "LFM2": Form(*LFM, signs=("List of tools: ",), between=", ", is_array=True),
    "GigaChat 3.1": Form("<|function_call|>", "", between=", "),
    "Granite 3": Form("<|tool_call|>", "", between=", ", is_array=True),
    "Nemotron Nano 2": Form("<TOOLCALL>", "</TOOLCALL>", between=", ", is_array=True),
    "Command R7B, A": Form(
        "<|START_ACTION|>", "<|END_ACTION|>", ACTION, between=", ", is_array=True
    ),
    "Mistral": Form(
        "[TOOL_CALLS]", "", "NAME[ARGS]ARGUMENTS", signs=("[TOOL_CALLS]", "[ARGS]"), head=MISTRAL
    ),
    "Mistral before 2025": Form("[TOOL_CALLS]", "", head=MISTRAL, between=", ", is_array=True),
    "Llama 3": Form(
        "<|python_tag|>", "", LLAMA, signs=("<|start_header_id|>",), between="; ", is_bare=True
    ),
}
"""By the models that are known for it; a template's is the first of which it holds every sign."""
WRITTEN = " ".join(
    " ".join((*form[:3], form.pairs.text if form.pairs else "")) for form in FORMS.values()
)
MARKS = {
    mark
    for mark in re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", WRITTEN)
    if not re.search("NAME|KEY", mark)
}
MARKS |= {QUOTE, "[CALL_ID]", "<|channel>", "<channel|>", *ENDS}
"""What may be special tokens, which have no text of their own."""


GUESSED = Form(*HERMES)
"""The form where a template tells of none: what may be such a call slows no reply."""


def call_form(template: str) -> Form:
    """How a model writes calls, by its chat template."""
    told = (
        one
        for one in FORMS.values()
        if all(sign in template for sign in one.signs or (one.opening,))
    )
    return next(told, GUESSED)


NO_CALL = re.compile(BLANK + r'\{\s*[^\s"]')
_MARK = re.compile("|".join(map(re.escape, MARKS)))
MAX_CALLS = 8
"""Calls in one reply that a grammar allows."""
LOOSELY = {"x-guidance": {**JSON_STYLE, "lenient": True, "coerce_one_of": True}}
"""In a schema: what no grammar can hold of it is passed over."""


@dataclass(frozen=True)
class Tools:
    """The functions that a reply may call, or has to where it is `required`: any, or one that is `named`.

    A grammar holds calls to their schemas: those that have to come, and others from the form's opening mark
    on. A mark of several tokens is looked for from the reply's beginning; for messages and for calls without
    a mark that is done only where it is `strict`. `tokens` are the ids of marks that are tokens.
    """

    functions: Schemas
    form: Form = HERMES
    named: str | None = None
    required: bool = False
    parallel: bool = True
    strict: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict)
    answer: GrammarText | None = None
    """The schema of a reply that calls nothing."""

    @property
    def held(self) -> bool:
        """Whether a grammar holds a reply from its beginning on."""
        return self.required or self.answer is not None or (self.strict and not self.form.is_bare)

    @property
    def grammar(self) -> GrammarText | None:
        """What holds a call, in the model's own form; None where nothing does."""
        form = self.form
        answer = (
            json_of(json.loads(self.answer.text)) if self.answer and not self.required else None
        )
        whole = self.required or answer is not None
        mark = None if whole else self.tokens.get(form.opening)
        if mark is None and not self.held and (form.is_bare or form.channels or form is GUESSED):
            return None
        chosen = self.functions if self.named is None else {self.named: self.functions[self.named]}
        rules = ["GAP: /\\n{0,2}/", "TEXT: /(.|\\n)*/"]
        head, tail = form.call.split("ARGUMENTS")
        opening, closing = ("" if form.is_bare and self.required else form.opening), form.closing
        if form.channels is not None:  # each message is one call, with the name in its header
            head, tail, opening, closing = (
                form.channels.call + opening + head,
                tail + closing,
                "",
                "",
            )
        for number, (name, schema) in enumerate(chosen.items()):
            named = self._literal(head.replace("NAME", name)).replace(NUMBER, '" /[0-9]+/ "')
            rules.append(
                f"call_{number}: {named} {self._arguments(schema, rules)} {self._literal(tail)}"
            )
        one = f"({' | '.join(f'call_{number}' for number in range(len(chosen)))})"
        opening, closing = self._literal(opening), self._literal(closing)
        if form.between is None:
            one, next_one, closing = f"{one} {closing}", f"GAP {opening} {one} {closing}", ""
        else:
            next_one = f"{self._literal(form.between)} {one}"
        several = self.parallel and self.named is None and form.channels is None
        calls = (
            f"{one} ({next_one}){f'{{0,{MAX_CALLS - 1}}}' if self.required else '*'}"
            if several
            else one
        )
        calls = f'"[" {calls} "]"' if form.is_array else calls
        calls += f" GAP {closing}" * bool(closing)
        if form.channels is not None:
            final = f"{self._literal(form.channels.answer)} {answer or 'TEXT'}"
            last = calls if self.required else f"({calls} | {final})"
            start = f"{form.channels.thought(self.tokens)} {last}"
        elif whole:
            start = f"GAP ({opening} {calls} {f'| {answer}' if answer else ''})"
        else:
            before = f"TEXT {opening}" if form.opening in self.tokens else "before"
            rules.append(f"before[lazy]: /(.|\\n)*{re.escape(form.opening)}/")
            start = f"TEXT | {before} {calls}" if mark is None else calls
            start += f" ({before} {calls})* TEXT" * several
        return GrammarText("lark", "\n".join([f"start: {start}", *rules]), mark, not whole)

    def _literal(self, text: str) -> str:
        return literal(text, self.tokens)

    def _arguments(self, schema: Mapping[str, Any], rules: list[str]) -> str:
        """What arguments look like; a text that is no JSON, a pair and what follows it need rules."""
        loosely = {} if self.required or self.strict else LOOSELY
        if (pairs := self.form.pairs) is None:
            return json_of({**loosely, **schema})
        required, before, behind = schema.get("required"), *pairs.text.split("VALUE")
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        first = more = ""  # what may come where no pair has come, and where one has
        for name, one in reversed([*properties_of(schema).items()]):
            raw = is_text(one) and pairs.quote is not None
            quote = pairs.quote or "" if raw else ""
            head, end = (
                self._literal(before.replace("KEY", name) + quote),
                self._literal(quote + behind),
            )
            if raw and isinstance(values := one.get("enum"), list):
                value = f"({' | '.join(as_json(str(each)) for each in values)})"
            elif raw:
                most, at = (
                    one.get("maxLength"),
                    end.find("<["),
                )  # a token, and blanks before it are text
                suffix, end = (f"[suffix={end}]", "") if at < 0 else ("", end[at:])
                text = (
                    f"/(.|\\n){{0,{most}}}/"
                    if isinstance(most, int) and most < 10_000
                    else "/(.|\\n)*/"
                )
                value = f"text_{len(rules)}"
                rules.append(f"{value}{suffix}: {text}")
            else:
                value = json_of({**loosely, **shared, **one} if isinstance(one, dict) else one)
            pair, rest, comma = (
                f"pair_{len(rules)}",
                f"rest_{len(rules)}",
                self._literal(pairs.comma),
            )
            rules += [f"{pair}: {head} {value} {end}", f"{rest}: {more}"]
            if isinstance(required, list) and name in required:
                first, more = f"{pair} {rest}", f"{comma} {pair} {rest}"
            else:
                first, more = f"({pair} {rest} | {first})", f"({comma} {pair})? {rest}"
        return first if pairs.comma else more


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

    def __init__(self, tools: Tools) -> None:
        self._functions, self._form = tools.functions, tools.form
        head = rf"(?s:.*?){_loose(self._form.call.partition('ARGUMENTS')[0])}\s*(?=\{{)"
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
        """Where a call may come what is text if none does: a mark with the blanks before it, or nothing."""
        self._called = False
        """Whether a call has come."""
        self.notes: list[str] = []
        """What was begun as a call and is text, in words."""

    def feed(self, text: str, *, final: bool = False) -> Sequence[Piece]:
        """What more text brings; what may be the beginning of a mark is held back unless it is `final`."""
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
        found = self._form.read(self._text, self._functions)
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
        """Hand on what has come of arguments, first with a call's name; says whether they have ended."""
        told, end = self._told or 0, None
        if "}" in self._text[told:]:
            with suppress(ValueError, RecursionError):
                end = json.JSONDecoder().raw_decode(self._text)[1]
        self._pieces.append(Piece("call", self._text[told:end], name, call_id))
        self._told = len(self._text) if end is None else None
        self._text = self._text[end:] if end is not None else self._text
        return end is not None
