"""JSON schemas as grammars read them: references resolved, objects closed over what they name.

JSON Schema leaves an object open unless `additionalProperties` says otherwise. A grammar that
follows it lets a weak model invent keys until a limit cuts the reply. So an object whose
`properties` are listed takes no others, as in the grammars of llama.cpp and xgrammar. A closed
schema accepts a part of what the open one accepts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import unquote

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
JsonObject: TypeAlias = dict[str, Json]

IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
ALTERNATIVES = ("anyOf", "oneOf")
CONDITIONS = ("if", "then", "else")
"""With `dependentSchemas`: what no grammar holds. Only the names in it count."""
DEFINITIONS = ("$defs", "definitions")
NOTES = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"]
)
"""Keywords that only describe."""
_NAMES = frozenset(["$comment", "$schema", "$id", "$anchor", "x-guidance"])
ANNOTATIONS = NOTES | _NAMES | frozenset(DEFINITIONS)
"""Keywords that restrict no value."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords that hold values, in which nothing is a schema."""
MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
"""Keywords that hold schemas by name."""
ARRAY_KEYWORDS = ("items", "prefixItems", "additionalItems", "contains")
MAX_NODES = 30_000
"""Schemas that are read and written for one schema; one that would need more stays as it is."""


class SchemaDocument:
    """A schema and the places in it that its references name, by JSON pointer."""

    def __init__(self, root: Json) -> None:
        self.root = root
        self._anchors: dict[str, str] = {}
        self._resolved: dict[str, str | None] = {}
        self.is_local = True
        """False where references mean another place than the pointer says, because of an inner
        `$id`."""
        self._read(root, "#")

    def _read(self, node: Json, pointer: str) -> None:
        """Note the anchors below a node, and what makes references depend on where they stand."""
        if isinstance(node, list):
            for index, item in enumerate(node):
                self._read(item, f"{pointer}/{index}")
        if not isinstance(node, dict):
            return
        if isinstance(anchor := node.get("$anchor"), str):
            self._anchors[f"#{anchor}"] = pointer
        has_base = isinstance(node.get("$id"), str) and pointer != "#"
        is_dynamic = any(isinstance(node.get(key), str) for key in ("$dynamicRef", "$recursiveRef"))
        self.is_local = self.is_local and not has_base and not is_dynamic
        for key, value in node.items():
            self._read(value, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}")

    def resolve(self, reference: Json) -> str | None:
        """Return the pointer that a reference means;

        None where it names no place in this document.
        """
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        if reference not in self._resolved:
            pointer = self._anchors.get(reference, unquote(reference)).rstrip("/")
            try:
                self.at(pointer)
                self._resolved[reference] = pointer
            except (LookupError, ValueError, TypeError):
                self._resolved[reference] = None
        return self._resolved[reference]

    def at(self, pointer: str) -> Json:
        """Return what stands at a pointer. Raises LookupError, ValueError or TypeError."""
        node = self.root
        for step in pointer.split("/")[1:] if pointer.startswith("#/") else self._steps(pointer):
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(key)]
            elif isinstance(node, dict):
                node = node[key]
            else:
                raise LookupError(pointer)
        return node

    def _steps(self, pointer: str) -> list[str]:
        """Return the steps of the pointer to the whole document.

        Raises LookupError for another one.
        """
        if pointer != "#":
            raise LookupError(pointer)
        return []


def constraints(node: JsonObject) -> set[str]:
    """Return the keywords of a schema that restrict its values."""
    return node.keys() - ANNOTATIONS


def references(node: Json) -> Iterator[str]:
    """Yield every reference within a schema, in order."""
    if isinstance(node, list):
        for item in node:
            yield from references(item)
    elif isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference
        for value in node.values():
            yield from references(value)


def without_descriptions(schema: JsonObject) -> JsonObject:
    """Return a schema without the keywords that only describe it, unless a reference leads there."""
    if any(note in reference.split("/") for note in NOTES for reference in references(schema)):
        return schema
    return _without_notes(schema)


