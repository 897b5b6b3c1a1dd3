"""How models write tool calls: a row of `FORMS` a form, with its marks, its reader, and its text.

The grammar that holds a call to its function's schema is made of the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

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
ENDS = START, END, *_ = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
"""What ends a message of gpt-oss."""


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


def _any(*readers: Reader) -> Reader:
    """What the first of several finds."""

    def read(text: str, schemas: Schemas) -> Found | bool:
        return next((found for one in readers if (found := one(text, schemas)) is not False), False)

    return read


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
    call: tuple[str, str, str] | None = None
    """What stands before a name, behind it, and behind the arguments; without it there is no grammar."""
    pair: tuple[str, str, str] | None = None
    """What stands before a key, behind it, and behind its value, where arguments are no JSON."""
    between: str | None = None
    """What stands between calls that share their marks; None where each has its own."""
    bare: str = "(?!)"
    """How a reply begins that is a call without a mark."""
    ends_reply: bool = False
    """Whether calls without a mark are calls only where nothing comes behind them."""


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
_tool_call = _any(_functions, _keys, _objects())
_invoke = _tagged(rf'<invoke name="{NAME}">', r'<parameter name="([^"\n]+)">', "</parameter>", "</invoke>")
_deepseek = _objects(
    rf"\s*(?:```)?\s*(?:{CALL_END})?\s*{CALL}(?:\w*{SEPARATOR})?\s*{NAME}\s*(?:{SEPARATOR})?\s*(?:```json)?\s*(?=\{{)"
)
_kimi = _objects(
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*(?=(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<)"
    r"([\w.:-]+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_mistral = _objects(rf"\s*{NAME}(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{{)")

TAGS, INVOKES = ("<tool_call>", "</tool_call>"), ("<minimax:tool_call>", "</minimax:tool_call>")
PARAMETERS = ("\n<function=", ">\n", "</function>\n"), ("<parameter=", ">\n", "\n</parameter>\n")
KEYS = ("", "\n", ""), ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = ("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>")
FENCED = (f"{CALL}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}")
INVOKE = ('\n<invoke name="', '">\n', "</invoke>"), ('<parameter name="', '">', "</parameter>\n")
COMMENTARY = (f"{CHANNEL}commentary to=functions.", f" <|constrain|>json{MESSAGE}", "")

HERMES = Form(TAGS[:1], *TAGS, _tool_call, ('\n{"name": "', '", "arguments": ', "}\n"))
HARMONY = Form((CHANNEL, "functions"), "", "", _objects(), COMMENTARY)
"""gpt-oss: `ChannelParser` reads it."""
GEMMA = Form(("<|tool_call>",), "<|tool_call>", "<tool_call|>", _gemma)
THOUGHT = ("<|channel>thought\n", "<channel|>")
"""Between which Gemma 4 thinks."""
LISTED = Form((), "[", "]", _objects(), ('{"name": "', '", "parameters": ', "}"), between=", ", bare=r"\s*\[")
"""An array of objects, for calls that have to come in a form without a grammar."""
FORMS = {
    "gpt-oss": HARMONY,
    "Gemma 4": GEMMA,
    "Kimi K2": Form(("<|im_middle|>",), *KIMI, _kimi, KIMI_CALL, between=""),
    "DeepSeek V3": Form((CALLS[0], "```json"), *CALLS, _deepseek, FENCED, between="\n"),
    "DeepSeek V3.1": Form(CALLS[:1], *CALLS, _deepseek, (CALL, SEPARATOR, CALL_END), between=""),
    "MiniMax M2": Form(INVOKES[:1], *INVOKES, _invoke, *INVOKE, between=""),
    "Seed-OSS": Form(("<seed:tool_call>",), "<seed:tool_call>", "</seed:tool_call>", _functions, *PARAMETERS),
    "Qwen3-Coder, Qwen3.5": Form((*TAGS[:1], "<function="), *TAGS, _tool_call, *PARAMETERS),
    "GLM-4.5, GLM-4.7": Form((*TAGS[:1], "<arg_key>"), *TAGS, _tool_call, *KEYS),
    "Hermes, Qwen3": HERMES,
    "LFM2": Form(("<|tool_call_start|>",), "<|tool_call_start|>", "<|tool_call_end|>", _python),
    "Granite 3": Form(("<|tool_call|>",), "<|tool_call|>", "", _objects()),
    "Mistral": Form(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "", _mistral, ("", "[ARGS]", "")),
    "Mistral before 2025": Form(("[TOOL_CALLS]",), "[TOOL_CALLS]", "", _mistral),
    "Llama 3": Form(
        ("<|start_header_id|>",), "<|python_tag|>", "", _llama, bare=r"\s*[{\[]", ends_reply=True
    ),
}
"""By the models that are known for it; a template's is the first of which it holds every sign."""
WRITTEN = str([(form.opening, form.closing, form.call, form.pair) for form in FORMS.values()])
MARKS = {QUOTE, "<|channel>", THOUGHT[1], *ENDS, "[CALL_ID]"}
MARKS |= set(re.findall(r"<[^<>\\]+>|\[[A-Z_]+\]", WRITTEN))
"""What may be special tokens, which have no text of their own."""


def call_form(template: str) -> Form:
    """How a model writes calls, by its chat template; as Hermes where nothing is told."""
    return next((form for form in FORMS.values() if all(sign in template for sign in form.signs)), HERMES)
