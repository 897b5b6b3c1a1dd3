"""What finds calls at the beginning of a text, in each form in which models write them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from spd.cli.serve.call_forms import BARE_KEY, NAME, NUMBER, QUOTE, Form
from spd.cli.serve.schema_arguments import Arguments, as_json

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of functions' arguments, by name."""
Found = tuple[Sequence[tuple[str, ...]], int]
"""Names, arguments and the model's ids of calls that begin a text, and where they end.

No calls for what cannot become one.
"""
Reader = Callable[[str, Form, Schemas], Found | bool]
"""Returns the calls that begin a text, True for one that goes on, False for what may yet be one."""
BLANK = r"[\s,;\[]*"


def read_calls(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Return what begins a text: see `Reader`."""
    is_python = form.is_bare and re.match(r"\s*\[\s*(?:[A-Za-z_]|\Z)", text)
    if is_python:
        return _python(text, form, schemas)
    reader = READERS[form.pairs.style] if form.pairs is not None else _objects
    return reader(text, form, schemas)


def _objects(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Read calls that are objects with name and arguments, or arguments behind the form's head."""
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


def loose(text: str) -> str:
    """Return a form's text as an expression, with any blanks where it has some."""
    words = r"\s*".join(map(re.escape, text.split()))
    return (
        words.replace("NAME", NAME)
        .replace("KEY", r"([^<>\n]+?)")
        .replace(re.escape(NUMBER), r"\d+")
    )


def _tagged(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Read calls of keys and values between tags: a value ends before a key or the call's end."""
    pair = form.pairs.text if form.pairs else ""
    (head, tail), (key, close) = (
        map(loose, re.split("ARGUMENTS|VALUE", one)) for one in (form.call, pair)
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
    arguments = Arguments(schemas.get(begun[1], {}))
    written = (
        f"{as_json(name)}: {arguments.argument(name).as_json(value)}"
        for name, value in shown.items()
    )
    return [(begun[1], f"{{{', '.join(written)}}}")], ended.end()


_NAMED = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|([\w$.-]+)(?=\s*=(?!=))""", re.DOTALL)
"""A text, or the name of an argument, which may be a word that Python reserves."""


def _python(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Read calls of Python, one or a list of them; values may be JSON, too."""
    if re.match(rf"{BLANK}{NAME}\(", text) is None:
        return True if re.fullmatch(rf"{BLANK}{NAME}?\s*", text) else ((), 0)
    for end in (match.end() for match in re.finditer(r"[\])](?=\s*(?:\Z|<))", text)):
        with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return _python_calls(text[:end].strip(" ,;\n")), end
    return True


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return the calls in a whole text. Raises what Python's parser and `_called` raise."""
    names: list[str] = []
    source = _NAMED.sub(lambda match: _placeholder(match, names), text)
    return [call for one in ast.parse(source).body for call in _called(one, source, names)]


def _placeholder(match: re.Match[str], names: list[str]) -> str:
    """Return a name that Python takes, in place of one that is put on a list."""
    if match[1] is None:
        return match[0]
    names.append(match[1])
    return f"argument_{len(names) - 1}"


def _called(statement: ast.stmt, source: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the calls of a statement, whose arguments have numbers in place of names.

    Raises ValueError for another one, TypeError for values that JSON has not.
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
                values[name] = ast.literal_eval(argument.value)
        calls.append((ast.unparse(call.func), as_json(values)))
    return calls


def _gemma(text: str, form: Form, schemas: Schemas) -> Found | bool:
    """Read calls of Gemma 4: keys are bare, and texts stand between marks, or are JSON."""
    head = re.match(rf"\s*call:\s*{NAME}\s*(?=\{{)", text)
    if head is None:
        return False
    quote = re.escape(QUOTE)
    parts = re.compile(
        rf'"(?:[^"\\]|\\.)*(?:"|\Z)|{quote}(?P<text>.*?)(?:{quote}|\Z)'
        rf"|(?<=[{{,])\s*(?P<key>{BARE_KEY})(?=\s*:)|(?P<end>{re.escape(form.closing)})",
        re.DOTALL,
    )
    ends = (part.start() for part in parts.finditer(text, head.end()) if part["end"])
    end = next(ends, None)
    if end is None:
        return True

    def as_text(part: re.Match[str]) -> str:
        """Return a text or a key as JSON."""
        if part["text"] is None and part["key"] is None:
            return part[0]
        return as_json(part["key"] if part["text"] is None else part["text"])

    with suppress(ValueError, RecursionError):
        return [(head[1], as_json(json.loads(parts.sub(as_text, text[head.end() : end]))))], end
    return (), 0


READERS: Mapping[str, Reader] = {"tags": _tagged, "python": _python, "gemma": _gemma}
"""By the style of a form's pairs."""