def _without_notes(node: JsonObject) -> JsonObject:
    described = ((key, value) for key, value in node.items() if key not in NOTES)
    return {key: _value_without_notes(key, value) for key, value in described}


def _value_without_notes(key: str, value: Json) -> Json:
    """Return the value of a keyword without what only describes the schemas in it."""
    if key in VALUES:
        return value
    if isinstance(value, list):
        return [_without_notes(item) if isinstance(item, dict) else item for item in value]
    if not isinstance(value, dict):
        return value
    if key not in (*MAPS, *DEFINITIONS):
        return _without_notes(value)
    return {
        name: _without_notes(child) if isinstance(child, dict) else child
        for name, child in value.items()
    }


@dataclass
class _Group:
    """What all schemas that apply to one value say of an object's keys."""

    names: dict[str, None] = field(default_factory=dict)
    """Those under `properties`, in order."""
    lists_properties: bool = False
    is_open: bool = False
    """Whether one of them says which other keys there may be."""
    expected: set[str] = field(default_factory=set)
    """Keys that an object may have to have."""
    least: int = 0
    """Keys that an object has at least."""
    places: Counter[str] = field(default_factory=Counter)
    """How many schemas describe each key's value, or an array's items."""

    def add_alternatives(self, alternatives: list[_Group]) -> None:
        """Add groups of which one applies beside this one."""
        places = Counter[str]()
        for alternative in alternatives:
            self.names.update(alternative.names)
            self.lists_properties |= alternative.lists_properties
            self.is_open |= alternative.is_open
            self.expected |= alternative.expected
            self.least = max(self.least, alternative.least)
            places |= alternative.places
        self.places += places

    @property
    def closing(self) -> tuple[str, ...] | None:
        """The names over which the object is closed; None where it stays open."""
        if self.is_open or not self.lists_properties or self.least > len(self.names):
            return None
        return tuple(self.names) if self.expected <= self.names.keys() else None

    @property
    def shared(self) -> frozenset[str]:
        """The places that several schemas describe: closing each by itself could leave no value."""
        return frozenset(place for place, count in self.places.items() if count > 1)


