"""Schemas before they become grammars: which objects are closed, and which schemas hold no value."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spd.errors import UsageError
from spd.formats.folder import ModelFolder
from spd.runtime.engine.grammar import Grammar, GrammarCompiler, GrammarError
from spd.runtime.engine.json_schema import (
    JsonObject,
    _SchemaCloser,
    close_objects,
    without_descriptions,
)
from spd.runtime.engine.request import GrammarSpec
from spd.runtime.engine.schema_text import MAX_OPTIONAL
from spd.runtime.round.limits import mask_width
from tests.helpers import demo_tokenizer

END = 258
INTEGER = {"type": "integer"}
NEVER = {"type": "string", "pattern": r"[^\s\S]"}


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer(), ModelFolder.resolve("demo").config.vocab_size)


def encoded(text: str) -> list[int]:
    """Return the demo's token ids of a text."""
    return demo_tokenizer().encode(text)


def compiled(schema: Any, kind: str = "schema") -> Grammar:
    """Return the grammar of a schema, alone or within a Lark grammar."""
    text = json.dumps(schema)
    grammar = GrammarSpec("schema", text) if kind == "schema" else lark(text)
    result = compiler().compile(grammar, (END,))
    assert result is not None
    return result


def lark(schema: str) -> GrammarSpec:
    return GrammarSpec("lark", f"start: A %json {schema}\nA: /a/ // %json false")


def accepts(schema: Any, text: str) -> bool:
    grammar = compiled(schema)
    with suppress(GrammarError):
        for token in encoded(text):
            grammar.accept_token(token)
        return grammar.is_complete
    return False


def keys(*names: str, **keywords: Any) -> dict[str, Any]:
    """Return a schema with integers under these names."""
    return {"properties": dict.fromkeys(names, INTEGER), **keywords}


NODE = keys("a", type="object", required=["a"])
NODE["properties"] = {"a": INTEGER, "n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}
USED_TWICE = {
    "type": "object",
    "properties": {
        "s": {"$ref": "#/definitions/A"},
        "t": {"allOf": [{"$ref": "#/definitions/A"}, keys("z")]},
    },
    "definitions": {"A": keys("a", type="object")},
}
SHARED = {"allOf": [{"properties": {"o": keys(name)}} for name in "ab"], "type": "object"}
CLOSED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "one": (keys("a", type="object"), [{}, {"a": 1}], [{"z": 1}, {"a": 1, "z": 1}]),
    "none listed": ({"type": "object", "properties": {}}, [{}], [{"z": 1}]),
    "nothing said": ({"type": "object"}, [{}, {"z": {"y": 1}}], []),
    "allOf": (
        {"type": "object", "allOf": [keys("a", required=["b"]), keys("b", required=["a"])]},
        [{"a": 1, "b": 1}],
        [{"a": 1, "b": 1, "z": 1}, {"a": 1}],
    ),
    "beside $ref": (
        {**keys("c", type="object"), "$ref": "#/$defs/A", "$defs": {"A": keys("a")}},
        [{"c": 1, "a": 1}],
        [{"c": 1, "z": 1}],
    ),
    "anyOf": (
        {"anyOf": [keys("a", type="object"), keys("b", type="object", required=["b"])]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{"z": 1}, {"a": 1, "z": 1}],
    ),
    "anyOf beside": (
        {**keys("c", type="object"), "anyOf": [keys("a", required=["a"]), keys("b")]},
        [{"c": 1, "a": 1}, {"c": 1, "b": 1}, {"c": 1, "a": 1, "b": 1}],
        [{"c": 1, "z": 1}],
    ),
    "anyOf with a free object": (
        {"anyOf": [keys("a", type="object", required=["a"]), {"type": "object"}]},
        [{"a": 1}, {"z": 1}],
        [],
    ),
    "oneOf": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]}
                for name in "ab"
            ]
        },
        [{"k": "a"}],
        [{"k": "a", "z": 1}],
    ),
    "if, passed over": (
        {
            **keys("a", type="object"),
            "if": keys("c"),
            "then": keys("b"),
            "x-guidance": {"lenient": True},
        },
        [{"a": 1, "c": 1, "b": 1}],
        [{"z": 1}],
    ),
    "required elsewhere": (keys("a", type="object", required=["q"]), [{"a": 1, "q": 2}], [{}]),
    "required elsewhere, below": (
        {"type": "object", "properties": {"o": keys("a", type="object", required=["q"])}},
        [{"o": {"q": 1}}],
        [{"o": {"a": 1}}],
    ),
    "patternProperties": (
        keys("a", type="object", patternProperties={"^k": INTEGER}),
        [{"a": 1, "z": 1}],
        [{"k": "x"}],
    ),
    "additionalProperties": (
        keys("a", type="object", additionalProperties={"type": "string"}),
        [{"a": 1, "z": "x"}],
        [{"z": 1}],
    ),
    "open in allOf": (
        {"type": "object", "allOf": [keys("a"), {"additionalProperties": True}]},
        [{"a": 1, "z": 1}],
        [],
    ),
    "more keys than names": (keys("a", required=["a"], type="object", minProperties=2), [], []),
    "values of enum": (keys("a", type="object", enum=[{"b": 1}]), [{"b": 1}], [{}]),
    "nested": (
        {"type": "object", "properties": {"l": {"items": keys("a", type="object")}}},
        [{"l": [{"a": 1}]}],
        [{"l": [{"z": 1}]}],
    ),
    "a list that refers to itself": (
        {"$ref": "#/$defs/N", "$defs": {"N": NODE}},
        [{"a": 1, "n": {"a": 1, "n": None}}],
        [{"a": 1, "n": {"a": 1, "z": None}}, {"a": 1, "z": 1}],
    ),
    "the whole refers to itself": (
        {**keys("a", type="object"), "properties": {"l": {"items": {"$ref": "#"}}}},
        [{"l": [{"l": []}]}],
        [{"l": [{"z": 1}]}],
    ),
    "a definition used in two ways": (
        USED_TWICE,
        [{"s": {"a": 1}, "t": {"a": 1, "z": 1}}],
        [{"s": {"z": 1}}, {"t": {"y": 1}}],
    ),
    "an anchor": (
        {"$ref": "#here", "$defs": {"A": {"$anchor": "here", **keys("a", type="object")}}},
        [{"a": 1}],
        [{"z": 1}],
    ),
    "a value that two describe stays open": (
        SHARED,
        [{"o": {"a": 1, "b": 1}}, {"o": {"z": 1}}],
        [{"z": 1}],
    ),
    "keys called as keywords": (
        {"type": "object", "properties": {"$defs": INTEGER, "$ref": {"const": {"$ref": "#/x"}}}},
        [{"$defs": 1}, {"$ref": {"$ref": "#/x"}}],
        [{"z": 1}],
    ),
}
"""A schema, values that its closed form accepts, and values that it rejects."""


