"""What a JSON schema lets a function's arguments be, for forms that write each argument by itself.

In such a form a text stands without quotes, so the schema alone says whether `4` is a number or a
text. References, unions and objects with free keys are resolved here, once for the grammar that
holds a call and once for the parser that reads it.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

from spd.runtime import Json, JsonObject, close_objects, has_value

KINDS = frozenset(["string", "number", "boolean", "null", "array", "object"])
"""Types of JSON values; an integer is a number."""
MAX_ALTERNATIVES = 16
"""Combinations of alternatives that are told apart; what has more is read as their union."""
KEYWORDS_OF = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords by which a schema without `type` is known to mean one."""
UNIONS = ("anyOf", "oneOf")
COMBINERS = ("$ref", "allOf", *UNIONS)
OBJECT_KEYWORDS = KEYWORDS_OF["object"]
PREFIX = "#/$defs/"
Members = list[JsonObject]
"""Schemas of an object that apply together."""


class TextShape(NamedTuple):
    """What one alternative of a schema lets a text be."""

    values: tuple[str, ...] | None = None
    """The only ones, None for any."""
    patterns: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    """Characters."""

    @property
    def is_free(self) -> bool:
        """True if any text will do."""
        return self == TextShape()

    def joined(self, other: TextShape) -> TextShape:
        """Return the shape of texts that have both shapes."""
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = tuple(value for value in self.values if value in other.values)
        limits = [most for most in (self.most, other.most) if most is not None]
        patterns = tuple(dict.fromkeys(self.patterns + other.patterns))
        least = max(self.least, other.least)
        return TextShape(values, patterns, least, min(limits, default=None))

    def as_schema(self) -> JsonObject:
        """Return a JSON schema of the same texts."""
        schema: JsonObject = {"type": "string", "minLength": self.least}
        schema["allOf"] = [{"pattern": pattern} for pattern in self.patterns]
        if self.most is not None:
            schema["maxLength"] = self.most
        if self.values is not None:
            schema["enum"] = list(self.values)
        return schema


class SchemaReader:
    """Reads schemas whose references lead into the same definitions."""

    def __init__(self, definitions: JsonObject) -> None:
        self._definitions = definitions

    def kinds(self, node: Json, active: frozenset[str] = frozenset()) -> frozenset[str]:
        """Return the types that a value may have; `active` are the references on the way here."""
        if not isinstance(node, dict):
            return frozenset() if node is False else KINDS
        kinds = _named_kinds(node)
        for branches in self._conjuncts(node, active):
            alternatives = [self.kinds(branch, inner) for branch, inner in branches]
            kinds &= frozenset[str]().union(*alternatives)
        return kinds

    def texts(self, node: Json, active: frozenset[str] = frozenset()) -> list[TextShape]:
        """Return the alternatives in which a value is a text; without any it is none."""
        if not isinstance(node, dict):
            return [] if node is False else [TextShape()]
        if "string" not in _named_kinds(node):
            return []
        shapes = [_own_shape(node)]
        for branches in self._conjuncts(node, active):
            alternatives = [
                shape for branch, inner in branches for shape in self.texts(branch, inner)
            ]
            pairs = itertools.product(shapes, dict.fromkeys(alternatives))
            shapes = list(dict.fromkeys(one.joined(other) for one, other in pairs))
            if len(shapes) > MAX_ALTERNATIVES:
                shapes = [TextShape()]
        return shapes

    def fits(self, node: Json, value: Json, active: frozenset[str] = frozenset()) -> bool:
        """True if a value is of a type and among the values that a schema names."""
        if not isinstance(node, dict):
            return node is not False
        if _kind(value) not in _named_kinds(node) or not _is_listed(node, value):
            return False
        return all(
            any(self.fits(branch, value, inner) for branch, inner in branches)
            for branches in self._conjuncts(node, active)
        )

    def objects(self, node: Json, active: frozenset[str] = frozenset()) -> list[Members]:
        """Return the alternatives in which a value is an object, as schemas that apply together."""
        if not isinstance(node, dict):
            return [] if node is False else [[]]
        if "object" not in _named_kinds(node):
            return []
        alternatives: list[Members] = [[node]]
        for branches in self._conjuncts(node, active):
            others = [
                members for branch, inner in branches for members in self.objects(branch, inner)
            ]
            pairs = itertools.product(alternatives, others)
            alternatives = [members + others for members, others in pairs]
            if len(alternatives) > MAX_ALTERNATIVES:
                return [_union(alternatives)]
        return alternatives

    def _conjuncts(
        self, node: JsonObject, active: frozenset[str]
    ) -> Iterator[list[tuple[Json, frozenset[str]]]]:
        """Yield what applies beside a schema's own keywords: alternatives, of which one does.

        A reference that leads back to itself has none.
        """
        for key in COMBINERS:
            value = node.get(key)
            if key == "$ref" and isinstance(value, str):
                yield [] if value in active else [(self._target(value), active | {value})]
            elif key == "allOf" and isinstance(value, list):
                yield from ([(branch, active)] for branch in value)
            elif isinstance(value, list):
                yield [(branch, active) for branch in value]

    def _target(self, reference: str) -> Json:
        """Return what a reference leads to; anything, where that is not known."""
        name = reference.removeprefix(PREFIX)
        is_known = reference.startswith(PREFIX) and name in self._definitions
        return self._definitions[name] if is_known else True

    def whole(self, node: Json) -> Json:
        """Return a schema that can stand alone, with the definitions to which it refers."""
        if not self._definitions or not isinstance(node, dict):
            return node
        return {**node, "$defs": self._definitions}


