"""JSON schemas rewritten for grammars: references resolved, objects closed over their properties.

JSON Schema leaves an object open unless `additionalProperties` says otherwise. With such a grammar
a weak model invents keys until a limit cuts the reply. So an object whose `properties` are listed
takes no others, as in the grammars of llama.cpp and xgrammar. A closed schema accepts a subset of
what the open one accepts.
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
"""Keywords with lists of schemas that apply to the same value."""
ALTERNATIVES = ("anyOf", "oneOf")
CONDITIONS = ("if", "then", "else")
"""Like `dependentSchemas`, these cannot be expressed in a grammar: only the keys they name count."""
DEFINITIONS = ("$defs", "definitions")
DESCRIPTIONS = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"]
)
"""Keywords that only describe a value."""
_IDENTIFIERS = frozenset(["$comment", "$schema", "$id", "$anchor", "x-guidance"])
ANNOTATIONS = DESCRIPTIONS | _IDENTIFIERS | frozenset(DEFINITIONS)
"""Keywords that restrict no value."""
VALUES = ("const", "enum", "default", "examples", "dependentRequired")
"""Keywords whose content is values, not schemas."""
MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
"""Keywords whose content is a map from names to schemas."""
ARRAY_KEYWORDS = ("items", "prefixItems", "additionalItems", "contains")
MAX_NODES = 30_000
"""Schemas read and written while one schema is rewritten.

