"""Arguments of every kind of schema in every form: held as the schema says, and read with its
types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spd.conversation.tools.call_forms import FORMS, QUOTE, Literals
from spd.conversation.tools.call_grammar import Tools
from spd.conversation.tools.schema_arguments import Arguments
from spd.errors import UsageError
from spd.formats.folder import ModelFolder
from spd.runtime.engine.grammar import GrammarCompiler
from spd.runtime.engine.json_schema import Json, JsonObject
from tests.cli.conftest import SPECIALS, write_tokenizer
from tests.every_template import split_reply
from tests.server.argument_cases import (
    INTEGER,
    NULL,
    OPTIONAL,
    PAIRS,
    SCHEMAS,
    TAGS,
    TEXT,
    Values,
    object_schema,
    one_property,
)
from tests.server.conftest import is_allowed
from tests.server.test_serve_calls import is_accepted, read_reply


def call_text(
    form: str, arguments: dict[str, Any], *, required: bool = True, name: str = "f"
) -> str:
    """Return a call as a model writes it in a form."""
    form_row = FORMS[form]
    pairs = form_row.pairs
    text = json.dumps(arguments)
    if pairs is not None:
        names = sorted(arguments) if pairs.is_sorted else arguments
        values = {name: as_value(form, arguments[name]) for name in names}
        text = pairs.comma.join(
            pairs.text.replace("KEY", name).replace("VALUE", value)
            for name, value in values.items()
        )
    call = form_row.call.replace("NAME", name).replace("#", "0")
    opening = "" if form_row.is_bare and required else form_row.opening
    reply = opening + (f"[{call}]" if form_row.is_array else call) + form_row.closing
    if form_row.channels is not None:
        reply = form_row.channels.call_header.replace("NAME", name) + reply
    return reply.replace("ARGUMENTS", text)


def as_value(form: str, value: Any) -> str:
    """Return a value as a form writes it: a text without quotes, or between its own."""
    if FORMS[form].pairs.style == "gemma":
        return gemma(value)
    quote = FORMS[form].pairs.quote
    is_bare = isinstance(value, str) and quote is not None
    return f"{quote}{value}{quote}" if is_bare else json.dumps(value)


def gemma(value: Any) -> str:
    """Return a value as Gemma's chat template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    if isinstance(value, dict):
        pairs = (f"{key}:{gemma(value[key])}" for key in sorted(value, key=str.lower))
        return f"{{{','.join(pairs)}}}"
    return json.dumps(value)


def faults(form: str, case: str, *, pieces: bool) -> Iterator[str]:
    """Yield what is lost, of another type, or wrongly refused or allowed; with `pieces` at every
    cut.
    """
    schema, valid, invalid = SCHEMAS[case]
    required_tools = Tools({"f": schema}, FORMS[form], required=True)
    strict_tools = Tools({"f": schema}, FORMS[form], strict=True)
    for arguments in valid:
        text = call_text(form, arguments)
        if not is_accepted(required_tools.grammar, text):
            yield f"refused: {text!r}"
        tagged = call_text(form, arguments, required=False)
        if strict_tools.grammar is not None and not is_accepted(strict_tools.grammar, tagged):
            yield f"refused where it may come: {tagged!r}"
        cuts = [[text[:cut], text[cut:]] for cut in range(len(text))] if pieces else []
        for reply_pieces in ([text], list(text), *cuts):
            content, calls = read_reply(required_tools, reply_pieces)
            if content or [json.loads(call) for _, call in calls] != [arguments]:
                yield f"{arguments} in {len(reply_pieces)} pieces are {calls} {content!r}"
        read = [
            json.loads(piece.text)
            for piece in split_reply(strict_tools, [tagged])
            if piece.kind == "call"
        ]
        if json.dumps(read, sort_keys=True) != json.dumps([arguments], sort_keys=True):
            yield f"{arguments} are read as {read}"
    for arguments in invalid:
        if is_accepted(required_tools.grammar, call_text(form, arguments)):
            yield f"allowed: {arguments}"


