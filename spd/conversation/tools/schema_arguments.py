"""A function's arguments by their JSON schema, for forms that write each argument by itself.

In such a form a text has no quotes, so the schema alone says whether `4` is a number or a
text. References, unions and objects with free keys are resolved here, once for the grammar that
constrains a call and once for the parser that reads it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

from spd.conversation.tools.call_forms import PYTHON_WORDS, Literals
from spd.conversation.tools.schema_reader import (
    KINDS,
    Members,
    SchemaReader,
    TextShape,
    all_of,
    listed_names,
    listed_values,
    one_of,
    other_values,
    required_names,
)
from spd.runtime import Json, JsonObject, close_objects


@dataclass(frozen=True)
class Argument:
    """One argument: the schema of its value."""

    reader: SchemaReader
    node: Json

    @property
    def schema(self) -> Json:
        """Return the schema, with the definitions to which it refers."""
        return self.reader.with_definitions(self.node)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Return the types that the value may have."""
        return self.reader.kinds(self.node)

    @cached_property
    def texts(self) -> list[TextShape]:
        """Return the alternatives in which the value is a text; shapes that no text has are left
        out.
        """
        return [shape for shape in self.reader.texts(self.node) if shape.is_possible]

    @property
    def objects(self) -> list[ObjectShape]:
        """Return the alternatives in which the value is an object."""
        return object_shapes(self.reader, self.reader.containers(self.node, "object"))

    @property
    def arrays(self) -> list[ArrayShape]:
        """Return the alternatives in which the value is a list of items of one kind."""
        alternatives = self.reader.containers(self.node, "array")
        shapes = (_array_shape(self.reader, members) for members in alternatives)
        return [shape for shape in shapes if shape is not None]

    @cached_property
    def _container_schemas(self) -> list[JsonObject]:
        """Return the schemas of all alternatives in which the value is an object or a list, joined.

        A schema may recur. A value without keywords, or with too many alternatives, has none.
        """
        return [
            member
            for kind in sorted(self.kinds & {"array", "object"})
            for members in self.reader.containers(self.node, kind)
            for member in members
        ]

    @property
    def is_irregular(self) -> bool:
        """True if objects or lists are named one by one, or a list's items have schemas by
        place.
        """
        return any(
            listed_values(member) is not None or "prefixItems" in member
            for member in self._container_schemas
        )

    @property
    def listed_containers(self) -> list[Json]:
        """Return the objects and lists that the schema names one by one."""
        values = [
            value
            for member in self._container_schemas
            for value in listed_values(member) or ()
            if isinstance(value, dict | list) and self.fits(value)
        ]
        return [*{as_json(value): value for value in values}.values()]

    @property
    def non_text_schema(self) -> Json:
        """Return the schema of values that are no text; False where there are none."""
        return self.of_kinds(self.kinds - {"string"})

    def of_kinds(self, kinds: frozenset[str]) -> Json:
        """Return the schema of the values of some of its types; False for none."""
        if not kinds:
            return False
        if kinds == self.kinds:
            return self.schema
        names: list[Json] = [*sorted(kinds)]
        return self.reader.with_definitions({"allOf": [self.node, {"type": names}]})

    def fits(self, value: Json) -> bool:
        """True if a value is of a type and among the values that the schema names."""
        return self.reader.fits(self.node, value)

    def as_json(self, text: str, literals: Literals = "json") -> str:
        """Return the text of a value as JSON of a type that the schema has, if it has one.

        JSON that is no text comes first, so `null` for an optional text is null. So do the words
        and objects of Python if the form writes such `literals`. If it does not, they count where
        the value cannot be a text, and objects where it may be anything.
        """
        value = _parsed_json(text)
        is_json = value is not _NO_JSON
        if is_json and not isinstance(value, str) and self.fits(value):
            return text
        is_any = self.kinds == KINDS
        if is_json and isinstance(value, str) and (is_any or "string" not in self.kinds):
            return text
        literal = text if is_json else _python_value(text)
        if not isinstance(literal, str) and self.fits(literal):
            is_container = isinstance(literal, dict | list)
            is_word = text in PYTHON_WORDS and literals != "json"
            is_written = is_word or (is_container and (is_any or literals == "python"))
            if is_written or not self.fits(text):
                return as_json(literal)
        if "string" in self.kinds:
            return as_json(text)
        return text if is_json else as_json(text)


