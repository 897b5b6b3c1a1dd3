"""Recursive schemas: which of their definitions have a value at all.

A definition whose references lead back to it before a value is complete has no value: a grammar
would begin such a value and never end it. llguidance detects a schema without values only where it
is not recursive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from spd.runtime.engine.json_schema import VALUES, ClosedSchema, Json, JsonObject, references

DEFINITION_PREFIX = "#/$defs/"
MAX_COST = 10_000
"""Definitions written while testing which of them have a value."""
IsSatisfiable = Callable[[JsonObject], bool]
"""True for a schema with a value, if each of its references leads to a definition with one."""


class EndlessSchemaError(Exception):
    """A schema without any value, since its references form a cycle, which the message names."""


def without_endless(closed: ClosedSchema, is_satisfiable: IsSatisfiable) -> Json:
    """Return a schema with `false` in place of each reference to a definition without a value.

    A schema that is not recursive is returned as it is. Raises EndlessSchemaError if the schema has
    no value then.
    """
    schema = closed.schema
    definitions = schema.get("$defs") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(definitions, dict):
        return schema
    graph = {
        name: _referred_definitions(node) & definitions.keys() for name, node in definitions.items()
    }
    acyclic = _acyclic_definitions(graph)
    if len(acyclic) == len(graph):
        return schema
    options = {key: value for key, value in schema.items() if key == "x-guidance"}
    complete = _definitions_with_values(definitions, acyclic, options, is_satisfiable)
    if len(complete) == len(definitions):
        return schema
    pruned = _prune_references({**schema, "$defs": {}}, complete)
    root: JsonObject = pruned if isinstance(pruned, dict) else {"not": {}}
    root["$defs"] = {name: _prune_references(definitions[name], complete) for name in complete}
    if pruned is False or not is_satisfiable(root):
        endless = definitions.keys() - complete
        raise EndlessSchemaError(
            _describe_cycle(
                graph, endless, _referred_definitions({**schema, "$defs": {}}), closed.pointers
            )
        )
    return root


def _definitions_with_values(
    definitions: dict[str, Json],
    acyclic: Collection[str],
    options: JsonObject,
    is_satisfiable: IsSatisfiable,
) -> set[str]:
    """Return the definitions that have a value.

    They are the least fixed point that contains the acyclic definitions: llguidance itself detects
    those of them without a value. Where the search would exceed `MAX_COST`, all definitions are
    returned.
    """
    complete = {*acyclic}
    cost = 0
    size = -1
    while size != len(complete):
        size = len(complete)
        for name in reversed(definitions):  # a definition's targets come after it
            node = _prune_references(definitions[name], complete)
            if name in complete or node is False:
                continue
            cost += 1 + len(complete)
            if cost > MAX_COST:
                return {*definitions}
            schema: JsonObject = {**options, **node} if isinstance(node, dict) else {**options}
            schema["$defs"] = {
                other: _prune_references(definitions[other], complete) for other in complete
            }
            if is_satisfiable(schema):
                complete.add(name)
    return complete


def _prune_references(node: Json, complete: Collection[str]) -> Json:
    """Return a schema with `false` for each reference to a definition that is not complete."""
    if isinstance(node, list):
        return [_prune_references(item, complete) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    is_local = isinstance(reference, str) and reference.startswith(DEFINITION_PREFIX)
    if is_local and str(reference).removeprefix(DEFINITION_PREFIX) not in complete:
        return False
    return {
        key: value if key in VALUES else _prune_references(value, complete)
        for key, value in node.items()
    }


def _referred_definitions(node: Json) -> set[str]:
    """Return the names of the definitions that a schema refers to."""
    return {
        reference.removeprefix(DEFINITION_PREFIX)
        for reference in references(node)
        if reference.startswith(DEFINITION_PREFIX)
    }


def _acyclic_definitions(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the definitions whose references lead into no cycle (Kahn, 1962)."""
    users: dict[str, list[str]] = {name: [] for name in graph}
    for name, targets in graph.items():
        for target in targets:
            users[target].append(name)
    unresolved = {name: len(targets) for name, targets in graph.items()}
    acyclic = [name for name, count in unresolved.items() if not count]
    for target in acyclic:  # grows while it is read
        for name in users[target]:
            unresolved[name] -= 1
            if not unresolved[name]:
                acyclic.append(name)
    return acyclic


def _shortest_cycle(graph: Mapping[str, set[str]], start: str) -> list[str]:
    """Return a shortest path of references from a definition back to itself; empty without one."""
    predecessors: dict[str, str] = {}
    queue = [start]
    for name in queue:
        for target in sorted(graph[name] - predecessors.keys()):
            predecessors[target] = name
            queue.append(target)
    if start not in predecessors:
        return []
    path = [start]
    while len(path) == 1 or path[-1] != start:
        path.append(predecessors[path[-1]])
    return path[::-1]


def _describe_cycle(
    graph: Mapping[str, set[str]],
    endless: Collection[str],
    root_targets: Collection[str],
    pointers: Mapping[str, str],
) -> str:
    """Return a message that names a cycle of definitions without a value, near the schema's root."""
    endless_graph = {name: graph[name] & set(endless) for name in endless}
    names = sorted(endless, key=lambda name: (name not in root_targets, name))
    cycles = (_shortest_cycle(endless_graph, name) for name in names)
    cycle = next(filter(None, cycles), names[:1])
    path = " -> ".join(pointers.get(name, name) for name in cycle)
    return f"it refers to itself without an end ({path}), so no value is ever complete"