@pytest.mark.parametrize("case", SCHEMAS)
@pytest.mark.parametrize("form", [*PAIRS, "Hermes, Qwen3"])
def test_arguments_are_held_and_read_as_their_schema_says(form: str, case: str) -> None:
    assert not [*faults(form, case, pieces=False)]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_read_at_every_cut_in_every_form(form: str) -> None:
    """Together more than 1,000 replies."""
    assert not [fault for case in SCHEMAS for fault in faults(form, case, pieces=True)]


@pytest.mark.parametrize(
    ("literals", "schema", "text", "value"),
    [
        ("words", OPTIONAL, "None", None),
        ("words", OPTIONAL, " None", " None"),
        ("words", {"anyOf": [TEXT, {"type": "array"}]}, "['x']", "['x']"),
        ("python", {"anyOf": [TEXT, {"type": "array"}]}, "['x']", ["x"]),
        ("python", {"anyOf": [TEXT, INTEGER]}, "0x10", "0x10"),
        ("python", TEXT, "['x']", "['x']"),
    ],
)
def test_what_a_form_writes_as_python_does_is_no_text(
    literals: Literals, schema: Any, text: str, value: Any
) -> None:
    read = json.loads(Arguments(one_property(schema)).argument("a").as_json(text, literals))
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "array"}, "(1, 2)", "(1, 2)"),
        (INTEGER, "4.0", 4.0),
        (INTEGER, "x", "x"),
        (INTEGER, "NaN", "NaN"),
        (INTEGER, '{"k": 1}', {"k": 1}),
        ({"anyOf": [TEXT, {"type": "boolean"}]}, "False", "False"),
        ({"enum": [1, "1"]}, "1", 1),
        ({"const": True}, "1", 1),
        ({"type": ["integer", "string"]}, "1.5", "1.5"),
        ({"$ref": "#/$defs/none"}, "4", 4),
        ({"anyOf": [{"$ref": "#/properties/a"}, TEXT]}, "4", "4"),
        ({}, '"x"', "x"),
        ({}, "{'a': [1, None]}", {"a": [1, None]}),
        ({}, "True", "True"),
        ({"enum": ["x", 5, None, True]}, "True", True),
        ({"enum": ["x", 5, None, "None"]}, "None", "None"),
    ],
)
def test_what_no_grammar_held_is_read_as_near_as_can_be(schema: Any, text: str, value: Any) -> None:
    """Typed as the schema says, else as JSON, else as a text."""
    read = json.loads(Arguments(one_property(schema)).argument("a").as_json(text))
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize("form", TAGS)
def test_types_do_not_depend_on_another_alternative(form: str) -> None:
    """An alternative that lists a key for others only says nothing of its type."""
    schema: JsonObject = {
        "type": "object",
        "anyOf": [object_schema(k=TEXT), object_schema(n=INTEGER)],
    }
    content, calls = read_reply(Tools({"f": schema}, FORMS[form]), [call_text(form, {"k": "4"})])
    assert not content and calls == [("f", '{"k": "4"}')]


NEVER = {"type": "string", "pattern": r"[^\s\S]"}


@pytest.mark.parametrize("form", [*PAIRS, "Hermes, Qwen3"])
@pytest.mark.parametrize(
    "schema",
    [
        one_property(False, required=["a"]),
        one_property(NEVER, required=["a"]),
        one_property({"$ref": "#/properties/a"}, required=["a"]),
        one_property({**INTEGER, "minimum": 5, "maximum": 4}, required=["a"]),
        one_property({**TEXT, "pattern": "^a$", "minLength": 3}, required=["a"]),
        {"type": "object", "allOf": [{"type": "string"}]},
    ],
)
def test_arguments_that_no_value_fits_are_refused(form: str, schema: Any) -> None:
    """Where a call has to come; where it may come, they are passed over."""
    with pytest.raises(UsageError, match="cannot be used"):
        is_accepted(Tools({"f": schema}, FORMS[form], required=True).grammar, "")
    tools = Tools(
        {"f": schema, "g": one_property(INTEGER)}, FORMS[form], tokens={FORMS[form].opening: 300}
    )
    if tools.grammar is not None:
        is_accepted(tools.grammar, "")