A schema that needs more stays as it is.
"""


class SchemaDocument:
    """A schema, and the JSON pointers that its references resolve to."""

    def __init__(self, root: Json) -> None:
        self.root = root
        self._anchors: dict[str, str] = {}
        self._resolved: dict[str, str | None] = {}
        self.is_local = True
        """False if an inner `$id` or a dynamic reference changes what the references resolve to."""
        self._collect_anchors(root, "#")

    def _collect_anchors(self, node: Json, pointer: str) -> None:
        """Collect the anchors within a node, and set `is_local` to False where it has a base."""
        if isinstance(node, list):
            for index, item in enumerate(node):
                self._collect_anchors(item, f"{pointer}/{index}")
        if not isinstance(node, dict):
            return
        if isinstance(anchor := node.get("$anchor"), str):
            self._anchors[f"#{anchor}"] = pointer
        has_base = isinstance(node.get("$id"), str) and pointer != "#"
        is_dynamic = any(isinstance(node.get(key), str) for key in ("$dynamicRef", "$recursiveRef"))
        self.is_local = self.is_local and not has_base and not is_dynamic
        for key, value in node.items():
            self._collect_anchors(value, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}")

    def resolve(self, reference: Json) -> str | None:
        """Return the JSON pointer that a `$ref` resolves to; None if that is not in this
        document.
        """
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        if reference not in self._resolved:
            pointer = self._anchors.get(reference, unquote(reference)).rstrip("/")
            try:
                self.node_at(pointer)
                self._resolved[reference] = pointer
            except (LookupError, ValueError):
                self._resolved[reference] = None
        return self._resolved[reference]

    def node_at(self, pointer: str) -> Json:
        """Return the node at a JSON pointer that is percent-decoded, `#` for the root.

        Raises LookupError or ValueError where there is none.
        """
        node = self.root
        if pointer == "#":
            return node
        if not pointer.startswith("#/"):
            raise LookupError(pointer)
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdecimal():
                node = node[int(key)]
            elif isinstance(node, dict):
                node = node[key]
            else:
                raise LookupError(pointer)
        return node


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
    """Return a schema without the keywords that only describe it.

    A schema with a reference to such a keyword is returned as it is.
    """
    for reference in references(schema):
        if not DESCRIPTIONS.isdisjoint(reference.split("/")):
            return schema
    return _strip_descriptions(schema)


def _strip_descriptions(node: JsonObject) -> JsonObject:
    """Return a schema without descriptions."""
    return {key: _strip_value(key, value) for key, value in node.items() if key not in DESCRIPTIONS}


def _strip_value(key: str, value: Json) -> Json:
    """Return the value of a keyword without the descriptions of the schemas in it."""
    if key in VALUES:
        return value
    if isinstance(value, list):
        return [_strip_descriptions(item) if isinstance(item, dict) else item for item in value]
    if not isinstance(value, dict):
        return value
    if key not in (*MAPS, *DEFINITIONS):
        return _strip_descriptions(value)
    return {
        name: _strip_descriptions(child) if isinstance(child, dict) else child
        for name, child in value.items()
    }


@dataclass
class _Group:
    """The constraints of all schemas that apply to one value, on the keys of an object."""

    names: dict[str, None] = field(default_factory=dict)
    """The keys under `properties`, in order."""
    lists_properties: bool = False
    is_open: bool = False
    """True if one of the schemas says which other keys are allowed."""
    required: set[str] = field(default_factory=set)
    """Keys that an object may be required to have."""
    min_keys: int = 0
    """Smallest number of keys of an object."""
    places: Counter[str] = field(default_factory=Counter)
    """The number of schemas for each key's value, or for an array's items."""

    def add_alternatives(self, alternatives: list[_Group]) -> None:
        """Add groups of which one applies in addition to this one."""
        places = Counter[str]()
        for alternative in alternatives:
            self.names.update(alternative.names)
            self.lists_properties |= alternative.lists_properties
            self.is_open |= alternative.is_open
            self.required |= alternative.required
            self.min_keys = max(self.min_keys, alternative.min_keys)
            places |= alternative.places
        self.places += places

    @property
    def allowed_names(self) -> tuple[str, ...] | None:
        """The keys that the closed object allows; None where it stays open."""
        if self.is_open or not self.lists_properties or self.min_keys > len(self.names):
            return None
        return tuple(self.names) if self.required <= self.names.keys() else None

    @property
    def shared(self) -> frozenset[str]:
        """The places with several schemas: closing each of these alone could leave no value."""
        return frozenset(place for place, count in self.places.items() if count > 1)


class _SchemaCloser:
    """Rewrites one document: the schema of every value is closed, every reference points into
    `$defs`.

    A definition is written once for each way in which it is used: closed where a reference stands
    alone, open at its top level where it is combined with other schemas, and unchanged where
    closing it could leave no value.
    """

    def __init__(self, document: SchemaDocument, *, closes: bool) -> None:
        self._document = document
        self._closes = closes
        self._keys: dict[tuple[str, str, tuple[str, ...] | None], str] = {}
        self.definitions: JsonObject = {}
        self.pointers: dict[str, str] = {}
        """The original pointer of each definition, by its name."""
        self.is_changed = False
        """True once an object was closed."""
        self._num_nodes = 0

    def close_value(self, node: Json, names: tuple[str, ...] | None = None) -> Json:
        """Return the schema of a value, closed over `names`, by default over the names of its group."""
        if not isinstance(node, dict):
            return node
        rules = constraints(node)
        pointer = self._document.resolve(node.get("$ref")) if rules == {"$ref"} else None
        if pointer is not None:
            return {
                **_without_definitions(node),
                "$ref": self._write_definition(pointer, "closed", names),
            }
        alternatives = next((key for key in ALTERNATIVES if rules - {"type"} == {key}), None)
        branches = node.get(alternatives) if alternatives is not None else None
        if alternatives is not None and isinstance(branches, list):
            names = self._gather_group(node).allowed_names if names is None else names
            rewritten = [self._close_alternative(branch, names) for branch in branches]
            return {**_without_definitions(node), alternatives: rewritten}
        return self._close_object(node, names)

    def _close_alternative(self, node: Json, names: tuple[str, ...] | None) -> Json:
        """Return an alternative, closed over the names of all.

        One without properties stays open.
        """
        lists_properties = self._gather_group(node).lists_properties
        return self.close_value(node, names if lists_properties else None)

    def _close_object(self, node: JsonObject, names: tuple[str, ...] | None) -> Json:
        """Return a schema with the values in it closed, and its object too unless it stays open."""
        group = self._gather_group(node)
        names = group.allowed_names if names is None else names
        rewritten = self._rewrite_member(node, group.shared)
        types = node.get("type", "object")
        is_object = "object" in types if isinstance(types, str | list) else False
        if not self._closes or names is None or "additionalProperties" in node or not is_object:
            return rewritten
        self.is_changed = True
        properties = rewritten.get("properties")
        closed: JsonObject = dict(properties) if isinstance(properties, dict) else {}
        for name in names:
            closed.setdefault(name, True)
        rewritten["properties"] = closed
        rewritten["additionalProperties"] = False
        return rewritten

    def _gather_group(self, node: Json) -> _Group:
        """Return the constraints of a schema and of those within it on the same value."""
        group = _Group()
        self._gather_constraints(node, group, set())
        pairs = group.places["patternProperties"] + group.places["additionalProperties"]
        if pairs > 1 or (pairs and len(group.places) > 1):  # they may describe the same key
            group.places.update(dict.fromkeys(group.places, 2))
        return group

    def _gather_constraints(self, node: Json, group: _Group, visited: set[str]) -> None:
        """Add to `group` the constraints of a schema and of those within it on the same value.

        Each pointer is followed once; `visited` has those that were.
        """
        if not isinstance(node, dict):
            return
        self._count_node()
        _add_own_constraints(node, group)
        for key in (*CONDITIONS, "dependentSchemas", "dependencies", "allOf"):
            if key not in node:
                continue
            for branch in _subschemas(node.get(key), is_map=key.startswith("depend")):
                self._gather_constraints(branch, group, visited)
        for key in ALTERNATIVES:
            if key not in node:
                continue
            alternatives = [_Group() for _ in _subschemas(node.get(key))]
            for branch, alternative in zip(_subschemas(node.get(key)), alternatives, strict=True):
                self._gather_constraints(branch, alternative, visited)
            group.add_alternatives(alternatives)
        if "$ref" in node:
            pointer = self._document.resolve(node["$ref"])
            group.is_open |= pointer is None
            if pointer is not None and pointer not in visited:
                visited.add(pointer)
                self._gather_constraints(self._document.node_at(pointer), group, visited)

    def _rewrite_member(self, node: JsonObject, shared: frozenset[str]) -> JsonObject:
        """Return a schema that applies together with others: open itself, with closed values."""
        rewritten: JsonObject = {}
        self._count_node()
        for key, value in node.items():
            if key in DEFINITIONS:
                continue
            if key == "$ref":
                rewritten[key] = self._rewrite_reference(value, "member", tuple(sorted(shared)))
            elif key in IN_PLACE_LISTS and isinstance(value, list):
                rewritten[key] = [
                    self._rewrite_member(branch, shared) if isinstance(branch, dict) else branch
                    for branch in value
                ]
            elif key == "properties" and isinstance(value, dict):
                rewritten[key] = {
                    name: self._rewrite_child(child, f"properties/{name}", shared)
                    for name, child in value.items()
                }
            elif key == "patternProperties" and isinstance(value, dict):
                rewritten[key] = {
                    name: self._rewrite_child(child, key, shared) for name, child in value.items()
                }
            elif key == "prefixItems" and isinstance(value, list):
                rewritten[key] = [self._rewrite_child(child, "items", shared) for child in value]
            elif key in ("items", "additionalProperties"):
                rewritten[key] = self._rewrite_child(value, key, shared)
            else:
                rewritten[key] = self._rewrite_keyword(key, value)
        return rewritten

    def _rewrite_child(self, node: Json, place: str, shared: frozenset[str]) -> Json:
        """Return the schema of a value at a place: closed, unless several schemas share the place."""
        return self._rewrite_references(node) if place in shared else self.close_value(node)

    def _rewrite_references(self, node: Json) -> Json:
        """Return a schema that is unchanged except for its references."""
        self._count_node()
        if isinstance(node, list):
            return [self._rewrite_references(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {
            key: self._rewrite_keyword(key, value)
            for key, value in node.items()
            if key not in DEFINITIONS
        }

    def _rewrite_keyword(self, key: str, value: Json) -> Json:
        """Return the value of a keyword, unchanged except for the references in it."""
        if key == "$ref":
            return self._rewrite_reference(value, "open", None)
        if key in VALUES:
            return value
        if key in MAPS and isinstance(value, dict):
            return {name: self._rewrite_references(child) for name, child in value.items()}
        return self._rewrite_references(value)

    def _count_node(self) -> None:
        """Count a schema that is read or written. Raises OverflowError beyond `MAX_NODES`."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise OverflowError("the schema is too large to be rewritten")

    def _rewrite_reference(self, reference: Json, use: str, names: tuple[str, ...] | None) -> Json:
        """Return a reference into `$defs`; one to another document is returned as it is."""
        pointer = self._document.resolve(reference)
        return reference if pointer is None else self._write_definition(pointer, use, names)

    def _write_definition(self, pointer: str, use: str, names: tuple[str, ...] | None) -> str:
        """Return a reference to the definition for one use of a pointer; write it if it is new."""
        key = (pointer, use, names)
        if key not in self._keys:
            stem = re.sub(r"[^\w.-]", "_", pointer.rpartition("/")[2]) or "root"
            name = stem
            while name in self.definitions:
                name = f"{stem}.{len(self.definitions)}"
            self._keys[key] = name
            self.pointers[name] = pointer
            self.definitions[name] = True  # reserves the name while the target is rewritten
            target = self._document.node_at(pointer)
            if use == "closed":
                self.definitions[name] = self.close_value(target, names)
            elif use == "member" and isinstance(target, dict):
                self.definitions[name] = self._rewrite_member(target, frozenset(names or ()))
            else:
                self.definitions[name] = self._rewrite_references(target)
        return f"#/$defs/{self._keys[key]}"


