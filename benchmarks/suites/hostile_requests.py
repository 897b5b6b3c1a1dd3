"""Hostile requests: schemas, tools, histories and fields, each with its allowed outcomes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]
Check = Callable[[Any], bool]
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COMPLETIONS = "/v1/completions"


class Hostile(NamedTuple):
    """A request, and its allowed outcomes: a refusal always is one."""

    name: str
    path: str
    body: Any
    refuse: bool = False
    """True if a refusal is the only allowed outcome."""
    holds: Check | None = None
    """The check that a complete answer's JSON has to satisfy."""
    named: str = ""
    """The text that a refusal has to contain."""


def _ask(**fields: Any) -> Json:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 24}
    return {**body, "temperature": 1, "seed": 1, **fields}


def _object(properties: Mapping[str, Any], *required: str, **keywords: Any) -> Json:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        **keywords,
    }


# -- schemas -----------------------------------------------------------------------------------------

LOOP = {"$defs": {"l": {"$ref": "#/$defs/l"}}}
LOOPED = {"$ref": "#/$defs/l"}
NEVER: Mapping[str, Json] = {
    "a reference to itself": {"$ref": "#"},
    "a cycle of two": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "a required cycle": {**_object({"a": LOOPED}, "a"), **LOOP},
    "a required cycle, closed": {**_object({"a": LOOPED}, "a", additionalProperties=False), **LOOP},
    "an endless object": {
        "$ref": "#/$defs/n",
        "$defs": {"n": _object({"next": {"$ref": "#/$defs/n"}}, "next")},
    },
    "an endless array": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/n"}}},
    },
    "allOf of itself": {"allOf": [{"$ref": "#"}]},
    "anyOf of itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "a reference to nowhere": {"$ref": "#/$defs/none"},
    "a reference outside": {"$ref": "https://example.com/schema.json"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "a false property that is required": _object({"a": False}, "a"),
    "minimum over maximum": {"type": "integer", "minimum": 5, "maximum": 4},
    "minimum over maximum, deep": _object(
        {"a": {"type": "integer", "minimum": 5, "maximum": 4}}, "a"
    ),
    "no integer between": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    "minLength over maxLength": {"type": "string", "minLength": 5, "maxLength": 4},
    "minItems over maxItems": {"type": "array", "minItems": 5, "maxItems": 4},
    "minProperties over maxProperties": {"type": "object", "minProperties": 5, "maxProperties": 4},
    "items that are false, but needed": {"type": "array", "items": False, "minItems": 1},
    "a pattern shorter than minLength": {"type": "string", "pattern": "^a$", "minLength": 3},
    "a pattern of nothing": {"type": "string", "pattern": "[^\\s\\S]"},
    "an enum of another type": {"type": "integer", "enum": ["a"]},
    "a const of another type": {"type": "integer", "const": "a"},
    "an empty enum": {"enum": []},
    "an empty anyOf": {"anyOf": []},
    "types that exclude each other": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "required, but closed": _object({}, "a", additionalProperties=False),
    "not anything": {"not": {}},
    "no type": {"type": []},
    "an unknown type": {"type": "hiccup"},
    "a type that is a number": {"type": 3},
    "properties that are a list": {"type": "object", "properties": []},
    "a property that is a text": {"type": "object", "properties": {"a": "string"}},
    "required that is a text": {"type": "object", "required": "a"},
    "items that are a number": {"type": "array", "items": 3},
    "a pattern that is broken": {"type": "string", "pattern": "("},
    "a negative minLength": {"type": "string", "minLength": -1},
    "a multiple of zero": {"type": "integer", "multipleOf": 0},
    "$ref that is a number": {"$ref": 3},
    "$defs that are a list": {"$ref": "#/$defs/0", "$defs": [3]},
}
"""Schemas that no answer satisfies, and values that are no schema."""


def _nested(depth: int, kind: str) -> Json:
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        if kind == "object":
            schema = _object({"a": schema}, "a")
        elif kind == "array":
            schema = {"type": "array", "items": schema}
        elif kind == "anyOf":
            schema = {"anyOf": [schema, {"type": "null"}]}
        else:
            schema = {"allOf": [schema]}
    return schema


def _tree(depth: int, width: int, key: str) -> Json:
    """Return a schema of which each level refers to the next one `width` times."""
    defs: Json = {f"l{depth}": {"type": "integer"}}
    for level in range(depth):
        below = {"$ref": f"#/$defs/l{level + 1}"}
        if key == "properties":
            defs[f"l{level}"] = _object({f"p{at}": below for at in range(width)}, "p0")
        else:
            defs[f"l{level}"] = {key: [below] * width}
    return {"$ref": "#/$defs/l0", "$defs": defs}