class _Closing:
    """Rewrites one document: every place of a value is closed, every reference leads into `$defs`.

    A definition is written once for each way in which it is used: closed where a reference stands
    alone, open at its own level where it is combined with others, and as it is where closing it
    could leave no value.
    """

    def __init__(self, document: SchemaDocument, *, closes: bool) -> None:
        self._document = document
        self._closes = closes
        self._keys: dict[tuple[str, str, tuple[str, ...] | None], str] = {}
        self.definitions: JsonObject = {}
        self.pointers: dict[str, str] = {}
        """Where each definition comes from, by its name."""
        self.is_changed = False
        """Whether an object was closed."""
        self._nodes = 0

    def value(self, node: Json, names: tuple[str, ...] | None = None) -> Json:
        """Return the schema of a value, closed over `names`, by default over those of its own
        group."""
        if not isinstance(node, dict):
            return node
        rules = constraints(node)
        pointer = self._document.resolve(node.get("$ref")) if rules == {"$ref"} else None
        if pointer is not None:
            return {**_without_definitions(node), "$ref": self._define(pointer, "closed", names)}
        alternatives = next((key for key in ALTERNATIVES if rules - {"type"} == {key}), None)
        branches = node.get(alternatives) if alternatives is not None else None
        if alternatives is not None and isinstance(branches, list):
            names = self._group(node).closing if names is None else names
            rewritten = [self._branch(branch, names) for branch in branches]
            return {**_without_definitions(node), alternatives: rewritten}
        return self._closed(node, names)

    def _branch(self, node: Json, names: tuple[str, ...] | None) -> Json:
        """Return an alternative, closed over the names of all; one that lists none stays open."""
        is_listing = self._group(node).lists_properties
        return self.value(node, names if is_listing else None)

    def _closed(self, node: JsonObject, names: tuple[str, ...] | None) -> Json:
        group = self._group(node)
        names = group.closing if names is None else names
        rewritten = self._member(node, group.shared)
        types = node.get("type", "object")
        is_object = "object" in types if isinstance(types, str | list) else False
        if not self._closes or names is None or "additionalProperties" in node or not is_object:
            return rewritten
        self.is_changed = True
        properties = rewritten.get("properties")
        listed: JsonObject = properties if isinstance(properties, dict) else {}
        rewritten["properties"] = {**listed, **{name: True for name in names if name not in listed}}
        rewritten["additionalProperties"] = False
        return rewritten

    def _group(self, node: Json) -> _Group:
        group = _Group()
        self._gather(node, group, set())
        pairs = group.places["patternProperties"] + group.places["additionalProperties"]
        if pairs > 1 or (pairs and len(group.places) > 1):  # they may describe the same key
            group.places.update(dict.fromkeys(group.places, 2))
        return group

    def _gather(self, node: Json, group: _Group, seen: set[str]) -> None:
        """Add what a schema and those within it say of the same value; each pointer is followed
        once."""
        if not isinstance(node, dict):
            return
        self._count()
        _add_keys(node, group)
        for key in (*CONDITIONS, "dependentSchemas", "dependencies", "allOf"):
            if key not in node:
                continue
            for branch in _subschemas(node.get(key), is_map=key.startswith("depend")):
                self._gather(branch, group, seen)
        for key in ALTERNATIVES:
            if key not in node:
                continue
            alternatives = [_Group() for _ in _subschemas(node.get(key))]
            for branch, alternative in zip(_subschemas(node.get(key)), alternatives, strict=True):
                self._gather(branch, alternative, seen)
            group.add_alternatives(alternatives)
        if "$ref" in node:
            pointer = self._document.resolve(node["$ref"])
            group.is_open |= pointer is None
            if pointer is not None and pointer not in seen:
                seen.add(pointer)
                self._gather(self._document.at(pointer), group, seen)

    def _member(self, node: JsonObject, shared: frozenset[str]) -> JsonObject:
        """Return a schema that applies together with others: not closed itself, but the values
        below it."""
        rewritten: JsonObject = {}
        self._count()
        for key, value in node.items():
            if key in DEFINITIONS:
                continue
            if key == "$ref":
                rewritten[key] = self._reference(value, "member", tuple(sorted(shared)))
            elif key in IN_PLACE_LISTS and isinstance(value, list):
                rewritten[key] = [
                    self._member(branch, shared) if isinstance(branch, dict) else branch
                    for branch in value
                ]
            elif key == "properties" and isinstance(value, dict):
                rewritten[key] = {
                    name: self._below(child, f"properties/{name}", shared)
                    for name, child in value.items()
                }
            elif key == "patternProperties" and isinstance(value, dict):
                rewritten[key] = {
                    name: self._below(child, key, shared) for name, child in value.items()
                }
            elif key == "prefixItems" and isinstance(value, list):
                rewritten[key] = [self._below(child, "items", shared) for child in value]
            elif key in ("items", "additionalProperties"):
                rewritten[key] = self._below(value, key, shared)
            else:
                rewritten[key] = self._open_keyword(key, value)
        return rewritten

    def _below(self, node: Json, place: str, shared: frozenset[str]) -> Json:
        return self._open(node) if place in shared else self.value(node)

    def _open(self, node: Json) -> Json:
        """Return a schema as it is, but for where its references lead."""
        self._count()
        if isinstance(node, list):
            return [self._open(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {
            key: self._open_keyword(key, value)
            for key, value in node.items()
            if key not in DEFINITIONS
        }

    def _open_keyword(self, key: str, value: Json) -> Json:
        if key == "$ref":
            return self._reference(value, "open", None)
        if key in VALUES:
            return value
        if key in MAPS and isinstance(value, dict):
            return {name: self._open(child) for name, child in value.items()}
        return self._open(value)

    def _count(self) -> None:
        """Count a schema that is read or written. Raises OverflowError beyond the limit."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise OverflowError("the schema is too large to be rewritten")

    def _reference(self, reference: Json, use: str, names: tuple[str, ...] | None) -> Json:
        pointer = self._document.resolve(reference)
        return reference if pointer is None else self._define(pointer, use, names)

    def _define(self, pointer: str, use: str, names: tuple[str, ...] | None) -> str:
        """Return a reference to a definition for one use of a pointer, written where it is new."""
        key = (pointer, use, names)
        if key not in self._keys:
            stem = re.sub(r"[^\w.-]", "_", pointer.rpartition("/")[2]) or "root"
            name = stem
            while name in self.definitions:
                name = f"{stem}.{len(self.definitions)}"
            self._keys[key] = name
            self.pointers[name] = pointer
            self.definitions[name] = True  # holds the name while what it refers to is written
            target = self._document.at(pointer)
            if use == "closed":
                self.definitions[name] = self.value(target, names)
            elif use == "member" and isinstance(target, dict):
                self.definitions[name] = self._member(target, frozenset(names or ()))
            else:
                self.definitions[name] = self._open(target)
        return f"#/$defs/{self._keys[key]}"


def _add_keys(node: JsonObject, group: _Group) -> None:
    """Add what one schema says itself of an object's keys, and of which values it describes."""
    properties = node.get("properties")
    if isinstance(properties, dict):
        group.lists_properties = True
        group.names.update(dict.fromkeys(properties))
        group.places.update(f"properties/{name}" for name in properties)
    if any(key in node for key in ARRAY_KEYWORDS):
        group.places["items"] += 1
    for key in ("additionalProperties", "unevaluatedProperties"):
        group.is_open |= node.get(key, False) is not False
    group.is_open |= bool(node.get("patternProperties"))
    for key in ("additionalProperties", "patternProperties"):
        if isinstance(node.get(key), dict):
            group.places[key] += 1
    least = node.get("minProperties")
    group.least = max(group.least, least) if isinstance(least, int) else group.least
    required = node.get("required")
    group.expected.update(
        name for name in (required if isinstance(required, list) else ()) if isinstance(name, str)
    )
    values = node.get("enum")
    for value in [*(values if isinstance(values, list) else ()), node.get("const")]:
        if isinstance(value, dict):
            group.expected.update(value)
    for key in ("dependentRequired", "dependencies"):
        dependent = node.get(key)
        for required in dependent.values() if isinstance(dependent, dict) else ():
            if isinstance(required, list):
                group.expected.update(name for name in required if isinstance(name, str))


def _subschemas(value: Json, *, is_map: bool = False) -> list[Json]:
    """Return the schemas in a keyword's value: one, a list, or the values of a map."""
    if is_map:
        return list(value.values()) if isinstance(value, dict) else []
    return value if isinstance(value, list) else [value]


def _without_definitions(node: JsonObject) -> JsonObject:
    return {key: value for key, value in node.items() if key not in DEFINITIONS}


@dataclass(frozen=True)
class ClosedSchema:
    """A schema whose objects are closed, with every local reference as `#/$defs/NAME`."""

    schema: Json
    pointers: Mapping[str, str]
    """Where each definition stood before, by its name."""
    is_changed: bool
    """Whether an object was closed."""


def close_objects(schema: Json, *, closes: bool = True) -> ClosedSchema:
    """Close each object whose `properties` are listed while `additionalProperties` is missing.

    It is closed over the properties of all schemas that apply to it: `allOf`, `anyOf`, `oneOf`,
    `if`, `then`, `else`, `dependentSchemas` and what `$ref` leads to. It stays open where one of
    them has `patternProperties` or says which other keys there may be, or where a key has to come
    that none of them lists. So does a value below it that several of them describe. A schema with
    inner `$id` or dynamic references is returned as it is. Without `closes` only the references
    change.
    """
    document = SchemaDocument(schema)
    closing = _Closing(document, closes=closes)
    if not document.is_local or not isinstance(schema, dict):
        return ClosedSchema(schema, {}, is_changed=False)
    try:
        rewritten = closing.value(schema)
    except (OverflowError, RecursionError):
        return ClosedSchema(schema, {}, is_changed=False)
    if isinstance(rewritten, dict) and closing.definitions:
        rewritten["$defs"] = closing.definitions
    return ClosedSchema(rewritten, closing.pointers, closing.is_changed)