@pytest.mark.parametrize("case", CLOSED)
def test_an_object_is_closed_over_what_its_schemas_list(case: str) -> None:
    schema, values, rejected_values = CLOSED[case]
    for value in values:
        assert accepts(schema, json.dumps(value)), value
    for value in rejected_values:
        assert not accepts(schema, json.dumps(value)), value


def test_a_schema_with_inner_bases_is_left_as_it_is() -> None:
    """There a reference resolves to another place than its pointer says."""
    inner: JsonObject = {"$id": "http://example.com/a", **keys("a", type="object")}
    schema: JsonObject = {"type": "object", "properties": {"x": inner}}
    assert close_objects(schema).schema == schema
    references = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    long: Any = {"$ref": "#/$defs/d0", "$defs": {**references, "d3000": keys("a", type="object")}}
    assert close_objects(long).schema == long


LOOP = {"$defs": {"l": {"$ref": "#/$defs/l"}}}
TURNS: dict[str, Any] = {"anyOf": [{}, {}]}
TURNS["anyOf"][0] = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/T"}},
    "required": ["n"],
}
TURNS["anyOf"][1] = {"type": "object", "properties": {"x": NEVER}, "required": ["x"]}
ENDLESS: dict[str, tuple[Any, str]] = {
    "itself": ({"$ref": "#"}, "# -> #"),
    "in turns": (
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        },
        "#/$defs/a -> #/$defs/b -> #/$defs/a",
    ),
    "in anyOf": ({"anyOf": [{"$ref": "#"}]}, "# -> #"),
    "an item": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "# -> #"),
    "a property": (
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
        "# -> #",
    ),
    "below": (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/l"}}, "required": ["a"], **LOOP},
        "#/$defs/l -> #/$defs/l",
    ),
    "the other way holds nothing": (
        {"$ref": "#/$defs/T", "$defs": {"T": TURNS}},
        "#/$defs/T -> #/$defs/T",
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_schema_that_holds_nothing_but_itself_is_refused(case: str) -> None:
    """At once, with the cycle's name; a lenient schema is ignored instead."""
    schema, cycle = ENDLESS[case]
    for kind in ("schema", "lark"):
        with pytest.raises(UsageError) as refused:
            compiled(schema, kind)
        assert f"({cycle})" in refused.value.message, refused.value.message
    compiled({**schema, "x-guidance": {"lenient": True}}, "lark")


EMPTY: dict[str, Any] = {
    "false that has to come": {"properties": {"a": False}, "required": ["a"]},
    "bounds": {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 4}}},
    "pattern and length": {"type": "string", "pattern": "^a$", "minLength": 3},
    "enum and type": {"type": "integer", "enum": ["a"]},
    "a pattern that never matches": NEVER,
}
EMPTY["bounds"]["required"] = ["a"]


