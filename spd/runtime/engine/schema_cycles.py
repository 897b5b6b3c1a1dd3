"""Schemas that refer to themselves: which of their definitions hold a value at all.

A reference that leads back to itself before a value is complete has none: a grammar would begin
such a value and never end it. llguidance finds a schema without values only where it does not refer
to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from spd.runtime.engine.json_schema import VALUES, ClosedSchema, Json, JsonObject, references

PREFIX = "#/$defs/"
MAX_COST = 10_000
"""Definitions written to ask which of them hold a value."""
IsSatisfiable = Callable[[JsonObject], bool]
"""Says whether a schema has a value, each of whose references is known to lead to one."""


class EndlessSchemaError(Exception):
    """A schema without any value: its references lead back to themselves. The message names them."""


def without_endless(closed: ClosedSchema, is_satisfiable: IsSatisfiable) -> Json:
    """Return a schema with `false` in place of each reference to what holds no value.

    Raises EndlessSchemaError where nothing is left. A schema that does not refer to itself is
    returned as it is.
    """
    schema = closed.schema
    definitions = schema.get("$defs") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(definitions, dict):
        return schema
    graph = {name: _referred(node) & definitions.keys() for name, node in definitions.items()}
    acyclic = _acyclic(graph)
    if len(acyclic) == len(graph):
        return schema
    options = {key: value for key, value in schema.items() if key == "x-guidance"}
    complete = _complete(definitions, acyclic, options, is_satisfiable)
    if len(complete) == len(definitions):
        return schema
    pruned = _pruned({**schema, "$defs": {}}, complete)
    root: JsonObject = pruned if isinstance(pruned, dict) else {"not": {}}
    root["$defs"] = {name: _pruned(definitions[name], complete) for name in complete}
    if pruned is False or not is_satisfiable(root):
        endless = definitions.keys() - complete
        raise EndlessSchemaError(
            _cycle_in_words(graph, endless, _referred({**schema, "$defs": {}}), closed.pointers)
        )
    return root


def _complete(
    definitions: dict[str, Json],
    acyclic: Collection[str],
    options: JsonObject,
    is_satisfiable: IsSatisfiable,
) -> set[str]:
    """Return the definitions that hold a value: the least fixed point, from those without a cycle
    upwards (llguidance finds out itself whether these have a value).

    Beyond `MAX_COST` all are taken to hold one.
    """
    complete = {*acyclic}
    cost = 0
    size = -1
    while size != len(complete):
        size = len(complete)
        for name in reversed(definitions):  # what a definition refers to stands behind it
            node = _pruned(definitions[name], complete)
            if name in complete or node is False:
                continue
            cost += 1 + len(complete)
            if cost > MAX_COST:
                return {*definitions}
            schema: JsonObject = {**options, **node} if isinstance(node, dict) else {**options}
            schema["$defs"] = {known: _pruned(definitions[known], complete) for known in complete}
            if is_satisfiable(schema):
                complete.add(name)
    return complete


def _pruned(node: Json, complete: Collection[str]) -> Json:
    """Return a schema with `false` for each reference to a definition that is not among the
    complete ones."""
    if isinstance(node, list):
        return [_pruned(item, complete) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    is_local = isinstance(reference, str) and reference.startswith(PREFIX)
    if is_local and str(reference).removeprefix(PREFIX) not in complete:
        return False
    return {
        key: value if key in VALUES else _pruned(value, complete) for key, value in node.items()
    }


def _referred(node: Json) -> set[str]:
    """Return the names of the definitions to which a schema refers."""
    return {
        reference.removeprefix(PREFIX)
        for reference in references(node)
        if reference.startswith(PREFIX)
    }


def _acyclic(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the definitions from which references lead into no cycle (Kahn, 1962)."""
    users: dict[str, list[str]] = {name: [] for name in graph}
    for name, targets in graph.items():
        for target in targets:
            users[target].append(name)
    left = {name: len(targets) for name, targets in graph.items()}
    ends = [name for name, count in left.items() if not count]
    for end in ends:
        for name in users[end]:
            left[name] -= 1
            if not left[name]:
                ends.append(name)
    return ends


def _cycle(graph: Mapping[str, set[str]], start: str) -> list[str]:
    """Return a shortest way of references from a definition back to itself; empty without one."""
    before: dict[str, str] = {}
    waiting = [start]
    for name in waiting:
        for target in sorted(graph[name] - before.keys()):
            before[target] = name
            waiting.append(target)
    if start not in before:
        return []
    way = [start]
    while len(way) == 1 or way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]


def _cycle_in_words(
    graph: Mapping[str, set[str]],
    endless: Collection[str],
    begin: Collection[str],
    pointers: Mapping[str, str],
) -> str:
    """Return words that name a cycle of definitions without a value, near the schema's root."""
    inner = {name: graph[name] & set(endless) for name in endless}
    order = sorted(endless, key=lambda name: (name not in begin, name))
    cycle = next((way for name in order if (way := _cycle(inner, name))), order[:1])
    steps = [pointers.get(name, name) for name in cycle]
    return (
        f"it refers to itself without an end ({' -> '.join(steps)}), so no value is ever complete"
    )
