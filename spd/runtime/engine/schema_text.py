"""What is done to JSON schemas before llguidance reads them, alone or within a Lark grammar.

Objects are closed, what holds no value is cut off or refused, and what would take too many states
is refused. `llguidance` is imported with the first schema. No torch here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from math import isfinite, lcm
from typing import TYPE_CHECKING

from spd.errors import UsageError
from spd.runtime.engine.json_schema import (
    DEFINITIONS,
    IN_PLACE_LISTS,
    MAPS,
    NOTES,
    Json,
    JsonObject,
    close_objects,
)
from spd.runtime.engine.large_stack import on_large_stack
from spd.runtime.engine.request import JSON_STYLE
from spd.runtime.engine.schema_cycles import PREFIX, EndlessSchemaError, without_endless

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MOST_STATES = 100_000
MOST_PATTERNS = 12
"""Of a schema: the common multiple of all `multipleOf`, and patterns where `allOf` or `$ref`
combine some."""
MAX_BYTES = 512 * 1024
"""Of a grammar's text: those of 128 tools with twenty arguments each take about 200 KiB."""
MAX_PATTERN_BYTES = 64 * 1024
"""Of all expressions of one grammar: what a long one takes grows with the square of its length."""
SHALLOW_BYTES = 8 * 1024
"""A text up to which nothing can be nested so deep that it needs a large stack."""
MOST_OPTIONAL = 2000
"""Properties that may be absent where an object stands, those of alternatives together. For each
llguidance's parser holds four items in a row, and its time grows with their square."""
MOST_PARTS = 10_000
"""Objects and lists in all schemas of a grammar, with what those lists, `enum` and `const` hold.
llguidance takes seconds for so many, and its time grows with their square; an `enum` of plain
values is one part, since they become one expression."""
MAX_ROW_ITEMS = 80_000
MAX_STEP_ITEMS = 400_000
TOO_MANY_SYMBOLS = "grammar.symbols.len() < u16::MAX as usize - 10"
"""What llguidance's panic says of a grammar with more symbols than its tables can number."""
MOST_SYMBOLS = (1 << 16) - 1 - 10
EMPTY = "Unsatisfiable schema"
"""How llguidance begins to say that a schema has no value."""
FLAGS = {
    "schema": ("--schema", """'{"type": "object", "properties": {"name": {"type": "string"}}}'"""),
    "regex": ("--grammar", "'/[0-9]{4}-[0-9]{2}/'"),
    "lark": ("--grammar", """'start: "yes" | "no"'"""),
}
"""The option for each kind of grammar, and an example of its value."""