def _add_own_constraints(node: JsonObject, group: _Group) -> None:
    """Add to `group` what one schema, without those within it, says of an object.

    Its properties, whether it is open, the fewest keys, and every key that may be required, also by
    `enum`, `const` and dependencies; and the places for which it has a schema: a property, other
    keys, an array's items.
    """
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
    min_keys = node.get("minProperties")
    if isinstance(min_keys, int):
        group.min_keys = max(group.min_keys, min_keys)
    _add_required(node.get("required"), group)
    values = node.get("enum")
    for value in [*(values if isinstance(values, list) else ()), node.get("const")]:
        if isinstance(value, dict):
            group.required.update(value)
    for key in ("dependentRequired", "dependencies"):
        dependent = node.get(key)
        for names in dependent.values() if isinstance(dependent, dict) else ():
            _add_required(names, group)


def _add_required(names: Json, group: _Group) -> None:
    """Add to `group` the names of a list of required keys; do nothing for another value."""
    if isinstance(names, list):
        group.required.update(name for name in names if isinstance(name, str))


def _subschemas(value: Json, *, is_map: bool = False) -> list[Json]:
    """Return the schemas in a keyword's value: one, a list, or the values of a map."""
    if is_map:
        return list(value.values()) if isinstance(value, dict) else []
    return value if isinstance(value, list) else [value]


