"""Readers of calls at the beginning of a text, one for each style in which models write them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Protocol

from spd.conversation.tools.call_forms import (
    BARE_KEY,
    NAME,
    NUMBER,
    PYTHON_WORDS,
    QUOTE,
    WORD,
    Form,
    Pairs,
)
from spd.conversation.tools.schema_arguments import Arguments, as_json
from spd.runtime import JsonObject

Schemas = Mapping[str, JsonObject]
"""JSON schemas of functions' arguments, by name."""
Calls = Sequence[tuple[str, ...]]
"""Names, arguments and the model's ids of calls."""
CallsAndEnd = tuple[Calls, int]
"""Calls that begin a text, and the position behind them.

No calls for a text that cannot become one.
"""

SEPARATORS = r"[\s,;\[]*"
"""A pattern of what may stand before a call."""


class Reader(Protocol):
    """Reads calls at the beginning of a text in one style."""

    def __call__(
        self, text: str, form: Form, schemas: Schemas, *, is_exact: bool
    ) -> CallsAndEnd | bool:
        """Return the calls; True for an incomplete call, False for a text that may become a call.

        is_exact: True if a grammar constrains calls, so that no part of them is missing.
        """


def read_calls(
    text: str, form: Form, schemas: Schemas, *, is_exact: bool = False
) -> CallsAndEnd | bool:
    """Return the calls at the beginning of a text: see `Reader`."""
    style = "objects" if form.pairs is None else form.pairs.style
    if form.is_bare and re.match(r"\s*\[\s*(?:[A-Za-z_]|\Z)", text):
        style = "python"
    return READERS[style](text, form, schemas, is_exact=is_exact)


def next_call_position(text: str, form: Form, schemas: Schemas) -> int | None:
    """Return the position of the first complete call behind the beginning of a text; None for
    none.
    """
    for candidate in _call_beginnings(form, schemas).finditer(text, 1):
        result = read_calls(text[candidate.start() :], form, schemas)
        calls = result[0] if isinstance(result, tuple) else ()
        if calls and (form.call[0] != "{" or all(call[0] in schemas for call in calls)):
            return candidate.start()
    return None


def _call_beginnings(form: Form, schemas: Schemas) -> re.Pattern[str]:
    """Return the pattern of a call's beginning where calls share their marks."""
    begin = form.call.partition("NAME")[0].strip()
    if begin.startswith("<"):
        return re.compile(re.escape(begin.partition(">")[0]))
    if begin.startswith("{"):
        return re.compile(r'\{\s*"(?:name|arguments|parameters|tool_name|tool_call_id)"')
    names = "|".join(map(re.escape, schemas)) or NAME
    return re.compile(rf"(?<![\w.])(?:{names})\(")


def _read_objects(text: str, form: Form, schemas: Schemas, *, is_exact: bool) -> CallsAndEnd | bool:
    """Read calls that are objects with name and arguments, or arguments behind the form's head."""
    head = re.match(form.head_pattern, text)
    beginning = head or re.match(SEPARATORS, text)
    try:
        value, end = json.JSONDecoder().raw_decode(text, beginning.end() if beginning else 0)
    except (ValueError, RecursionError):
        return False
    name: object = None
    arguments = value
    ids: list[str] = []
    if head is not None:
        name, *ids = head.groups()
    elif isinstance(value, dict):
        name = value.get("tool_name", value.get("name"))
        arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object into a string
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return (), 0
    arguments_text = as_json(arguments) if head is None else text[head.end() : end]
    return [(name, arguments_text, *ids)], end


def loose_pattern(text: str) -> str:
    """Return the pattern of a form's text, with any blanks where the text has some."""
    words = r"\s*".join(map(re.escape, text.split()))
    return (
        words.replace("NAME", NAME)
        .replace("KEY", r"([^<>\n]+?)")
        .replace(re.escape(NUMBER), r"\d+")
    )


class _Tags(NamedTuple):
    """Patterns of a form whose keys and values are between tags."""

    head: re.Pattern[str]
    """A call's name, with a key or the call's end behind it."""
    key: re.Pattern[str]
    close: re.Pattern[str]
    """The tag that ends a value."""
    last_close: re.Pattern[str]
    """The same tag with a key or the call's end behind it: another one is a part of the value."""
    end: re.Pattern[str]
    cut: re.Pattern[str]
    """The text that ends a value without such a tag: a key, or the end of the calls."""


@lru_cache
def _tag_patterns(form: Form) -> _Tags:
    """Return the patterns of a form, compiled once."""
    pair = form.pairs.text if form.pairs else ""
    head, tail = map(loose_pattern, form.call.split("ARGUMENTS"))
    key, close = map(loose_pattern, pair.split("VALUE"))
    closing = re.escape(form.closing)
    end = rf"\s*(?:{tail or '(?!)'}|(?={closing}))"
    following = rf"(?=\s*{key}|{end})"
    last = rf"{tail}\s*{closing}"
    if form.separator is not None:
        last = rf"{tail}\s*(?:{closing}|{head})"
    return _Tags(
        head=re.compile(rf"\s*{head}{following}"),
        key=re.compile(rf"\s*{key}"),
        close=re.compile(close),
        last_close=re.compile(rf"{close}{following}"),
        end=re.compile(end),
        cut=re.compile(rf"\n?(?:{key}|\s*{last})"),
    )