# A text, an expression, a comment, or the beginning of a schema.
_LARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*|(%json\s*)(?=[{tf])')


def with_schemas(kind: str, text: str, prepare: Callable[[Json], Json]) -> str:
    """Return a grammar's text with each JSON schema in it prepared; what is no JSON stays."""
    if kind == "schema":
        try:
            return json.dumps(prepare(json.loads(text)))
        except (ValueError, RecursionError):  # of which llguidance says more
            return text
    if kind != "lark":
        return text
    parts = list[str]()
    end = 0
    while found := _LARK.search(text, end):
        parts.append(text[end : found.end()])
        end = found.end()
        if found[1]:
            schema, end = _prepared(text, end, prepare)
            parts.append(schema)
    return "".join([*parts, text[end:]])


def _prepared(text: str, begin: int, prepare: Callable[[Json], Json]) -> tuple[str, int]:
    """Return the schema that begins at a place, prepared, and where it ends; nothing where none
    does."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, begin)
        return json.dumps(prepare(schema)), end
    except (ValueError, RecursionError):
        return "", begin


def closed_schema(schema: Json, *, closes: bool = True) -> Json:
    """Return a schema whose objects are closed and whose references lead to a value.

    Raises UsageError.
    """
    return _closed_text(json.dumps(schema), closes)


@lru_cache(8)
def _closed_text(text: str, closes: bool) -> Json:
    """Return a schema prepared by `closed_schema`; one that llguidance refuses is wanted twice."""
    schema: Json = json.loads(text)
    _check_states(schema)
    live = _without_dead_keys(schema)
    closed = close_objects(live, closes=closes)
    try:
        pruned = without_endless(closed, is_satisfiable)
    except EndlessSchemaError as error:
        if _is_lenient(schema):
            return _free(schema)
        raise refused("schema", str(error)) from None
    _check_rows(pruned)
    return pruned if closed.is_changed or pruned is not closed.schema else live


def _without_dead_keys(node: Json) -> Json:
    """Return a schema without the `patternProperties` whose pattern no key matches."""
    if isinstance(node, list):
        return [_without_dead_keys(item) for item in node]
    if not isinstance(node, dict):
        return node
    live = {key: _without_dead_keys(value) for key, value in node.items()}
    patterns = live.get("patternProperties")
    if isinstance(patterns, dict):
        live["patternProperties"] = {
            pattern: value
            for pattern, value in patterns.items()
            if not _fault({"type": "string", "pattern": pattern}).startswith(EMPTY)
        }
    return live


def usable_schema(schema: Json) -> Json:
    """Return a schema that llguidance takes: closed, else open, else free if it is lenient.

    Raises UsageError.
    """
    for closes in (True, False):
        usable = closed_schema(schema, closes=closes)
        fault = _fault(usable)
        if not fault:
            return usable
    if not _is_lenient(schema):
        raise refused("schema", fault)
    return _free(schema)


def _is_lenient(schema: Json) -> bool:
    """True if a grammar may pass over what it cannot hold of a schema."""
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("lenient") is True


def _free(schema: Json) -> Json:
    """Return a schema that allows any object, or any value where it is not one for objects."""
    if not isinstance(schema, dict):
        return True
    free: JsonObject = {"x-guidance": schema["x-guidance"]}
    return {**free, "type": "object"} if schema.get("type") == "object" else free


def is_satisfiable(schema: Json) -> bool:
    """False if no value fits a schema, as far as llguidance can tell."""
    return not _fault(schema).startswith(EMPTY)


def full_match_pattern(pattern: str) -> str | None:
    """Return the expression of the whole texts in which a pattern is found.

    None for one with look-around within, or that llguidance does not read.
    """
    from llguidance import LLMatcher

    branches = []
    for branch in _branches(pattern):
        begins = branch.startswith("^")
        ends = _PARTS.findall(branch)[-1:] == ["$"]
        inner = branch[begins : len(branch) - ends]
        free = "(?s:.*)"
        branches.append(f"{'' if begins else free}(?:{inner}){'' if ends else free}")
    expression = "|".join(branches)
    grammar = LLMatcher.grammar_from_regex(expression)
    is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar)
    return None if is_error else expression


_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""A part of an expression: an escape, a class, or a character."""


def _branches(pattern: str) -> list[str]:
    """Return the alternatives of an expression that no group holds."""
    branches = [""]
    depth = 0
    for part in _PARTS.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            branches.append("")
        else:
            branches[-1] += part
    return branches


def check_size(kind: str, text: str) -> None:
    """Raises UsageError for the text of a grammar, or of schemas in one, that is too long."""
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise refused(kind, f"it is longer than {MAX_BYTES // 1024} KiB")


def check_patterns(kind: str, text: str) -> None:
    """Raises UsageError for a grammar whose expressions together are too long."""
    if len(text) <= MAX_PATTERN_BYTES:
        return
    if sum(map(len, _expressions(kind, text))) > MAX_PATTERN_BYTES:
        raise refused(kind, f"its expressions are longer than {MAX_PATTERN_BYTES // 1024} KiB")


def check_parts(kind: str, text: str) -> None:
    """Raises UsageError for a grammar whose schemas together have too many parts."""
    if len(text) <= 2 * MOST_PARTS:  # each is a character and a comma at least
        return
    counts: list[int] = []

    def count(schema: Json) -> Json:
        counts.append(_parts(schema))
        return True

    with_schemas(kind, text, count)
    if (parts := sum(counts)) > MOST_PARTS:
        words = f"it has {parts} parts (objects, lists, and what lists, enum and const hold)"
        raise refused(kind, f"{words}, {MOST_PARTS} at most are supported")


def _parts(schema: Json) -> int:
    """Return how many parts a schema, or a value of one of its keywords, has."""
    if isinstance(schema, list):
        return 1 + sum(_parts(item) if isinstance(item, dict | list) else 1 for item in schema)
    if not isinstance(schema, dict):
        return 0
    parts = 1
    for key, value in schema.items():
        if key in (*MAPS, *DEFINITIONS) and isinstance(value, dict):
            parts += 1 + sum(map(_parts, value.values()))
        elif key == "const":
            parts += _held(value)
        elif key == "enum" and isinstance(value, list):
            parts += 1 + sum(_held(one) for one in value if isinstance(one, dict | list))
        elif key not in NOTES:
            parts += _parts(value)
    return parts


def _held(value: Json) -> int:
    """Return how many parts a value has that a schema's `enum` or `const` holds."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_held, inner))


def _expressions(kind: str, text: str) -> list[str]:
    """Return all regular expressions in a grammar."""
    if kind == "regex":
        return [text]
    expressions: list[str] = []
    for node in _schemas(kind, text):
        pattern = node.get("pattern")
        patterns = node.get("patternProperties")
        expressions += [pattern] if isinstance(pattern, str) else []
        expressions += patterns if isinstance(patterns, dict) else []
    if kind == "lark":
        words = (match[0] for match in _LARK.finditer(text))
        expressions += [word for word in words if word.startswith("/") and word[1] != "/"]
    return expressions


def _schemas(kind: str, text: str) -> list[JsonObject]:
    """Return all objects in the JSON schemas of a grammar."""
    nodes: list[JsonObject] = []

    def collect(schema: Json) -> Json:
        nodes.extend(_objects(schema))
        return True

    with_schemas(kind, text, collect)
    return nodes


def parser_limits() -> LLParserLimits:
    """Return what llguidance's parser may use for one token: more than it allows by itself, so
    that objects of `MOST_OPTIONAL` properties fit."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, step_max_items=MAX_STEP_ITEMS)


def _fault(schema: Json) -> str:
    """Return what llguidance has against a schema, in its words; nothing where it takes it."""
    text = json.dumps(schema)
    if len(text) <= SHALLOW_BYTES:
        return _fault_of(text)
    return on_large_stack(lambda: _fault_of(text))


def _fault_of(text: str) -> str:
    """Return what llguidance has against the text of a schema."""
    from llguidance import LLMatcher

    style = JSON_STYLE if text.startswith("{") else None
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, style)
    except (ValueError, RuntimeError) as error:
        return str(error)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_error else ""