def _named_kinds(node: JsonObject) -> frozenset[str]:
    """Return the types that a schema's own keywords allow."""
    types = node.get("type")
    if isinstance(types, str | list):
        names = {types} if isinstance(types, str) else {str(name) for name in types}
        return frozenset("number" if name == "integer" else name for name in names) & KINDS
    values = _listed(node)
    if values is not None:
        return frozenset(map(_kind, values))
    if not any(key in node for key in COMBINERS):
        for kind, keywords in KEYWORDS_OF.items():
            if any(key in node for key in keywords):
                return frozenset([kind])
    return KINDS


def _listed(node: JsonObject) -> list[Json] | None:
    """Return the values that a schema names one by one, None where it names none."""
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _is_listed(node: JsonObject, value: Json) -> bool:
    """True if a value is among those that a schema names; an integer is where it has to be one."""
    values = _listed(node)
    if values is not None and (_kind(value), value) not in [(_kind(one), one) for one in values]:
        return False
    types = node.get("type")
    has_fraction = isinstance(value, float) and not value.is_integer()
    return not (has_fraction and "integer" in _list(types) and "number" not in _list(types))


def _list(types: Json) -> list[Json]:
    return types if isinstance(types, list) else [types]


def _kind(value: Json) -> str:
    """Return the type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def _own_shape(node: JsonObject) -> TextShape:
    """Return what a schema's own keywords say of a text."""
    values = _listed(node)
    listed = None if values is None else tuple(one for one in values if isinstance(one, str))
    pattern = node.get("pattern")
    least = node.get("minLength")
    most = node.get("maxLength")
    return TextShape(
        listed,
        (pattern,) if isinstance(pattern, str) else (),
        least if isinstance(least, int) else 0,
        most if isinstance(most, int) else None,
    )


def _union(alternatives: Sequence[Members]) -> Members:
    """Return one object that allows each key as one of many does; all of them are optional."""
    schemas: dict[str, list[Json]] = {}
    for members in alternatives:
        for name in _listed_names(members):
            schemas.setdefault(name, []).append(_value_schema(members, name))
    properties: JsonObject = {name: _one_of(parts) for name, parts in schemas.items()}
    return [{"properties": properties, "additionalProperties": _one_of(map(_others, alternatives))}]


def _one_of(schemas: Iterable[Json]) -> Json:
    """Return the schema of values that fit one of several; `true` counts only where it is alone."""
    distinct = _distinct(schemas)
    told: list[Json] = [schema for schema in distinct if not isinstance(schema, bool)]
    return {"anyOf": told} if told else True in distinct


def _others(members: Members) -> Json:
    """Return the schema of values under keys that no schema lists, nor a pattern."""
    return _both(member.get("additionalProperties", True) for member in members)


def _listed_names(members: Members) -> list[str]:
    """Return the keys that schemas list or require, in order."""
    names: dict[str, None] = {}
    for member in members:
        properties = member.get("properties")
        names.update(dict.fromkeys(properties if isinstance(properties, dict) else ()))
    return list(names | dict.fromkeys(sorted(_required(members) - names.keys())))


def _required(members: Members) -> set[str]:
    return {
        name
        for member in members
        for name in _list(member.get("required"))
        if isinstance(name, str)
    }


def _value_schema(members: Members, name: str) -> Json:
    """Return the schema of the value under a key: what all schemas of the object say of it."""
    parts: list[Json] = []
    for member in members:
        properties = member.get("properties")
        patterns = member.get("patternProperties")
        said: list[Json] = []
        if isinstance(properties, dict) and name in properties:
            said.append(properties[name])
        if isinstance(patterns, dict):
            said += [schema for pattern, schema in patterns.items() if _is_found(pattern, name)]
        parts += said or [member.get("additionalProperties", True)]
    return _both(parts)


def _is_found(pattern: str, text: str) -> bool:
    with suppress(re.error):
        return re.search(pattern, text) is not None
    return False


def _both(parts: Iterable[Json]) -> Json:
    """Return the schema of values that fit all schemas."""
    left = _distinct(part for part in parts if part is not True)
    if False in left:
        return False
    return (left[0] if left else True) if len(left) < 2 else {"allOf": left}


def _distinct(schemas: Iterable[Json]) -> list[Json]:
    """Return schemas without those that came before; `1` and `true` differ."""
    by_text = {json.dumps(schema, sort_keys=True): schema for schema in schemas}
    return list(by_text.values())