def _read_tags(text: str, form: Form, schemas: Schemas, *, is_exact: bool) -> CallsAndEnd | bool:
    """Read calls of keys and values between tags: a value ends before a key or the call's end."""
    tags = _tag_patterns(form)
    head = tags.head.match(text)
    if head is None:
        return False
    pairs = form.pairs or Pairs("")
    edge = "\n" if "\nVALUE\n" in pairs.text else ""
    arguments = Arguments(schemas.get(head[1], {}))
    values: dict[str, str] = {}
    place = head.end()
    while (end := tags.end.match(text, place)) is None:
        key = tags.key.match(text, place)
        if key is None:
            return True
        name = key[1].strip()
        next_names = None if is_exact else arguments.names - values.keys() - {name}
        ends = _value_ends(text, key.end(), tags, next_names, any_name=not arguments.names)
        if ends is None:
            return True
        value_end, place = ends
        value = text[key.end() : value_end]
        values[name] = value.removeprefix(edge).removesuffix(edge)
    pairs_as_json = (
        f"{as_json(name)}: {arguments.argument(name).as_json(value, pairs.literals)}"
        for name, value in values.items()
    )
    return [(head[1], f"{{{', '.join(pairs_as_json)}}}")], end.end()


def _value_ends(
    text: str, begin: int, tags: _Tags, next_names: set[str] | None, *, any_name: bool
) -> tuple[int, int] | None:
    """Return the end of the value at `begin` and the end of its tag; None if it has not ended yet.

    Some models leave out the tag that ends a value. With `next_names`, the arguments that may still
    come, a value without it ends before the key of one of them, or before the end of the calls; with
    `any_name`, as of a function whose arguments are not known, before any key.
    """
    closed = tags.last_close.search(text, begin)
    if next_names is not None:
        any_close = tags.close.search(text, begin)
        limit = len(text) if any_close is None else any_close.start()
        for cut in tags.cut.finditer(text, begin, limit):
            name = cut[1]
            if name is None or any_name or name.strip() in next_names:
                return cut.start(), cut.start()
    return None if closed is None else (closed.start(), closed.end())


_TRIPLE = r"\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}"
_TEXT = rf"""{_TRIPLE}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_ARGUMENT_NAME = r"([\w$.-]+)(?=\s*=(?!=))"
_LEADING_ZEROS = r"(?<![\w.])0+(?=[1-9][0-9]*(?![\w.]))"
_PYTHON_PARTS = re.compile(rf"{_TEXT}|{_ARGUMENT_NAME}|{_LEADING_ZEROS}", re.DOTALL)
"""A text, the name of an argument, which may be a reserved word of Python, or zeros before a
number, which Python refuses."""
_QUOTED = re.compile(rf"({_ARGUMENT_NAME}\s*=\s*)(?:{_TRIPLE}|(?P<quote>[\"']))", re.DOTALL)
_PARSE_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""Exceptions of Python's parser and of `_statement_calls`."""
_RAW_CHARACTERS = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}
"""Characters that Python's texts cannot have as they are, though models write them."""


def _read_python(text: str, form: Form, schemas: Schemas, *, is_exact: bool) -> CallsAndEnd | bool:
    """Read calls of Python, one or a list of them, as `Reader` does; values may be JSON, too."""
    if re.match(rf"{SEPARATORS}{NAME}\(", text) is None:
        return True if re.fullmatch(rf"{SEPARATORS}{NAME}?\s*", text) else ((), 0)
    if form.is_array and not text.lstrip().startswith("["):
        return _read_first_python_call(text)
    for match in re.finditer(r"[\])](?=\s*(?:\Z|<))", text):
        source = text[: match.end()].strip(" ,;\n")
        is_complete = bool(form.closing) and text[match.end() :].lstrip().startswith(form.closing)
        with suppress(*_PARSE_ERRORS):
            return _python_calls(source), match.end()
        with suppress(*_PARSE_ERRORS):
            if is_complete:
                end = _argument_end_pattern(schemas if is_exact else {})
                return _python_calls(_with_inner_quotes(source, end)), match.end()
    return True


def _read_first_python_call(text: str) -> CallsAndEnd | bool:
    """Return the first call of a list of which a later one is broken; False if it is incomplete."""
    depth = 0
    for part in re.finditer(rf"{_TEXT}|[()]", text, re.DOTALL):
        depth += (part[0] == "(") - (part[0] == ")")
        if part[0] == ")" and depth == 0:
            with suppress(*_PARSE_ERRORS):
                return _python_calls(text[: part.end()].strip(" ,;\n")), part.end()
            break
    return False


