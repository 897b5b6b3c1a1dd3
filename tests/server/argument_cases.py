"""Schemas of arguments, with arguments that they allow and others that they refuse."""

from __future__ import annotations

from typing import Any

from spd.conversation.tools.call_forms import FORMS

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
NULL = {"type": "null"}
OPTIONAL = {"anyOf": [TEXT, NULL]}
PAIRS = [name for name, form in FORMS.items() if form.pairs is not None]
TAGS = [name for name in PAIRS if FORMS[name].pairs.style == "tags"]
Values = list[dict[str, Any]]


def object_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def one_property(schema: Any, **keywords: Any) -> dict[str, Any]:
    """Return a function's schema with one argument, `a`."""
    return {**object_schema(a=schema), **keywords}


def calls_with(*values: Any) -> Values:
    return [{"a": value} for value in values]


DEFS = {"$defs": {"S": TEXT, "A": object_schema(k=TEXT, n=INTEGER)}}
NODE = object_schema(v=INTEGER, kids={"type": "array", "items": {"$ref": "#/$defs/T"}})
TREE = {"$ref": "#/$defs/T", "$defs": {"T": NODE}, "type": "object"}
TEXTS = ["Paris", "4", "true", '{"k": 1}', "a\nb", '"quoted"', "-"]
SCHEMAS: dict[str, tuple[dict[str, Any], Values, Values]] = {
    "nothing said": ({"type": "object"}, [{}, {"k": "v"}, {"k": 1, "j": [True]}], []),
    "nothing listed": (object_schema(), [{}], [{"k": "v"}]),
    "additionalProperties": (
        {"type": "object", "additionalProperties": TEXT},
        [{"k": "v"}, {"k": "4", "j": "true"}],
        [],
    ),
    "additional integers": (
        {**object_schema(a=TEXT), "additionalProperties": INTEGER},
        [{"a": "4"}, {"a": "x", "k": 4}, {"k": 4, "kk": 5}],
        [{"k": "v"}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^k": TEXT}, "additionalProperties": False},
        [{"k": "4"}, {"kk": "x", "k2": "y"}],
        [{"j": "v"}],
    ),
    "patterns and others": (
        {"type": "object", "patternProperties": {"^k": TEXT}, "additionalProperties": INTEGER},
        [{"k": "4", "j": 4}],
        [{"j": "v"}],
    ),
    "$ref at the top": (
        {"type": "object", "$ref": "#/$defs/A", **DEFS},
        [{"k": "4"}, {"k": "v", "n": 1}],
        [{"z": 1}, {"n": "v"}],
    ),
    "allOf": (
        {
            "type": "object",
            "allOf": [object_schema(k=TEXT), {**object_schema(n=INTEGER), "required": ["n"]}],
        },
        [{"k": "4", "n": 1}, {"n": 1}],
        [{"k": "v"}, {"n": 1, "z": 1}],
    ),
    "anyOf": (
        {
            "type": "object",
            "anyOf": [
                {**object_schema(k=TEXT), "required": ["k"]},
                {**object_schema(n=INTEGER), "required": ["n"]},
            ],
        },
        [{"k": "4"}, {"n": 4}],
        [{}, {"z": 1}],
    ),
    "required alone": (
        {**object_schema(a=TEXT, b=INTEGER), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "4"}, {"b": 4}, {"a": "x", "b": 4}],
        [{}],
    ),
    "required, not listed": (
        {**object_schema(a=TEXT), "required": ["k"]},
        [{"a": "4", "k": 4}],
        [{}],
    ),
    "a tree": (TREE, [{"v": 1, "kids": [{"v": 2}]}], [{"v": "x"}, {"z": 1}]),
    "optional text": (one_property(OPTIONAL), calls_with(*TEXTS, None), []),
    "list of types": (one_property({"type": ["string", "null"]}), calls_with(*TEXTS, None), []),
    "$ref to a text": (one_property({"$ref": "#/$defs/S"}, **DEFS), calls_with(*TEXTS, "null"), []),
    "text or number": (
        one_property({"type": ["string", "number"]}),
        calls_with("x", 4, 4.5, '{"k": 1}'),
        [],
    ),
    "text or object": (
        one_property({"anyOf": [TEXT, object_schema(k=INTEGER)]}),
        calls_with("x", "4", {"k": 1}),
        [],
    ),
    "anything": (one_property({}), calls_with("x", 4, {"k": [None]}, True), []),
    "described": (one_property({"description": "d"}), calls_with("x", 4), []),
    "enum": (one_property({"enum": ["Paris", "4"]}), calls_with("Paris", "4"), calls_with("x")),
    "enum of all kinds": (
        one_property({"enum": ["x", 5, None, True]}),
        calls_with("x", 5, None, True),
        calls_with(6),
    ),
    "optional enum": (
        one_property({"anyOf": [{"enum": ["x", "4"]}, NULL]}),
        calls_with("x", "4", None),
        calls_with("y", 5),
    ),
    "const": (one_property({"const": "4"}), calls_with("4"), calls_with("5")),
    "pattern": (
        one_property({**TEXT, "pattern": "^[a-z]+/\\d$"}),
        calls_with("ab/4"),
        calls_with("ab/", "4"),
    ),
    "pattern anywhere": (
        one_property({**TEXT, "pattern": "b|c$"}),
        calls_with("abd", "xc"),
        calls_with("cx"),
    ),
    "pattern and length": (
        one_property({**TEXT, "pattern": "^a", "maxLength": 3}),
        calls_with("a", "abc"),
        calls_with("b", "abcd"),
    ),
    "length": (
        one_property({**TEXT, "minLength": 2, "maxLength": 3}),
        calls_with("ab", "4.5"),
        calls_with("a", "abcd"),
    ),
    "optional pattern": (
        one_property({"anyOf": [{**TEXT, "pattern": "^[a-c]+$"}, INTEGER]}),
        calls_with("ab", 4),
        calls_with("xy"),
    ),
    "bounds": (one_property({**INTEGER, "minimum": 3, "maximum": 5}), calls_with(4), calls_with(6)),
    "two texts": (
        {**object_schema(a=TEXT, b={"anyOf": [NULL, TEXT]}), "required": ["a", "b"]},
        [{"a": "1", "b": None}, {"a": "\n", "b": "2"}],
        [{"a": "1"}],
    ),
    "objects in objects": (
        one_property(
            object_schema(Zeit=INTEGER, b={"type": "array", "items": object_schema(c=TEXT, d=TEXT)})
        ),
        calls_with({"Zeit": 1, "b": [{"c": "4", "d": "}]"}, {"c": "true"}]}, {"b": []}, {}),
        calls_with({"b": [{"c": 4}]}, {"Zeit": "1"}, {"b": [1]}, {"x": 1}),
    ),
    "lists of bounds": (
        one_property({"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2}),
        calls_with(["4"], ["a", "b"]),
        calls_with([], ["a", "b", "c"], [4]),
    ),
    "objects named one by one": (
        one_property({"enum": [{"k": 1}, ["x"], None]}),
        calls_with(None),
        calls_with({"k": 2}, ["y"], "x"),
    ),
    "words of Python": (
        {**object_schema(**{"from": TEXT, "my-key": INTEGER, "a": TEXT}), "required": ["from"]},
        [{"from": "4", "my-key": 4}, {"from": "x = 3, my-key=", "a": "(a=1)"}],
        [{"a": "x"}],
    ),
}
"""A schema with arguments that it takes, and others that it does not take."""