def _python_value(text: str) -> Json:
    """Return the value of a Python literal that JSON can hold; the text itself if it is none."""
    with suppress(ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
        value = ast.literal_eval(text.strip())
        if not isinstance(value, str | tuple):
            parsed: Json = json.loads(json.dumps(value, allow_nan=False))
            return parsed
    return text


_NO_JSON: JsonObject = {}
"""Stands for a text that is no JSON."""


def _parsed_json(text: str) -> Json:
    """Return the value of a JSON text; the object `_NO_JSON`, by identity, for one that is no JSON."""
    try:
        value: Json = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _NO_JSON
    return value


def _refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN or an infinity."""
    raise ValueError(f"{name} is no JSON")


_HALF = re.compile("[\ud800-\udfff]")
"""Half of a UTF-16 pair, which no text in UTF-8 holds."""


def as_json(value: object) -> str:
    """Return a value as JSON, with letters as they are."""
    text = json.dumps(value, ensure_ascii=False)
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


class FreeKeys(NamedTuple):
    """Keys that no schema lists: their pattern, and their values."""

    pattern: str | None
    """A pattern that each of the keys matches; None for keys that match no pattern."""
    argument: Argument


class ObjectShape(NamedTuple):
    """One alternative of a function's arguments."""

    listed: Mapping[str, Argument]
    """By name, in the order in which they are written."""
    required: frozenset[str]
    free: Sequence[FreeKeys]


class ArrayShape(NamedTuple):
    """One alternative of a value that is a list."""

    items: Argument
    min_items: int
    max_items: int | None


class Arguments:
    """All arguments of a function, by the schema of its parameters."""

    def __init__(self, schema: Mapping[str, Json]) -> None:
        closed = close_objects({**schema}).schema
        root: JsonObject = closed if isinstance(closed, dict) else {}
        definitions = root.get("$defs")
        self._reader = SchemaReader(definitions if isinstance(definitions, dict) else {})
        self._alternatives = self._reader.containers({**root, "$defs": {}}, "object")

    @property
    def names(self) -> set[str]:
        """Return the names that the schema lists."""
        return {name for members in self._alternatives for name in listed_names(members)}

    @cached_property
    def shapes(self) -> list[ObjectShape]:
        """Return the alternatives that a call may have; without any no call fits."""
        return object_shapes(self._reader, self._alternatives)

    def argument(self, name: str) -> Argument:
        """Return the argument of a name in any alternative; one of any value if none has it."""
        alternatives = self._alternatives
        schema = one_of(self._reader.value_schema(members, name) for members in alternatives)
        return Argument(self._reader, True if schema is False else schema)


def object_shapes(reader: SchemaReader, alternatives: Sequence[Members]) -> list[ObjectShape]:
    """Return the shapes of an object's alternatives, without those that hold no object."""
    shapes = (_object_shape(reader, members) for members in alternatives)
    return [shape for shape in shapes if shape is not None]


def _object_shape(reader: SchemaReader, members: Members) -> ObjectShape | None:
    """Return the object that schemas allow together; None if a required key is impossible."""
    required = required_names(members)
    schemas = {name: reader.value_schema(members, name) for name in listed_names(members)}
    listed = {
        name: Argument(reader, schema)
        for name, schema in schemas.items()
        if schema is not False and (name in required or reader.kinds(schema))
    }
    if not required <= listed.keys():
        return None
    return ObjectShape(listed, frozenset(required), _free_keys(reader, members))


def _free_keys(reader: SchemaReader, members: Members) -> list[FreeKeys]:
    """Return the keys that the schemas allow and do not list."""
    by_pattern: dict[str, list[Json]] = {}
    for member in members:
        patterns = member.get("patternProperties")
        for pattern in patterns if isinstance(patterns, dict) else ():
            by_pattern[pattern] = []
    for pattern, parts in by_pattern.items():
        for member in members:
            patterns = member.get("patternProperties")
            schemas_by_pattern = patterns if isinstance(patterns, dict) else {}
            parts.append(schemas_by_pattern.get(pattern, member.get("additionalProperties", True)))
    schemas: list[tuple[str | None, Json]] = []
    schemas += [(pattern, all_of(parts)) for pattern, parts in by_pattern.items()]
    schemas.append((None, other_values(members)))
    return [
        FreeKeys(pattern, Argument(reader, schema))
        for pattern, schema in schemas
        if reader.kinds(schema)
    ]


def _array_shape(reader: SchemaReader, members: Members) -> ArrayShape | None:
    """Return the list that schemas allow together; None if no list fits."""
    items = Argument(reader, all_of(member.get("items", True) for member in members))
    min_items = max([0, *_integer_bounds(members, "minItems")])
    max_items = min(_integer_bounds(members, "maxItems"), default=None)
    if not items.kinds:
        max_items = 0
    is_empty = max_items is not None and max_items < min_items
    return None if is_empty else ArrayShape(items, min_items, max_items)


def _integer_bounds(members: Members, keyword: str) -> list[int]:
    """Return the values of a keyword that are whole numbers."""
    values = (member.get(keyword) for member in members)
    return [value for value in values if isinstance(value, int)]