def _without_definitions(node: JsonObject) -> JsonObject:
    """Return a schema's keywords without its definitions."""
    return {key: value for key, value in node.items() if key not in DEFINITIONS}


@dataclass(frozen=True)
class ClosedSchema:
    """A schema whose objects are closed, with local references of the form `#/$defs/NAME`."""

    schema: Json
    pointers: Mapping[str, str]
    """The original pointer of each definition, by its name."""
    is_changed: bool
    """True if an object was closed."""


def close_objects(schema: Json, *, closes: bool = True) -> ClosedSchema:
    """Return a schema with each object closed whose `properties` are listed.

    An object with `additionalProperties` stays as it is. Another is closed over the properties of
    all schemas that apply to it: `allOf`, `anyOf`, `oneOf`, `if`, `then`, `else`,
    `dependentSchemas` and the targets of `$ref`. It stays open where one of them has
    `patternProperties` or says which other keys are allowed, or where a key is required that none
    of them lists. A value with schemas in several of them stays open, too. A schema with an inner
    `$id` or dynamic references is returned as it is. Without `closes` only the references change.
    """
    document = SchemaDocument(schema)
    closer = _SchemaCloser(document, closes=closes)
    if not document.is_local or not isinstance(schema, dict):
        return ClosedSchema(schema, {}, is_changed=False)
    try:
        rewritten = closer.close_value(schema)
    except (OverflowError, RecursionError):
        return ClosedSchema(schema, {}, is_changed=False)
    if isinstance(rewritten, dict) and closer.definitions:
        rewritten["$defs"] = closer.definitions
    return ClosedSchema(rewritten, closer.pointers, closer.is_changed)