@pytest.mark.parametrize("case", EMPTY)
def test_a_schema_without_values_is_refused(case: str) -> None:
    for kind in ("schema", "lark"):
        with pytest.raises(UsageError):
            compiled({"type": "object", **EMPTY[case]}, kind)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/l"}}, "type": "object", **LOOP}, "{}"),
        ({"items": {"$ref": "#/$defs/l"}, "type": "array", **LOOP}, "[]"),
        ({"anyOf": [{"$ref": "#/$defs/l"}, INTEGER], **LOOP}, "12"),
        (
            keys("a", type="object", required=["a"], patternProperties={r"[^\s\S]": INTEGER}),
            '{"a": 1}',
        ),
    ],
)
def test_a_part_that_no_value_fits_never_begins(schema: Any, value: str) -> None:
    assert accepts(schema, value)
    walk(compiled(schema), 7)


def test_no_key_begins_that_no_pattern_matches() -> None:
    """A comma would lead to a key that no text can have."""
    never = {r"[^\s\S]": INTEGER}
    schema = keys("a", type="object", patternProperties=never, additionalProperties=False)
    assert accepts(schema, '{"a": 1}')
    grammar = compiled(schema)
    with pytest.raises(GrammarError):
        for token in encoded('{"a": 1, '):
            grammar.accept_token(token)


@pytest.mark.parametrize("text", ['start: start "a"', "start: x\nx: x"])
def test_a_grammar_in_which_no_text_begins_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no text begins"):
        compiler().compile(GrammarSpec("lark", text), (END,))


def walk(grammar: Grammar, seed: int, tokens: int = 30) -> None:
    """Accept random allowed tokens; fail where none is allowed."""
    import random

    import torch

    from spd.runtime.round.limits import MASK_WORD_BITS, mask_width

    chance = random.Random(seed)
    words = mask_width(compiler().vocab_size)
    row = torch.zeros(1, words, dtype=torch.int32)
    for _ in range(tokens):
        if grammar.is_finished:
            return
        grammar.write_masks((), row)
        bits = [int(word) >> bit & 1 for word in row[0] for bit in range(MASK_WORD_BITS)]
        options = [token for token, bit in enumerate(bits) if bit and token != END]
        assert options or grammar.is_complete
        if not options:
            return
        grammar.accept_token(chance.choice(options))