PATTERNS = (
    "(a+)+$",
    "(a|a)*b",
    "(.*)*x",
    ".*.*.*.*.*.*x",
    "(?:.?){40}",
    "(a{1,100}){1,100}",
    "((a{0,99}){0,99}){0,99}",
    "[a-z]{1,100000}",
    "(x+x+)+y",
    "(?=a)b",
    "(?!a)b",
    "(?<=a)b",
    "(a)\\1",
    "^(?i)abc$",
    "\\p{L}+",
    "\\d{9999}",
    "[\\s\\S]*",
    "(|a|b|)*",
    "a**",
    "\\u{10FFFF}",
    "(a?){500}a{500}",
    "^$",
    "$^",
    "\\bword\\b",
    "(" * 200 + ")" * 200,
)


def large_schemas() -> Iterator[tuple[str, Json]]:
    """Yield schemas that are deep, wide or exponential; some answer may satisfy them."""
    for depth in (8, 20, 31, 60, 200):
        for kind in ("object", "array", "anyOf", "allOf"):
            yield f"{kind} nested {depth} times", _nested(depth, kind)
    for key in ("properties", "allOf", "anyOf", "oneOf"):
        for depth, width in ((4, 2), (12, 2), (25, 2), (60, 2), (6, 10), (20, 10)):
            yield f"{width} to the power of {depth} by {key}", _tree(depth, width, key)
    for count in (100, 2000, 20_000):
        yield f"an enum of {count}", {"enum": [f"value {at}" for at in range(count)]}
        yield f"an enum of {count} numbers", {"enum": [*range(count)]}
        yield (
            f"an enum of {count} objects",
            {"enum": [{"a": at, f"k{at}": 1} for at in range(count)]},
        )
        yield f"an object of {count} in const", {"const": {f"k{at}": at for at in range(count)}}
        yield (
            f"{count} that are required",
            {"type": "object", "required": [*map(str, range(count))]},
        )
        yield f"{count} properties", _object({f"p{at}": {"type": "integer"} for at in range(count)})
        yield f"anyOf of {count}", {"anyOf": [{"const": at} for at in range(count)]}
    for size in (1000, 100_000, 10**9, 10**30):
        yield f"minLength {size}", {"type": "string", "minLength": size}
        yield f"maxLength {size}", {"type": "string", "maxLength": size}
        yield f"minItems {size}", {"type": "array", "items": {"type": "null"}, "minItems": size}
        yield f"maximum {size}", {"type": "integer", "minimum": -size, "maximum": size}
        yield f"minProperties {size}", {"type": "object", "minProperties": size}
    for step in (0.1, 1e-9, 7, 99_991, 10**40, 1.5e300):
        yield f"multipleOf {step}", {"type": "number", "multipleOf": step}
    for pattern in PATTERNS:
        yield f"pattern {pattern[:40]}", {"type": "string", "pattern": pattern}
        yield (
            f"patternProperties {pattern[:40]}",
            {
                "type": "object",
                "patternProperties": {pattern: {"type": "integer"}},
            },
        )
    yield (
        "patterns in allOf",
        {"allOf": [{"type": "string", "pattern": f"a{{{n}}}"} for n in range(40)]},
    )
    for name in ("", "\0", '"', "\\", "é" * 500, "</tool_call>", "\ud800", "a" * 60_000):
        yield f"a property named {name[:12]!r}", _object({name: {"type": "integer"}}, name)
    yield (
        "a cycle that ends",
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": _object({"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}})},
        },
    )


SATISFIED: Mapping[str, tuple[Json, Check]] = {
    "const": ({"const": 42}, lambda value: value == 42),
    "a deep enum": (
        _object({"a": {"enum": ["x", 1]}}, "a", additionalProperties=False),
        lambda value: value in ({"a": "x"}, {"a": 1}),
    ),
    "bounds": (
        {"type": "integer", "minimum": 3, "maximum": 5},
        lambda value: value in (3, 4, 5),
    ),
    "a pattern": (
        {"type": "string", "pattern": "^ab?$"},
        lambda value: value in ("a", "ab"),
    ),
    "an optional cycle": (
        {**_object({"a": LOOPED}, additionalProperties=False), **LOOP},
        lambda value: value == {},
    ),
    "an optional false property": (
        _object({"a": False}, additionalProperties=False),
        lambda value: value == {},
    ),
    "a list of a cycle": ({"type": "array", "items": LOOPED, **LOOP}, lambda value: value == []),
    "a cycle or an integer": (
        {"anyOf": [LOOPED, {"type": "integer", "minimum": 1, "maximum": 2}], **LOOP},
        lambda value: value in (1, 2),
    ),
    "maxItems 0": ({"type": "array", "maxItems": 0}, lambda value: value == []),
}
"""Schemas whose complete answers can be checked by hand."""