def test_many_alternatives_are_held_together() -> None:
    """More than can be told apart: each key is optional, and of a type that one of them gives
    it.
    """
    form = "Qwen3-Coder, Qwen3.5"
    branches: list[Json] = [
        {**object_schema(**{f"k{n}": INTEGER}), "required": [f"k{n}"]} for n in range(40)
    ]
    grammar = Tools(
        {"f": {"type": "object", "anyOf": branches}}, FORMS[form], required=True
    ).grammar
    assert is_accepted(grammar, call_text(form, {"k3": 3})) and is_accepted(
        grammar, call_text(form, {})
    )
    assert not is_accepted(grammar, call_text(form, {"k3": "x"}))


MANY: Values = [
    TEXT,
    INTEGER,
    {"type": "boolean"},
    {"type": "array", "items": TEXT},
    {"enum": ["a", "b"]},
    object_schema(x=TEXT, y=INTEGER),
]


def many_functions() -> dict[str, Any]:
    """Return 128 functions of 20 arguments, as agents send them that know many servers of tools."""
    functions = {}
    for number in range(128):
        properties = {
            f"a_{number}_{index}": {**MANY[index % len(MANY)], "description": "Words. " * 40}
            for index in range(20)
        }
        functions[f"f{number}"] = object_schema(**properties)
    return functions


@pytest.mark.covers(count=3)
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.channels])
def test_many_functions_are_held(form: str) -> None:
    """Shared rules are written once, without descriptions, and the grammar is cached."""
    tools = Tools(many_functions(), FORMS[form], required=True)
    grammar = tools.grammar
    assert grammar is Tools(many_functions(), FORMS[form], required=True).grammar
    assert "Words" not in grammar.text and len(grammar.text) < 250_000
    call = call_text(form, {"a_127_1": 4}, name="f127")
    assert is_accepted(grammar, call)
    assert not is_accepted(grammar, call_text(form, {"a_127_1": "x"}, name="f127"))
    assert not is_accepted(grammar, call_text(form, {"a_126_1": 4}, name="f127"))


@pytest.mark.parametrize("place", ["key", "value"])
def test_patterns_that_backtrack_take_no_time(place: str) -> None:
    """Python's expressions would try for ever whether these keys and values match."""
    word = "a" * 60 + "!"
    endless = "^(a+)+$"
    schema = {**object_schema(**{word: TEXT}), "patternProperties": {endless: INTEGER}}
    if place == "value":
        schema = one_property({"enum": [word, "a"], "pattern": endless})
    grammar = Tools({"f": schema}, FORMS["Qwen3-Coder, Qwen3.5"], required=True).grammar
    written_value = {"a": "a"} if place == "value" else {word: "x"}
    assert is_accepted(grammar, call_text("Qwen3-Coder, Qwen3.5", written_value))


def test_mark_of_messages_begins_no_grammar() -> None:
    """Where the mark is one token the header of the message stands before it."""
    form = FORMS["Muse-Glimmer"]
    tools = Tools({"f": one_property(TEXT)}, form, tokens={form.opening: 300})
    assert tools.trigger_token is None and tools.grammar is None
    assert (
        Tools(
            {"f": one_property(TEXT)}, form, strict=True, tokens={form.opening: 300}
        ).grammar.after
        is None
    )