LEAVES = st.sampled_from(
    [
        INTEGER,
        {"type": "string", "maxLength": 2},
        {"type": "null"},
        {"enum": ["a", 1]},
        {"type": "integer", "minimum": 3, "maximum": 2},
        NEVER,
        False,
        {"$ref": "#"},
        {"$ref": "#/$defs/A"},
        {"$ref": "#/$defs/B"},
    ]
)


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of objects, arrays and combinations of others."""
    pairs = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    required = st.lists(st.sampled_from("abc"), max_size=1)
    several = st.lists(inner, min_size=1, max_size=2)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": pairs},
        optional={
            "required": required,
            "additionalProperties": inner,
            "patternProperties": st.fixed_dictionaries({"^k": inner}),
            "allOf": several,
            "anyOf": several,
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner}, optional={"minItems": st.integers(0, 1)}
    )
    return st.one_of(objects, arrays, st.fixed_dictionaries({"anyOf": several}))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.recursive(LEAVES, schemas, max_leaves=6), LEAVES, st.integers(0, 9))
def test_no_text_dies_in_the_middle(schema: Any, other: Any, seed: int) -> None:
    """In every grammar that compiles, each reachable state has a next token or is an end."""
    combined = {"anyOf": [schema], "$defs": {"A": schema, "B": other}}
    try:
        grammar = compiled(combined)
    except UsageError:
        return
    walk(grammar, seed)


def optional(count: int, *required: str) -> dict[str, Any]:
    """Return a schema of an object with so many properties."""
    properties = {f"p{index}": INTEGER for index in range(count)}
    return {"type": "object", "properties": properties, "required": [*required]}


MANY: tuple[tuple[Any, str], ...] = (
    (optional(MAX_OPTIONAL), '{"p7": 1, "p1999": 3}'),
    (optional(MAX_OPTIONAL, "p1999"), '{"p7": 1, "p1999": 3}'),
    ({"type": "array", "items": optional(MAX_OPTIONAL)}, '[{"p7": 1}, {"p1999": 3}]'),
    (optional(1) | {"properties": {"p0": optional(MAX_OPTIONAL)}}, '{"p0": {"p7": 1}}'),
    ({"enum": [{f"p{index}": 1} for index in range(4000)]}, '{"p7":1}'),
)
"""Schemas whose parser has longer rows than llguidance allows by itself, and a text."""


@pytest.mark.covers(count=2)
@pytest.mark.parametrize(("schema", "text"), MANY)
def test_many_properties_are_held_to_the_end(schema: Any, text: str) -> None:
    demo = ModelFolder.resolve("demo")
    grammar = compiled(schema)
    rows = torch.empty(2, mask_width(demo.config.vocab_size), dtype=torch.int32)
    for token in encoded(text):
        assert grammar.write_masks((token,), rows) == 1
        grammar.accept_token(token)
    assert grammar.is_complete


@pytest.mark.parametrize("count", [MAX_OPTIONAL + 1, 2200])
def test_more_properties_than_a_row_holds_are_refused_at_the_beginning(count: int) -> None:
    inner = {"$ref": "#/$defs/d"}
    schema = {"type": "object", "properties": {"a": INTEGER, "b": inner}, "required": ["a"]}
    schema["$defs"] = {"d": optional(count)}
    with pytest.raises(UsageError, match=f"has {count} properties that may be absent"):
        compiler().compile(GrammarSpec("schema", json.dumps(schema)), {END})


def test_properties_of_alternatives_count_together() -> None:
    """Each is closed over the names of all, so few alternatives make many properties."""
    alternatives = [keys(*(f"p{at}.{index}" for index in range(100))) for at in range(20)]
    node: Any = {"type": "object", "anyOf": alternatives}
    with pytest.raises(UsageError, match="has 40000 properties that may be absent"):
        compiler().compile(
            GrammarSpec("schema", json.dumps({"type": "array", "items": node})), {END}
        )


def test_what_is_referred_to_twice_counts_once() -> None:
    """30 levels that refer to the next one twice lead to one object; an object may hold itself."""
    leaf = keys(*(f"p{index}" for index in range(900)), type="object")
    leaf["properties"]["next"] = {"$ref": "#/$defs/l0"}
    levels: dict[str, Any] = {"l30": leaf}
    for level in range(30):
        levels[f"l{level}"] = {"anyOf": [{"$ref": f"#/$defs/l{level + 1}"}] * 2}
    assert accepts({"$ref": "#/$defs/l0", "$defs": levels}, '{"next": {"next": {"p7": 1}}}')


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf"])
def test_a_long_chain_of_references_is_read_in_bounded_time(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 levels that refer to the next one twice took seconds until `oneOf` was refused."""
    levels: dict[str, Any] = {"l60": INTEGER}
    for level in range(60):
        levels[f"l{level}"] = {key: [{"$ref": f"#/$defs/l{level + 1}"}] * 2}
    schema = {"$ref": "#/$defs/l0", "$defs": levels}
    reads = list[Any]()
    gather = _SchemaCloser._gather_constraints

    def counted(self: _SchemaCloser, node: Any, group: Any, visited: set[str]) -> None:
        reads.append(node)
        gather(self, node, group, visited)

    monkeypatch.setattr(_SchemaCloser, "_gather_constraints", counted)
    refusal = pytest.raises(UsageError, match="oneOf") if key == "oneOf" else nullcontext()
    with refusal:
        compiler().compile(GrammarSpec("schema", json.dumps(schema)), ())
    assert len(reads) < 40_000


def test_a_description_is_left_out_and_a_property_of_its_name_stays() -> None:
    schema: JsonObject = {
        "title": "A book",
        "properties": {"title": {"type": "string", "title": "Its name"}},
        "dependentRequired": {"title": ["author"]},
        "dependencies": {"default": ["title"]},
    }
    assert without_descriptions(schema) == {
        "properties": {"title": {"type": "string"}},
        "dependentRequired": {"title": ["author"]},
        "dependencies": {"default": ["title"]},
    }
