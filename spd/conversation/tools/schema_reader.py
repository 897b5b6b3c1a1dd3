"""The types, texts and members that a JSON schema allows, with references and unions resolved."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from spd.errors import CheckpointError
from spd.formats.pattern import Pattern, PatternError, StepBudget, Subject
from spd.runtime import Json, JsonObject, is_satisfiable

KINDS = frozenset(["string", "number", "boolean", "null", "array", "object"])
"""Types of JSON values; an integer is a number."""
MAX_ALTERNATIVES = 16
"""Combinations of alternatives that are read one by one; more of them are read as their union."""
KEYWORDS_OF = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that imply the type of a schema without `type`."""
UNIONS = ("anyOf", "oneOf")
COMBINERS = ("$ref", "allOf", *UNIONS)
OBJECT_KEYWORDS = KEYWORDS_OF["object"]
DEFINITIONS_PREFIX = "#/$defs/"
"""The beginning of references to a schema's own definitions."""
MAX_STEPS = 1_000_000
"""Steps of matching keys with patterns for one schema; beyond it no pattern matches a key."""
Members = list[JsonObject]
"""Schemas that apply together to one value, a list or an object."""


class TextShape(NamedTuple):
    """The texts that one alternative of a schema allows."""

    values: tuple[str, ...] | None = None
    """The only texts; None for any."""
    patterns: tuple[str, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    """Lengths are in characters."""

    @property
    def is_free(self) -> bool:
        """True if any text has this shape."""
        return self == TextShape()

    @property
    def possible_values(self) -> list[str]:
        """Return the listed values that have the length and the patterns."""
        values = [value for value in self.values or () if len(value) >= self.min_length]
        values = [
            value for value in values if self.max_length is None or len(value) <= self.max_length
        ]
        budget = StepBudget(MAX_STEPS)
        return [
            value
            for value in values
            if all(is_found(pattern, value, budget) for pattern in self.patterns)
        ]

    @property
    def is_possible(self) -> bool:
        """False if no text has this shape, as far as that can be decided."""
        if self.values is not None:
            return bool(self.possible_values)
        if not self.patterns:
            return self.max_length is None or self.min_length <= self.max_length
        return _has_text(self)

    def intersection(self, other: TextShape) -> TextShape:
        """Return the shape of texts that have both shapes."""
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = tuple(value for value in self.values if value in other.values)
        limits = [
            max_length
            for max_length in (self.max_length, other.max_length)
            if max_length is not None
        ]
        patterns = tuple(dict.fromkeys(self.patterns + other.patterns))
        min_length = max(self.min_length, other.min_length)
        return TextShape(values, patterns, min_length, min(limits, default=None))

    def as_schema(self) -> JsonObject:
        """Return a JSON schema of the same texts."""
        schema: JsonObject = {"type": "string", "minLength": self.min_length}
        schema["allOf"] = [{"pattern": pattern} for pattern in self.patterns]
        if self.max_length is not None:
            schema["maxLength"] = self.max_length
        if self.values is not None:
            schema["enum"] = list(self.values)
        return schema


@lru_cache(1024)
def _has_text(shape: TextShape) -> bool:
    """True if a text has the shape, as far as that can be decided."""
    return is_satisfiable(shape.as_schema())


class SchemaReader:
    """Reads schemas whose references lead into the same definitions."""

    def __init__(self, definitions: JsonObject) -> None:
        self._definitions = definitions
        self._budget = StepBudget(MAX_STEPS)

    def kinds(self, node: Json, active: frozenset[str] = frozenset()) -> frozenset[str]:
        """Return the types that a value may have.

        active: the references that led to this node; they end recursion.
        """
        if not isinstance(node, dict):
            return frozenset() if node is False else KINDS
        kinds = _named_kinds(node)
        for branches in self._conjuncts(node, active):
            alternatives = [self.kinds(branch, inner) for branch, inner in branches]
            kinds &= frozenset[str]().union(*alternatives)
        return kinds

    def texts(self, node: Json, active: frozenset[str] = frozenset()) -> list[TextShape]:
        """Return the alternatives in which a value is a text; an empty list if it cannot be one."""
        if not isinstance(node, dict):
            return [] if node is False else [TextShape()]
        if "string" not in _named_kinds(node):
            return []
        shapes = [_keyword_shape(node)]
        for branches in self._conjuncts(node, active):
            alternatives = [
                shape for branch, inner in branches for shape in self.texts(branch, inner)
            ]
            pairs = itertools.product(shapes, dict.fromkeys(alternatives))
            shapes = list(dict.fromkeys(first.intersection(second) for first, second in pairs))
            if len(shapes) > MAX_ALTERNATIVES:
                shapes = [TextShape()]
        return shapes

    def fits(self, node: Json, value: Json, active: frozenset[str] = frozenset()) -> bool:
        """True if a value is of a type and among the values that a schema names."""
        if not isinstance(node, dict):
            return node is not False
        if _json_kind(value) not in _named_kinds(node) or not _is_listed(node, value):
            return False
        return all(
            any(self.fits(branch, value, inner) for branch, inner in branches)
            for branches in self._conjuncts(node, active)
        )

    def containers(
        self, node: Json, kind: str, active: frozenset[str] = frozenset()
    ) -> list[Members]:
        """Return the alternatives in which a value is an object or an array.

        Each is a list of schemas that apply together.
        """
        if not isinstance(node, dict):
            return [] if node is False else [[]]
        if kind not in _named_kinds(node):
            return []
        alternatives: list[Members] = [[node]]
        for branches in self._conjuncts(node, active):
            branch_alternatives = [
                members
                for branch, inner in branches
                for members in self.containers(branch, kind, inner)
            ]
            pairs = itertools.product(alternatives, branch_alternatives)
            alternatives = [members + branch_members for members, branch_members in pairs]
            if len(alternatives) > MAX_ALTERNATIVES:
                return [self._union(alternatives)] if kind == "object" else [[]]
        return alternatives

    def _conjuncts(
        self, node: JsonObject, active: frozenset[str]
    ) -> Iterator[list[tuple[Json, frozenset[str]]]]:
        """Yield what applies besides a schema's own keywords: alternatives, of which one applies.

        A reference that leads back to itself has none.
        """
        for key in COMBINERS:
            value = node.get(key)
            if key == "$ref" and isinstance(value, str):
                yield (
                    [] if value in active else [(self._referenced_schema(value), active | {value})]
                )
            elif key == "allOf" and isinstance(value, list):
                yield from ([(branch, active)] for branch in value)
            elif isinstance(value, list):
                yield [(branch, active) for branch in value]

    def _referenced_schema(self, reference: str) -> Json:
        """Return the schema that a reference names; one of any value if it is unknown."""
        name = reference.removeprefix(DEFINITIONS_PREFIX)
        is_known = reference.startswith(DEFINITIONS_PREFIX) and name in self._definitions
        return self._definitions[name] if is_known else True

    def _union(self, alternatives: Sequence[Members]) -> Members:
        """Return one object for many alternatives: it allows each key that one of them does, as
        optional.
        """
        schemas: dict[str, list[Json]] = {}
        for members in alternatives:
            for name in listed_names(members):
                schemas.setdefault(name, []).append(self.value_schema(members, name))
        properties: JsonObject = {name: one_of(parts) for name, parts in schemas.items()}
        other_keys = one_of(map(other_values, alternatives))
        return [{"properties": properties, "additionalProperties": other_keys}]

    def value_schema(self, members: Members, name: str) -> Json:
        """Return the schema of the value under a key: all schemas of the object together."""
        parts: list[Json] = []
        for member in members:
            properties = member.get("properties")
            patterns = member.get("patternProperties")
            schemas: list[Json] = []
            if isinstance(properties, dict) and name in properties:
                schemas.append(properties[name])
            by_pattern = patterns if isinstance(patterns, dict) else {}
            schemas += [
                schema
                for pattern, schema in by_pattern.items()
                if is_found(pattern, name, self._budget)
            ]
            parts += schemas or [member.get("additionalProperties", True)]
        return all_of(parts)

    def with_definitions(self, node: Json) -> Json:
        """Return a self-contained schema, with the definitions to which it refers."""
        if not self._definitions or not isinstance(node, dict):
            return node
        return {**node, "$defs": self._definitions}


def _named_kinds(node: JsonObject) -> frozenset[str]:
    """Return the types that a schema's own keywords allow."""
    types = node.get("type")
    if isinstance(types, str | list):
        names = {types} if isinstance(types, str) else {str(name) for name in types}
        return frozenset("number" if name == "integer" else name for name in names) & KINDS
    values = listed_values(node)
    if values is not None:
        return frozenset(map(_json_kind, values))
    if not any(key in node for key in COMBINERS):
        for kind, keywords in KEYWORDS_OF.items():
            if any(key in node for key in keywords):
                return frozenset([kind])
    return KINDS


def listed_values(node: JsonObject) -> list[Json] | None:
    """Return the values that a schema names one by one, None where it names none."""
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _is_listed(node: JsonObject, value: Json) -> bool:
    """True if a value is among those that a schema names, and an integer if the schema requires
    one.
    """
    values = listed_values(node)
    if values is not None and (_json_kind(value), value) not in [
        (_json_kind(listed_value), listed_value) for listed_value in values
    ]:
        return False
    types = node.get("type")
    has_fraction = isinstance(value, float) and not value.is_integer()
    return not (has_fraction and "integer" in as_list(types) and "number" not in as_list(types))


def as_list(types: Json) -> list[Json]:
    """Return a list as it is, another value as a list of one."""
    return types if isinstance(types, list) else [types]


def _json_kind(value: Json) -> str:
    """Return the type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def _keyword_shape(node: JsonObject) -> TextShape:
    """Return the texts that a schema's own keywords allow."""
    values = listed_values(node)
    texts = None if values is None else tuple(value for value in values if isinstance(value, str))
    pattern = node.get("pattern")
    min_length = node.get("minLength")
    max_length = node.get("maxLength")
    return TextShape(
        texts,
        (pattern,) if isinstance(pattern, str) else (),
        min_length if isinstance(min_length, int) else 0,
        max_length if isinstance(max_length, int) else None,
    )


def one_of(schemas: Iterable[Json]) -> Json:
    """Return the schema of values that fit one of several; `true` counts only if it is alone."""
    distinct = _distinct(schemas)
    parts: list[Json] = [schema for schema in distinct if not isinstance(schema, bool)]
    return {"anyOf": parts} if parts else True in distinct


def other_values(members: Members) -> Json:
    """Return the schema of values under keys that no schema lists, nor a pattern."""
    return all_of(member.get("additionalProperties", True) for member in members)


def listed_names(members: Members) -> list[str]:
    """Return the keys that schemas list or require, in order."""
    names: dict[str, None] = {}
    for member in members:
        properties = member.get("properties")
        names.update(dict.fromkeys(properties if isinstance(properties, dict) else ()))
    return list(names | dict.fromkeys(sorted(required_names(members) - names.keys())))


def required_names(members: Members) -> set[str]:
    """Return the keys that schemas require."""
    return {
        name
        for member in members
        for name in as_list(member.get("required"))
        if isinstance(name, str)
    }


def is_found(pattern: str, text: str, budget: StepBudget) -> bool:
    """True if a pattern matches anywhere in a text; False, too, if it cannot be matched in time.

    Spends steps of the budget.
    """
    try:
        budget.spend(1 + len(pattern))
        return _search(pattern).matches(Subject(text, budget))
    except (PatternError, CheckpointError):
        return False


@lru_cache(256)
def _search(pattern: str) -> Pattern:
    """Return a pattern that matches anywhere in a text. Raises CheckpointError."""
    return Pattern(rf"[\s\S]*(?:{pattern})", "a schema")


def all_of(parts: Iterable[Json]) -> Json:
    """Return the schema of values that fit all schemas."""
    remaining_schemas = _distinct(part for part in parts if part is not True)
    if False in remaining_schemas:
        return False
    return (
        (remaining_schemas[0] if remaining_schemas else True)
        if len(remaining_schemas) < 2
        else {"allOf": remaining_schemas}
    )


def _distinct(schemas: Iterable[Json]) -> list[Json]:
    """Return schemas without repetitions; `1` and `true` differ."""
    by_text = {json.dumps(schema, sort_keys=True): schema for schema in schemas}
    return list(by_text.values())