TEMPLATES: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("Seed-OSS", TEXT, "\n<function=f>\n<parameter=a>x</parameter>\n</function>\n", {"a": "x"}),
    (
        "Seed-OSS",
        {"type": "boolean"},
        "<function=f><parameter=a>True</parameter></function>",
        {"a": True},
    ),
    ("Seed-OSS", OPTIONAL, "<function=f><parameter=a>None</parameter></function>", {"a": None}),
    (
        "Seed-OSS",
        {"type": "array", "items": TEXT},
        "<function=f><parameter=a>['b', \"it's\", 'ä\\n\\x07\\u200b']</parameter></function>",
        {"a": ["b", "it's", "ä\n\x07\u200b"]},
    ),
    (
        "Seed-OSS",
        {"type": "object"},
        """<function=f><parameter=a>{'b': {"it's": [1, None, True]}, 'c': ''}</parameter></function>""",
        {"a": {"b": {"it's": [1, None, True]}, "c": ""}},
    ),
    (
        "Seed-OSS",
        {"anyOf": [TEXT, {"type": "array", "items": INTEGER}]},
        "<function=f><parameter=a>[1, 2]</parameter></function>",
        {"a": [1, 2]},
    ),
    (
        "Seed-OSS",
        {"const": {"b": ["x"]}},
        "<function=f><parameter=a>{'b': ['x']}</parameter></function>",
        {"a": {"b": ["x"]}},
    ),
    (
        "Qwen3-Coder, Qwen3.5",
        OPTIONAL,
        "<function=f><parameter=a>\nNone\n</parameter></function>",
        {"a": None},
    ),
    (
        "Qwen3-Coder, Qwen3.5",
        {"anyOf": [{**TEXT, "pattern": "^[a-z]$"}, NULL]},
        "<function=f><parameter=a>\nNone\n</parameter></function>",
        {"a": None},
    ),
    (
        "Qwen3-Coder, Qwen3.5",
        {},
        "<function=f><parameter=a>\nTrue\n</parameter></function>",
        {"a": True},
    ),
    (
        "Qwen3-Coder, Qwen3.5",
        TEXT,
        "<function=f><parameter=a>\nNone\n</parameter></function>",
        {"a": "None"},
    ),
    (
        "GLM-4.5, GLM-4.7",
        OPTIONAL,
        "f<arg_key>a</arg_key><arg_value>None</arg_value>",
        {"a": "None"},
    ),
    (
        "Seed-OSS",
        {**TEXT, "maxLength": 2},
        "<function=f><parameter=a>xy</parameter></function>",
        {"a": "xy"},
    ),
    (
        "Qwen3-Coder, Qwen3.5",
        {"enum": ["x"]},
        "<function=f><parameter=a>x</parameter></function>",
        {"a": "x"},
    ),
    ("GLM-4.5, GLM-4.7", INTEGER, "f<arg_key>a</arg_key><arg_value>4</arg_value>", {"a": 4}),
    (
        "Command R7B, A",
        INTEGER,
        '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 4}}\n]',
        {"a": 4},
    ),
    ("Mistral", INTEGER, 'f[CALL_ID]call00000[ARGS]{"a": 4}', {"a": 4}),
    (
        "Mistral before 2025",
        INTEGER,
        '[{"name": "f", "arguments": {"a": 4}, "id": "call00000"}]',
        {"a": 4},
    ),
    (
        "Hermes, Qwen3",
        {"type": "array", "items": {**TEXT, "maxLength": 3}},
        r"""{"name": "f", "arguments": {"a": ["\u00e4", "\ud83d\ude42"]}}""",
        {"a": ["ä", "🙂"]},
    ),
    ("LFM2", TEXT, r'[f(a="\u00e4")]', {"a": "ä"}),
    ("LFM2", TEXT, "[f(a='x\ny')]", {"a": "x\ny"}),
    ("LFM2", {**TEXT, "pattern": "^x"}, "[f(a='xy')]", {"a": "xy"}),
    ("LFM2", {**TEXT, "maxLength": 4}, "[f(a='it's')]", {"a": "it's"}),
    ("LFM2", {"enum": ["it's", "d\ne"]}, "[f(a='it's')]", {"a": "it's"}),
    ("LFM2", {"enum": ["it's", "d\ne"]}, "[f(a='d\ne')]", {"a": "d\ne"}),
    (
        "LFM2",
        object_schema(k={"type": "array", "items": TEXT}, n={"type": "boolean"}),
        "[f(a={'k': ['x', \"y\"], 'n': True})]",
        {"a": {"k": ["x", "y"], "n": True}},
    ),
    (
        "Gemma 4",
        {"type": "array", "items": {"type": ["integer", "null"]}},
        "call:f{a:[1,None]}",
        {"a": [1, None]},
    ),
    (
        "Gemma 4",
        {"const": {"b": ["x"]}},
        f"call:f{{a:{{b:[{QUOTE}x{QUOTE}]}}}}",
        {"a": {"b": ["x"]}},
    ),
]
"""A form, the schema of `a`, a call as a published template writes it, and its arguments."""