def _argument_end_pattern(schemas: Schemas) -> str:
    """Return the pattern of the text behind a text that is a complete argument.

    That is the next argument, or the call's end. Functions without free keys have no other
    arguments than their schemas list; without functions any word is a key or a name.
    """
    arguments = [Arguments(schema) for schema in schemas.values()]
    names = {name for function_arguments in arguments for name in function_arguments.names}
    is_open = any(
        shape.free for function_arguments in arguments for shape in function_arguments.shapes
    )
    key = _any_word_pattern(names) if schemas and not is_open else WORD
    function = _any_word_pattern(schemas) if schemas else WORD
    return rf"(?=\s*(?:,\s*{key}\s*=(?!=)|\)\s*(?:\]?\s*\Z|,\s*{function}\()))"


def _any_word_pattern(words: Iterable[str]) -> str:
    """Return the pattern of one of these words; one that never matches if there are none."""
    return f"(?:{'|'.join(map(re.escape, words)) or '(?!)'})"


def _with_inner_quotes(source: str, following: str) -> str:
    """Return calls with the quotes escaped that are within a text between the same quotes.

    Such a text ends where the pattern `following` matches behind a quote.
    """
    parts: list[str] = []
    place = 0
    while argument := _QUOTED.search(source, place):
        parts.append(source[place : argument.end()])
        place = argument.end()
        quote = argument["quote"]
        end = quote and re.compile(quote + following).search(source, place)
        if end:
            inner = source[place : end.start()]
            words = re.finditer(rf"\\.|{quote}|[^\\{quote}]+|\\\Z", inner, re.DOTALL)
            parts += ["\\" + quote if word[0] == quote else word[0] for word in words]
            place = end.start() + 1
            parts.append(quote)
    return "".join([*parts, source[place:]])


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return the calls in a complete text. Raises one of `_PARSE_ERRORS`."""
    names: list[str] = []
    source = _PYTHON_PARTS.sub(lambda match: _as_python(match, names), text)
    return [
        call
        for statement in ast.parse(source).body
        for call in _statement_calls(statement, source, names)
    ]


def _as_python(match: re.Match[str], names: list[str]) -> str:
    """Return the text that Python accepts in place of a part; a name is appended to `names`."""
    if match[1] is not None:
        names.append(match[1])
        return f"argument_{len(names) - 1}"
    if match[0].startswith("0"):
        return ""
    return re.sub(
        r"\\.|[\n\r\0]", lambda raw: _RAW_CHARACTERS.get(raw[0], raw[0]), match[0], flags=re.DOTALL
    )


class _JsonInPython(ast.NodeTransformer):
    """Replaces JSON's words by Python's, and each set, which JSON has not, by a list."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant that a word of JSON stands for; another name as it is."""
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node

    def visit_Set(self, node: ast.Set) -> ast.List:
        """Return a list of a set's elements."""
        return ast.List([self.visit(element) for element in node.elts], ast.Load())


def _statement_calls(
    statement: ast.stmt, source: str, names: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the calls of a statement, whose arguments have numbers in place of names.

    Raises ValueError for another statement, TypeError for values that JSON has not.
    """
    value = statement.value if isinstance(statement, ast.Expr) else None
    calls: list[tuple[str, str]] = []
    for call in value.elts if isinstance(value, ast.List) else [value]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("not a call with names")
        values: dict[str, object] = {}
        for argument in call.keywords:
            if argument.arg is None:
                raise ValueError("not a call with names")
            name = names[int(argument.arg.removeprefix("argument_"))]
            try:
                values[name] = json.loads(ast.get_source_segment(source, argument.value) or "")
            except ValueError:
                values[name] = ast.literal_eval(_JsonInPython().visit(argument.value))
        calls.append((ast.unparse(call.func), as_json(values)))
    return calls


def _read_gemma(text: str, form: Form, schemas: Schemas, *, is_exact: bool) -> CallsAndEnd | bool:
    """Read calls of Gemma 4: keys are bare, and texts are between marks, or are JSON."""
    head = re.match(rf"\s*call:\s*{NAME}\s*(?=\{{)", text)
    if head is None:
        return False
    quote = re.escape(QUOTE)
    parts = re.compile(
        rf'"(?:[^"\\]|\\.)*(?:"|\Z)|{quote}(?P<text>.*?)(?:{quote}|\Z)'
        rf"|(?<=[{{,])\s*(?P<key>{BARE_KEY})(?=\s*:)"
        rf"|\b(?P<word>True|False|None)\b|(?P<end>{re.escape(form.closing)})",
        re.DOTALL,
    )
    ends = (part.start() for part in parts.finditer(text, head.end()) if part["end"])
    end = next(ends, None)
    if end is None:
        return True

    def as_text(part: re.Match[str]) -> str:
        """Return a text or a key as JSON."""
        if part["word"] is not None:
            return PYTHON_WORDS[part["word"]]
        if part["text"] is None and part["key"] is None:
            return part[0]
        return as_json(part["key"] if part["text"] is None else part["text"])

    with suppress(ValueError, RecursionError):
        return [(head[1], as_json(json.loads(parts.sub(as_text, text[head.end() : end]))))], end
    return (), 0


READERS: Mapping[str, Reader] = {
    "objects": _read_objects,
    "tags": _read_tags,
    "python": _read_python,
    "gemma": _read_gemma,
}
"""Readers by the style of a form's pairs."""
