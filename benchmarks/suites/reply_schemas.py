"""Schemas of a function's arguments, each with arguments that it allows, for scripted replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Arguments = Mapping[str, Any]
TEXT = {"type": "string"}
INTEGER = {"type": "integer"}

TEXTS = (
    "plain",
    "two words",
    "a\nb\n\nc",
    "  blanks around  ",
    'a "quoted" word',
    "it's",
    "<b>&amp;</b> x < y",
    "back\\slash \\n",
    "ä 世界 🙂",
    "{braces}",
    "[1, x]",
)
"""Texts that are no JSON, so that no form of pairs can take them for anything else."""
LIKE_JSON = ("4", "4.50", "true", "null", '{"a": 1}', "[1, 2]", '"x"')
"""Texts that are JSON, too: a form of pairs has to know from the schema that they are texts."""
OBJECTS: Sequence[Mapping[str, Any]] = (
    {},
    {"a": 1},
    {"a": {"b": [1, None, True, 0.5, "x y"]}, "c": ""},
)


class Case(NamedTuple):
    """A schema of arguments, and arguments that it allows."""

    schema: Mapping[str, Any]
    values: Sequence[Arguments]


def _object(properties: Mapping[str, Any], *required: str, **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **keywords}


def _each(values: Sequence[Any], name: str = "k") -> list[Arguments]:
    return [{name: value} for value in values]


def _property(schema: Mapping[str, Any], values: Sequence[Any], **keywords: Any) -> Case:
    """Return a case of one property."""
    return Case(_object({"k": schema}, "k", **keywords), _each(values))


MIXED: Sequence[Arguments] = (
    {},
    {"k": "v"},
    {"k": "two words", "j": "x\ny"},
    {"k": 1},
    {"k": {"a": [1, None]}},
    {"k": True, "j": [1, "x"]},
)
"""Arguments of no schema."""
ITEM = {"$defs": {"Item": _object({"k": TEXT}, "k")}}
OTHER = {"$defs": {"Name": TEXT}}
LINKED = {
    "Node": {
        "type": "object",
        "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/Node"}},
        "additionalProperties": False,
    }
}
CASES: Mapping[str, Case] = {
    "text": _property(TEXT, (*TEXTS, "", *LIKE_JSON)),
    "integer": _property(INTEGER, (0, -3, 12345678901234567890)),
    "number": _property({"type": "number"}, (0.5, -2, 1e30)),
    "boolean": _property({"type": "boolean"}, (True, False)),
    "array": _property({"type": "array", "items": TEXT}, ([], ["a", "b c"], ["4", "ä\n"])),
    "free-form object in a property": _property({"type": "object"}, OBJECTS),
    "several properties": Case(
        _object({"a": TEXT, "b": INTEGER, "c": {"type": "boolean"}}, "a"),
        ({"a": "x"}, {"a": "x", "b": 2}, {"a": "4", "b": 2, "c": True}, {"a": "\n", "c": False}),
    ),
    "no parameters": Case({"type": "object", "properties": {}}, ({},)),
    "free-form object": Case({"type": "object"}, MIXED),
    "no schema": Case({}, MIXED),
    "additionalProperties of texts": Case(
        {"type": "object", "additionalProperties": TEXT},
        ({}, *_each(TEXTS[:6]), *_each(LIKE_JSON), {"a": "1", "b_c": "2"}),
    ),
    "additionalProperties of integers": Case(
        {"type": "object", "additionalProperties": INTEGER}, ({}, {"a": 1}, {"a": 1, "b": -2})
    ),
    "additionalProperties beside properties": Case(
        _object({"a": INTEGER}, additionalProperties=TEXT),
        ({"a": 1}, {"a": 1, "b": "4"}, {"c": "two words", "d": "true"}),
    ),
    "additionalProperties true": Case(
        _object({"a": INTEGER}, additionalProperties=True), ({"a": 1}, {"a": 1, "b": "x y"})
    ),
    "additionalProperties false": Case(
        _object({"a": TEXT}, additionalProperties=False), ({"a": "4"}, {})
    ),
    "patternProperties": Case(
        {"type": "object", "patternProperties": {"^x_": INTEGER, "^t_": TEXT}},
        ({"x_a": 1}, {"t_a": "4"}, {"x_a": 1, "t_b": "two words"}),
    ),
    "$ref at the top": Case({"$ref": "#/$defs/Item", **ITEM}, _each(("v", "4", "x\ny"))),
    "$ref at the top with a type": Case(
        {"type": "object", "$ref": "#/$defs/Item", **ITEM}, _each(("v", "true"))
    ),
    "allOf at the top": Case(
        {"type": "object", "allOf": [_object({"k": TEXT}, "k"), _object({"j": INTEGER})]},
        ({"k": "v"}, {"k": "4", "j": 3}),
    ),
    "allOf of references": Case(
        {"allOf": [{"$ref": "#/$defs/Item"}, _object({"j": TEXT})], **ITEM},
        ({"k": "v"}, {"k": "4", "j": "5"}),
    ),
    "anyOf at the top": Case(
        {"type": "object", "anyOf": [_object({"k": TEXT}, "k"), _object({"j": INTEGER}, "j")]},
        ({"k": "v"}, {"k": "4"}, {"j": 3}),
    ),
    "oneOf at the top": Case(
        {"type": "object", "oneOf": [_object({"k": TEXT}, "k"), _object({"j": INTEGER}, "j")]},
        ({"k": "two words"}, {"j": 3}),
    ),
    "a property by $ref to a text": _property(
        {"$ref": "#/$defs/Name"}, (*TEXTS[:5], *LIKE_JSON), **OTHER
    ),
    "a property by $ref to itself": _property(
        {"$ref": "#/$defs/Node"}, ({"v": 1}, {"v": 1, "next": {"v": 2}}), **{"$defs": LINKED}
    ),
    "a property of allOf": _property({"allOf": [TEXT, {"minLength": 1}]}, ("v", "4", "x\ny")),
    "Optional[str] by anyOf": _property(
        {"anyOf": [TEXT, {"type": "null"}]}, (*TEXTS, "4", "true", '{"a": 1}', None)
    ),
    "Optional[str] by types": _property(
        {"type": ["string", "null"]}, (*TEXTS[:6], "4", "[1, 2]", None)
    ),
    "Optional[str] with a default": _property(
        {"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "K"}, ("v", "4", None)
    ),
    "Optional[int]": _property({"anyOf": [INTEGER, {"type": "null"}]}, (4, -1, None)),
    "an integer or a text": _property({"anyOf": [INTEGER, TEXT]}, (4, "four", "x\ny")),
    "enum of texts": _property({**TEXT, "enum": ["a", "b c", "4", "true"]}, ("a", "b c", "4")),
    "enum without type": _property({"enum": ["a", "b c", "d\ne"]}, ("a", "b c", "d\ne")),
    "enum of several types": _property({"enum": ["a", 3, None, True]}, ("a", 3, None, True)),
    "enum of texts that are JSON": _property({"enum": ["1", "2"]}, ("1", "2")),
    "const text": _property({"const": "fixed text"}, ("fixed text",)),
    "const text that is JSON": _property({"const": "4"}, ("4",)),
    "const number": _property({"const": 4}, (4,)),
    "const object": _property({"const": {"a": [1]}}, ({"a": [1]},)),
    "no type": _property({"description": "Anything"}, (*TEXTS[:7], 4, True, {"a": [1, "x"]})),
    "a true schema": _property({}, ("two words", 0.5, ["x"])),
    "text with bounds": _property({**TEXT, "minLength": 1, "maxLength": 9}, ("v", "4", "x\ny")),
    "text with a pattern": _property({**TEXT, "pattern": "^[a-c]+[0-9]$"}, ("a1", "abc9")),
    "integer with bounds": _property({**INTEGER, "minimum": 1, "maximum": 99}, (1, 99)),
    "nested objects": _property(
        _object({"a": _object({"b": TEXT}, "b"), "c": INTEGER}),
        ({"a": {"b": "4"}}, {"a": {"b": "x y"}, "c": 1}),
    ),
}