def _formats(name: str, schema: Json, **how: Any) -> Iterator[Hostile]:
    """Yield a schema as the format of each API, as a tool's parameters and as a property of
    them.
    """
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    yield Hostile(f"{name}, as a format", CHAT, _ask(response_format=form), **how)
    only_refused = {"refuse": how.get("refuse", False)}
    function = {"name": "f", "parameters": schema}
    if schema.get("type", "object") != "object":
        function["parameters"] = _object({"x": schema}, "x")
    defs = schema.get("$defs")
    if defs is not None and function["parameters"] is not schema:
        inner = {key: value for key, value in schema.items() if key != "$defs"}
        function["parameters"] = {**_object({"x": inner}, "x"), "$defs": defs}
    tool = {"type": "function", "function": function}
    body = _ask(tools=[tool], tool_choice="required")
    yield Hostile(f"{name}, as a tool", CHAT, body, **only_refused)


def schema_requests() -> Iterator[Hostile]:
    """Yield hostile schemas as formats and as tools."""
    for name, schema in NEVER.items():
        yield from _formats(name, schema, refuse=True)
    for name, schema in large_schemas():
        yield from _formats(name, schema)
    for name, (schema, holds) in SATISFIED.items():
        yield from _formats(name, schema, holds=holds)


# -- tools and histories -----------------------------------------------------------------------------

NAMES = (
    "",
    " ",
    "a b",
    "a" * 65,
    "a" * 10_000,
    "../../etc/passwd",
    "f\n",
    "f\0",
    'f"',
    "f'",
    "f</tool_call>",
    "<|im_end|>",
    "{{ 7*7 }}",
    "f(x)",
    "é",
    "f/*",
    "f|g",
    "f{0,99}",
    "%n",
    "$(touch /tmp/spd-hostile)",
    "[ARGS]",
    "f;g",
)
ODD: Sequence[Any] = (None, 0, -1, True, [], {}, "", "x", [[]], [None], {"a": None}, 1e308, "\0")


def tool_requests() -> Iterator[Hostile]:
    """Yield tools with hostile names, parameters and choices."""
    for name in NAMES:
        function = {"name": name, "parameters": _object({"a": {"type": "string"}}, "a")}
        tool = {"type": "function", "function": function}
        body = _ask(tools=[tool], tool_choice="required")
        yield Hostile(f"a tool named {name[:30]!r}", CHAT, body, refuse=True, named="name")
        flat = {"type": "function", **function}
        body = {"input": "x", "max_output_tokens": 8, "tools": [flat], "tool_choice": "required"}
        yield Hostile(f"a tool of Responses named {name[:30]!r}", RESPONSES, body, refuse=True)
        mine = {"name": name, "input_schema": function["parameters"]}
        base = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
        body = {**base, "tools": [mine], "tool_choice": {"type": "any"}}
        yield Hostile(f"a tool of Messages named {name[:30]!r}", MESSAGES, body, refuse=True)
    for value in ODD:
        tool = {"type": "function", "function": {"name": "f", "parameters": value}}
        is_schema = value is None or isinstance(value, dict)
        body = _ask(tools=[tool], tool_choice="required")
        yield Hostile(f"parameters {value!r}", CHAT, body, refuse=not is_schema)
    for count in (129, 1000):
        tools = [
            {"type": "function", "function": {"name": f"f{at}", "parameters": _object({})}}
            for at in range(count)
        ]
        body = _ask(tools=tools, tool_choice="required")
        yield Hostile(f"{count} tools", CHAT, body, refuse=True, named="tools")