@pytest.mark.parametrize(("form", "schema", "call", "arguments"), TEMPLATES)
def test_what_published_templates_write_is_held(
    form: str, schema: Any, call: str, arguments: dict[str, Any]
) -> None:
    """Some write other blanks between marks than others of the same form, or Python's values."""
    shape = FORMS[form]
    text = f"{shape.opening}{call}{shape.closing}"
    tools = Tools({"f": one_property(schema)}, shape, required=True)
    assert is_accepted(tools.grammar, text)
    content, calls = read_reply(tools, list(text))
    assert not content.strip() and [json.loads(call) for _, call in calls] == [arguments]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "array", "items": INTEGER}, "['x']"),
        (object_schema(k=INTEGER), "{'k': 'x'}"),
        (object_schema(k=INTEGER), "{'j': 1}"),
        ({"type": "object", "additionalProperties": INTEGER}, "{'j': 'x'}"),
        ({**object_schema(k=TEXT), "additionalProperties": INTEGER}, "{'j': 1, 'k': 2}"),
        ({"type": "array"}, "['x'"),
        ({"type": "array"}, "['\\ud800']"),
    ],
)
def test_values_of_python_are_held_to_their_schemas(schema: Any, value: str) -> None:
    """A grammar that lets any literal through would hold nothing."""
    text = (
        f"<seed:tool_call><function=f><parameter=a>{value}</parameter></function></seed:tool_call>"
    )
    assert not is_accepted(
        Tools({"f": one_property(schema)}, FORMS["Seed-OSS"], required=True).grammar, text
    )


CODE = {**object_schema(code=TEXT, n=INTEGER), "required": ["code"], "additionalProperties": False}
RUN = {"run": CODE, "now": object_schema()}
BARE: list[tuple[str, list[tuple[str, JsonObject]]]] = [
    ("[run(code='it's')]", [("run", {"code": "it's"})]),
    ("[run(code='print('x')', n=2)]", [("run", {"code": "print('x')", "n": 2})]),
    ("[run(code='f('a', sep=' ')')]", [("run", {"code": "f('a', sep=' ')"})]),
    (
        "[run(code='a['b')]\n'), run(code='')]",
        [("run", {"code": "a['b')]\n"}), ("run", {"code": ""})],
    ),
    (
        "[run(code='x'y'), now(), run(code=\"'\")]",
        [("run", {"code": "x'y"}), ("now", {}), ("run", {"code": "'"})],
    ),
    ("[now(), run(code='say \"hi')]", [("now", {}), ("run", {"code": 'say "hi'})]),
]
"""Calls whose texts hold quotes and lines as they are, as LFM2.5's template writes them."""


@pytest.mark.parametrize(("text", "expected"), BARE)
def test_texts_with_bare_quotes_are_read(text: str, expected: Any, model: Path) -> None:
    """They end where another argument, a call or the end of all follows, for grammar and reader
    alike.
    """
    form = FORMS["LFM2"]
    reply = f"{form.opening}{text}{form.closing}"
    required_tools = Tools(RUN, form, required=True)
    assert is_accepted(required_tools.grammar, reply), "marks are texts"
    write_tokenizer(model, (*SPECIALS, form.opening, form.closing))
    tokenizer = ModelFolder.from_path(model).tokenizer
    tokens = {mark: tokenizer.token_to_id(mark) for mark in (form.opening, form.closing)}
    by_tokens = Tools(RUN, form, required=True, tokens=tokens).grammar
    ids = tokenizer.encode(reply, parse_special=True)
    assert is_allowed(GrammarCompiler(tokenizer, 320), by_tokens, ids), "marks are tokens"
    for pieces in ([reply], list(reply)):
        content, calls = read_reply(required_tools, pieces)
        assert not content and [(name, json.loads(call)) for name, call in calls] == expected


@pytest.mark.parametrize(
    "text",
    [
        "[run()]",
        "[run(n='it's')]",
        "[run(code='x', sep=1)]",
        "[run(code='x', n='y')]",
        "[run(code='x'), other()]",
        "[run(code='x'y)]",
    ],
)
def test_what_stands_behind_a_bare_text_is_held(text: str) -> None:
    form = FORMS["LFM2"]
    assert not is_accepted(
        Tools(RUN, form, required=True).grammar, f"{form.opening}{text}{form.closing}"
    )