def _check_states(schema: Json) -> None:
    """Raises UsageError for a schema whose numbers or combined patterns make a grammar of too many
    states."""
    nodes = list(_objects(schema))
    numbers = (node.get("multipleOf", 0) for node in nodes)
    steps = [
        Fraction(str(step))
        for step in numbers
        if isinstance(step, int | float) and step and isfinite(step) and step is not True
    ]
    if lcm(*(step.numerator * step.denominator for step in steps)) > MOST_STATES:
        raise refused("schema", f"its multipleOf have no common multiple up to {MOST_STATES}")
    patterns = {pattern for node in nodes if isinstance(pattern := node.get("pattern"), str)}
    combines = any("allOf" in node or {"$ref", "pattern"} <= node.keys() for node in nodes)
    if len(patterns) > MOST_PATTERNS and combines:
        raise refused("schema", f"it combines more than {MOST_PATTERNS} patterns")


def _check_rows(schema: Json) -> None:
    """Raises UsageError for a closed schema with more properties than a row of the parser holds."""
    definitions = schema.get("$defs") if isinstance(schema, dict) else None
    visited = set[int]()
    for node in _objects(schema):
        if id(node) in visited:  # it adds to what was counted
            continue
        nodes = _in_place(node, definitions if isinstance(definitions, dict) else {})
        visited.update(map(id, nodes))
        optional = sum(map(_optional_properties, nodes))
        if optional > MOST_OPTIONAL:
            words = f"an object has {optional} properties that may be absent"
            raise refused("schema", f"{words}, {MOST_OPTIONAL} at most are supported")


def _in_place(node: JsonObject, definitions: JsonObject) -> list[JsonObject]:
    """Return a schema and all that may apply to the same value, each once."""
    nodes = [node]
    seen = {id(node)}
    for schema in nodes:
        below: list[Json] = []
        for key in IN_PLACE_LISTS:
            branches = schema.get(key)
            below += branches if isinstance(branches, list) else []
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith(PREFIX):
            below.append(definitions.get(reference.removeprefix(PREFIX)))
        for branch in below:
            if isinstance(branch, dict) and id(branch) not in seen:
                seen.add(id(branch))
                nodes.append(branch)
    return nodes


def _optional_properties(node: JsonObject) -> int:
    """Return how many properties of an object's schema may be absent."""
    properties = node.get("properties")
    required = node.get("required")
    if not isinstance(properties, dict):
        return 0
    names = required if isinstance(required, list) else []
    return len(properties.keys() - {name for name in names if isinstance(name, str)})


def _objects(node: Json) -> Iterator[JsonObject]:
    """Yield every object in a JSON value."""
    if isinstance(node, dict):
        yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from _objects(child)


def summarize_error(text: str) -> str:
    """The first line of what the library says, and the reason that it gives below."""
    if TOO_MANY_SYMBOLS in text:
        return f"it needs more than the {MOST_SYMBOLS} symbols that llguidance can number"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [
        "for no reason it gave"
    ]
    why = (rest for kind, _, rest in (line.partition(": ") for line in lines) if kind == "error")
    return " ".join([lines[0][:200], *why])


def refused(kind: str, why: str) -> UsageError:
    flag, example = FLAGS[kind]
    return UsageError(
        f"{flag} cannot be used: {summarize_error(why)}", fix=[f"{flag} {example}"], code="grammar"
    )