def history_requests() -> Iterator[Hostile]:
    """Yield histories that are odd or large."""
    user = {"role": "user", "content": "x"}
    for value in ODD:
        for field in ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"):
            message = {"role": "assistant", "content": "x", field: value}
            body = _ask(messages=[user, message, user])
            yield Hostile(f"a message with {field} {value!r}", CHAT, body)
        yield Hostile(f"messages {value!r}", CHAT, _ask(messages=value), refuse=True)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": value}}
        messages = [user, {"role": "assistant", "content": None, "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "c", "content": "r"})
        yield Hostile(f"arguments {value!r}", CHAT, _ask(messages=messages))
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    yield Hostile("a deep content", CHAT, _ask(messages=[{"role": "user", "content": deep}]), True)
    nested = json.dumps({"a": 1})
    for _ in range(8):
        nested = json.dumps({"a": nested})
    for arguments in (
        "[" * 5000,
        "{" * 5000,
        '{"a":' * 500 + "1" + "}" * 500,
        nested,
        "9" * 5000,
    ):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [user, {"role": "assistant", "content": None, "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "c", "content": "r"})
        yield Hostile(f"arguments {arguments[:12]!r}…", CHAT, _ask(messages=messages))
    for count in (1000, 20_000):
        yield Hostile(f"{count} messages", CHAT, _ask(messages=[user] * count))
    orphan = {"role": "tool", "tool_call_id": "none", "content": "r"}
    yield Hostile("a result without a call", CHAT, _ask(messages=[user, orphan]))
    yield Hostile("nothing but a result", CHAT, _ask(messages=[orphan]))


# -- fields ------------------------------------------------------------------------------------------


WRONG_NUMBERS: Sequence[Any] = ("x", [], {}, [1], "1")
WRONG_WHOLES: Sequence[Any] = (1.5, 10**40, -(10**40))
BEYOND: Sequence[Any] = (1e300, -1e300, math.inf, math.nan)
WRONG_FLAGS: Sequence[Any] = ("x", [1], {"a": 1}, 2)
WRONG_OBJECTS: Sequence[Any] = ("x", [1], 3, True)
BODIES = (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000, b"3")


def _has_logprobs(answer: Any) -> bool:
    return bool(answer["output"][0]["content"][0].get("logprobs"))


def _wrong_field(field: str, value: object) -> Hostile:
    """Return a chat request with one wrong field, which the refusal must name."""
    return Hostile(
        name=f"{field} {value!r}",
        path=CHAT,
        body=_ask(**{field: value}),
        refuse=True,
        holds=None,
        named=field,
    )


def field_requests() -> Iterator[Hostile]:
    """Yield fields of other types, beyond their ranges, and some that were passed over in
    silence.
    """
    numbers = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    wholes = ("max_tokens", "max_completion_tokens", "top_k", "seed", "n", "top_logprobs")
    flags = ("stream", "logprobs", "ignore_eos", "parallel_tool_calls")
    objects = ("logit_bias", "response_format", "stream_options", "chat_template_kwargs")
    for field in (*numbers, *wholes):
        for value in WRONG_NUMBERS:
            yield _wrong_field(field, value)
    for field in wholes:
        for value in WRONG_WHOLES:
            yield _wrong_field(field, value)
    for field in numbers:
        for value in BEYOND:
            yield Hostile(f"{field} {value!r}", CHAT, _ask(**{field: value}), True)
    for field in flags:
        for value in WRONG_FLAGS:
            yield _wrong_field(field, value)
    for field in objects:
        for value in WRONG_OBJECTS:
            yield _wrong_field(field, value)
    for field in ("functions", "temprature", "best_of", "audio", "modalities"):
        yield Hostile(
            name=field, path=CHAT, body=_ask(**{field: ["x"]}), refuse=True, holds=None, named=field
        )
    schema = _object({"zz": {"const": 42}}, "zz", additionalProperties=False)
    form = {"type": "json_object", "schema": schema}
    body = _ask(response_format=form)
    yield Hostile("json_object with a schema", CHAT, body, holds=lambda value: value == {"zz": 42})
    yield Hostile("top_logprobs without logprobs", CHAT, _ask(top_logprobs=3), True)
    options = {"include_usage": True}
    yield Hostile("stream_options without stream", CHAT, _ask(stream_options=options), True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = _ask(stream=True, stream_options=options)
    yield Hostile("continuous_usage_stats", CHAT, streamed, holds=None)
    base = {"input": "x", "max_output_tokens": 4}
    named = "message.output_text.logprobs"
    included = {**base, "include": [named], "top_logprobs": 2}
    yield Hostile("include log-probabilities", RESPONSES, included, holds=_has_logprobs)
    yield Hostile("two limits", CHAT, _ask(max_tokens=2, max_completion_tokens=9))
    for field in ("previous_response_id", "conversation", "prompt", "background"):
        yield Hostile(
            name=field,
            path=RESPONSES,
            body={**base, field: "x"},
            refuse=True,
            holds=None,
            named=field,
        )
    for field in ("suffix", "best_of", "echo"):
        yield Hostile(field, COMPLETIONS, {"prompt": "x", "max_tokens": 2, field: 3}, True)
    for raw in BODIES:
        for path in (CHAT, RESPONSES, MESSAGES, COMPLETIONS):
            yield Hostile(f"a body {raw[:8]!r} to {path}", path, raw, True)


def all_requests() -> Iterator[tuple[str, Hostile]]:
    """Yield each row of the report with its requests."""
    rows = {
        "schemas": schema_requests,
        "tools": tool_requests,
        "histories": history_requests,
        "fields": field_requests,
    }
    for row, requests in rows.items():
        for request in requests():
            yield row, request