@dataclass(frozen=True)
class Argument:
    """One argument: the schema of its value."""

    reader: SchemaReader
    node: Json

    @property
    def schema(self) -> Json:
        """The schema, with the definitions to which it refers."""
        return self.reader.whole(self.node)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The types that the value may have."""
        return self.reader.kinds(self.node)

    @cached_property
    def texts(self) -> list[TextShape]:
        """The alternatives in which the value is a text, of which each has one."""
        shapes = self.reader.texts(self.node)
        return [shape for shape in shapes if shape.is_free or has_value(shape.as_schema())]

    @property
    def others(self) -> Json:
        """The schema of values that are no text; False where there are none."""
        if not self.kinds - {"string"}:
            return False
        if "string" not in self.kinds:
            return self.schema
        kinds: list[Json] = [*sorted(self.kinds - {"string"})]
        return self.reader.whole({"allOf": [self.node, {"type": kinds}]})

    def as_json(self, text: str) -> str:
        """Return what was written as JSON of a type that the schema has, where it has one.

        JSON that is no text comes first, so `null` for an optional text is null.
        """
        value = _parsed(text)
        is_json = value is not _NO_JSON
        if is_json and not isinstance(value, str) and self.reader.fits(self.node, value):
            return text
        if (
            is_json
            and isinstance(value, str)
            and (self.kinds == KINDS or "string" not in self.kinds)
        ):
            return text
        if "string" in self.kinds:
            return as_json(text)
        if not is_json:
            with suppress(
                ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError
            ):
                literal = ast.literal_eval(text.strip())  # True, None, {'a': 1}
                if not isinstance(literal, str) and self.reader.fits(self.node, literal):
                    return json.dumps(literal, ensure_ascii=False, allow_nan=False)
        return text if is_json else as_json(text)


_NO_JSON: JsonObject = {}
"""Stands for a text that is no JSON."""


def _parsed(text: str) -> Json:
    """Return the value of a JSON text, `_NO_JSON` for another one."""
    try:
        value: Json = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _NO_JSON
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def as_json(value: object) -> str:
    """Return a value as JSON, with letters as they are."""
    return json.dumps(value, ensure_ascii=False)


class FreeKeys(NamedTuple):
    """Keys that no schema lists: what they look like, and their values."""

    pattern: str | None
    """Found in each of them; None for those in which none of the others' is."""
    argument: Argument


class ObjectShape(NamedTuple):
    """One alternative of a function's arguments."""

    listed: Mapping[str, Argument]
    """By name, in the order in which they are written."""
    required: frozenset[str]
    free: Sequence[FreeKeys]


class Arguments:
    """All arguments of a function, by the schema of its parameters."""

    def __init__(self, schema: Mapping[str, Json]) -> None:
        closed = close_objects({**schema}).schema
        root: JsonObject = closed if isinstance(closed, dict) else {}
        definitions = root.get("$defs")
        self._reader = SchemaReader(definitions if isinstance(definitions, dict) else {})
        self._alternatives = self._reader.objects({**root, "$defs": {}})

    @property
    def names(self) -> set[str]:
        """The names that the schema lists."""
        return {name for members in self._alternatives for name in _listed_names(members)}

    @cached_property
    def shapes(self) -> list[ObjectShape]:
        """The alternatives that a call may have; without any no call fits."""
        shapes = (self._shape(members) for members in self._alternatives)
        return [shape for shape in shapes if shape is not None]

    def _shape(self, members: Members) -> ObjectShape | None:
        """Return what schemas that apply together allow; None where a required key cannot come."""
        required = _required(members)
        schemas = {name: _value_schema(members, name) for name in _listed_names(members)}
        listed = {
            name: Argument(self._reader, schema)
            for name, schema in schemas.items()
            if schema is not False and (name in required or self._reader.kinds(schema))
        }
        if not required <= listed.keys():
            return None
        return ObjectShape(listed, frozenset(required), self._free(members))

    def _free(self, members: Members) -> list[FreeKeys]:
        """Return what keys may come that no schema lists."""
        by_pattern: dict[str, list[Json]] = {}
        for member in members:
            patterns = member.get("patternProperties")
            for pattern in patterns if isinstance(patterns, dict) else ():
                by_pattern[pattern] = []
        for pattern, parts in by_pattern.items():
            for member in members:
                patterns = member.get("patternProperties")
                known = patterns if isinstance(patterns, dict) else {}
                parts.append(known.get(pattern, member.get("additionalProperties", True)))
        each: list[tuple[str | None, Json]] = []
        each += [(pattern, _both(parts)) for pattern, parts in by_pattern.items()]
        each.append((None, _others(members)))
        return [
            FreeKeys(pattern, Argument(self._reader, schema))
            for pattern, schema in each
            if self._reader.kinds(schema)
        ]

    def argument(self, name: str) -> Argument:
        """Return the argument of a name in whichever alternative, of any value if none has it."""
        schema = _one_of(_value_schema(members, name) for members in self._alternatives)
        return Argument(self._reader, True if schema is False else schema)
