"""Preparation of JSON schemas for llguidance, alone or within a Lark grammar.

Objects are closed. References without a value are removed, and a schema without a value is refused,
as is one that would need too many states. `llguidance` is imported with the first schema. No torch
here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from functools import lru_cache
from math import isfinite, lcm
from typing import TYPE_CHECKING

from spd.errors import UsageError
from spd.runtime.engine.json_schema import (
    DEFINITIONS,
    DESCRIPTIONS,
    IN_PLACE_LISTS,
    MAPS,
    Json,
    JsonObject,
    close_objects,
)
from spd.runtime.engine.large_stack import on_large_stack
from spd.runtime.engine.request import JSON_WHITESPACE
from spd.runtime.engine.schema_cycles import DEFINITION_PREFIX, EndlessSchemaError, without_endless

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_STATES = 100_000
"""Largest common multiple of all `multipleOf` in a schema."""
MAX_PATTERNS = 12
"""Largest number of patterns in a schema where `allOf` or `$ref` combine some."""
MAX_BYTES = 512 * 1024
"""Largest size of a grammar's text; 128 tools with twenty arguments each take about 200 KiB."""
MAX_PATTERN_BYTES = 64 * 1024
"""Largest size of all expressions of a grammar.

The cost of one grows with the square of its length.
"""
SHALLOW_BYTES = 8 * 1024
"""Size up to which a text cannot be nested so deeply that it needs a large stack."""
MAX_OPTIONAL = 2000
"""Largest number of optional properties of a value, summed over all schemas that apply to it.

For each of them llguidance's parser needs four items in a row, and its time grows with their
square.
"""
MAX_PARTS = 10_000
"""Largest number of objects and lists in all schemas of a grammar, with the elements of lists,
`enum` and `const`.

llguidance takes seconds for so many, and its time grows with their square. An `enum` of plain
values is one part, since they become one expression.
"""
MAX_ROW_ITEMS = 80_000
MAX_STEP_ITEMS = 400_000
TOO_MANY_SYMBOLS = "grammar.symbols.len() < u16::MAX as usize - 10"
"""llguidance's panic message for a grammar with more symbols than its tables can number."""
MAX_SYMBOLS = (1 << 16) - 1 - 10
UNSATISFIABLE = "Unsatisfiable schema"
"""The beginning of llguidance's message for a schema without a value."""
OPTION_EXAMPLES = {
    "schema": ("--schema", """'{"type": "object", "properties": {"name": {"type": "string"}}}'"""),
    "regex": ("--grammar", "'/[0-9]{4}-[0-9]{2}/'"),
    "lark": ("--grammar", """'start: "yes" | "no"'"""),
}
"""The option for each kind of grammar, and an example of its value."""


# A string, an expression, a comment, or the beginning of a schema.
_LARK_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*|(%json\s*)(?=[{tf])'
)


def with_schemas(kind: str, text: str, prepare: Callable[[Json], Json]) -> str:
    """Return a grammar's text with each JSON schema replaced by `prepare(schema)`.

    Text that is not valid JSON is left as it is.
    """
    if kind == "schema":
        try:
            return json.dumps(prepare(json.loads(text)))
        except (ValueError, RecursionError):  # llguidance reports these in more detail
            return text
    if kind != "lark":
        return text
    parts = list[str]()
    end = 0
    while match := _LARK_TOKEN.search(text, end):
        parts.append(text[end : match.end()])
        end = match.end()
        if match[1]:
            schema, end = _prepare_schema(text, end, prepare)
            parts.append(schema)
    return "".join([*parts, text[end:]])


def _prepare_schema(text: str, begin: int, prepare: Callable[[Json], Json]) -> tuple[str, int]:
    """Return the prepared schema that begins at `begin`, and its end.

    Empty text for invalid JSON.
    """
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
    """Return a schema prepared by `closed_schema`, which is called twice where llguidance refuses it."""
    schema: Json = json.loads(text)
    _check_states(schema)
    reduced = _without_unmatched_patterns(schema)
    closed = close_objects(reduced, closes=closes)
    try:
        pruned = without_endless(closed, is_satisfiable)
    except EndlessSchemaError as error:
        if _is_lenient(schema):
            return _unrestricted_schema(schema)
        raise grammar_error("schema", str(error)) from None
    _check_optional_properties(pruned)
    return pruned if closed.is_changed or pruned is not closed.schema else reduced


def _without_unmatched_patterns(node: Json) -> Json:
    """Return a schema without the `patternProperties` whose pattern matches no key."""
    if isinstance(node, list):
        return [_without_unmatched_patterns(item) for item in node]
    if not isinstance(node, dict):
        return node
    reduced = {key: _without_unmatched_patterns(value) for key, value in node.items()}
    patterns = reduced.get("patternProperties")
    if isinstance(patterns, dict):
        reduced["patternProperties"] = {
            pattern: value
            for pattern, value in patterns.items()
            if is_satisfiable({"type": "string", "pattern": pattern})
        }
    return reduced


def usable_schema(schema: Json) -> Json:
    """Return a schema that llguidance accepts: closed, else open, else unrestricted if it is
    lenient.

    Raises UsageError.
    """
    for closes in (True, False):
        usable = closed_schema(schema, closes=closes)
        error = _library_error(usable)
        if not error:
            return usable
    if not _is_lenient(schema):
        raise grammar_error("schema", error)
    return _unrestricted_schema(schema)


def _is_lenient(schema: Json) -> bool:
    """True if a grammar may ignore the constraints of a schema that it cannot express."""
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("lenient") is True


def _unrestricted_schema(schema: Json) -> Json:
    """Return a schema without constraints: any object, or any value where `schema` is not for
    objects.
    """
    if not isinstance(schema, dict):
        return True
    free: JsonObject = {"x-guidance": schema["x-guidance"]}
    return {**free, "type": "object"} if schema.get("type") == "object" else free


def is_satisfiable(schema: Json) -> bool:
    """True if a schema has a value, as far as llguidance can tell."""
    return not _library_error(schema).startswith(UNSATISFIABLE)


def full_match_pattern(pattern: str) -> str | None:
    """Return an expression for the full texts in which `pattern` has a match.

    None for a pattern with look-around inside, or one that llguidance does not support.
    """
    from llguidance import LLMatcher

    branches = []
    for branch in _top_level_alternatives(pattern):
        begins = branch.startswith("^")
        ends = _PATTERN_PART.findall(branch)[-1:] == ["$"]
        inner = branch[begins : len(branch) - ends]
        free = "(?s:.*)"
        branches.append(f"{'' if begins else free}(?:{inner}){'' if ends else free}")
    expression = "|".join(branches)
    grammar = LLMatcher.grammar_from_regex(expression)
    is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar)
    return None if is_error else expression


_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""A part of an expression: an escape, a class, or a character."""


def _top_level_alternatives(pattern: str) -> list[str]:
    """Return the alternatives of an expression outside of groups."""
    branches = [""]
    depth = 0
    for part in _PATTERN_PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            branches.append("")
        else:
            branches[-1] += part
    return branches


def check_text_size(kind: str, text: str) -> None:
    """Raise UsageError for the text of a grammar, or of schemas in one, that is too long."""
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise grammar_error(kind, f"it is longer than {MAX_BYTES // 1024} KiB")


def check_patterns(kind: str, text: str) -> None:
    """Raise UsageError for a grammar whose expressions together are too long."""
    if len(text) <= MAX_PATTERN_BYTES:
        return
    if sum(map(len, _expressions(kind, text))) > MAX_PATTERN_BYTES:
        raise grammar_error(
            kind, f"its expressions are longer than {MAX_PATTERN_BYTES // 1024} KiB"
        )


def check_parts(kind: str, text: str) -> None:
    """Raise UsageError for a grammar whose schemas together have more than `MAX_PARTS` parts."""
    if len(text) <= 2 * MAX_PARTS:  # a part is at least a character and a comma
        return
    counts: list[int] = []

    def count(schema: Json) -> Json:
        counts.append(_count_parts(schema))
        return True

    with_schemas(kind, text, count)
    parts = sum(counts)
    if parts > MAX_PARTS:
        excess = f"it has {parts} parts (objects, lists, and what lists, enum and const hold)"
        raise grammar_error(kind, f"{excess}, {MAX_PARTS} at most are supported")


def _count_parts(schema: Json) -> int:
    """Return the number of parts of a schema, or of a keyword's value."""
    if isinstance(schema, list):
        return 1 + sum(
            _count_parts(item) if isinstance(item, dict | list) else 1 for item in schema
        )
    if not isinstance(schema, dict):
        return 0
    parts = 1
    for key, value in schema.items():
        if key in (*MAPS, *DEFINITIONS) and isinstance(value, dict):
            parts += 1 + sum(map(_count_parts, value.values()))
        elif key == "const":
            parts += _count_value_parts(value)
        elif key == "enum" and isinstance(value, list):
            containers = (member for member in value if isinstance(member, dict | list))
            parts += 1 + sum(map(_count_value_parts, containers))
        elif key not in DESCRIPTIONS:
            parts += _count_parts(value)
    return parts


def _count_value_parts(value: Json) -> int:
    """Return the number of parts of a value in `enum` or `const`."""
    return 1 + sum(map(_count_value_parts, _child_values(value)))


def _expressions(kind: str, text: str) -> list[str]:
    """Return all regular expressions in a grammar."""
    if kind == "regex":
        return [text]
    expressions: list[str] = []
    for node in _schema_objects(kind, text):
        pattern = node.get("pattern")
        patterns = node.get("patternProperties")
        expressions += [pattern] if isinstance(pattern, str) else []
        expressions += patterns if isinstance(patterns, dict) else []
    if kind == "lark":
        tokens = (match[0] for match in _LARK_TOKEN.finditer(text))
        expressions += [token for token in tokens if token.startswith("/") and token[1] != "/"]
    return expressions


def _schema_objects(kind: str, text: str) -> list[JsonObject]:
    """Return all objects in the JSON schemas of a grammar."""
    nodes: list[JsonObject] = []

    def collect(schema: Json) -> Json:
        nodes.extend(_nested_objects(schema))
        return True

    with_schemas(kind, text, collect)
    return nodes


def parser_limits() -> LLParserLimits:
    """Return the limits of llguidance's parser for one token.

    They are above its defaults, so that objects of `MAX_OPTIONAL` properties fit.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, step_max_items=MAX_STEP_ITEMS)


def library_schema_grammar(text: str) -> str:
    """Return the grammar of a JSON schema in llguidance's own form.

    Raises ValueError, RuntimeError.
    """
    from llguidance import LLMatcher

    if text.lstrip().startswith("{"):
        return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": JSON_WHITESPACE})
    return LLMatcher.grammar_from_json_schema(text, None)  # `true` or `false` has no options


def _library_error(schema: Json) -> str:
    """Return llguidance's error message for a schema; empty if it accepts it."""
    text = json.dumps(schema)
    if len(text) <= SHALLOW_BYTES:
        return _library_error_of_text(text)
    return on_large_stack(lambda: _library_error_of_text(text))


def _library_error_of_text(text: str) -> str:
    """Return llguidance's error message for the text of a schema; empty if it accepts it."""
    from llguidance import LLMatcher

    try:
        grammar = library_schema_grammar(text)
    except (ValueError, RuntimeError) as error:
        return str(error)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_error else ""


def _check_states(schema: Json) -> None:
    """Raise UsageError for a schema whose numbers or combined patterns need too many states."""
    nodes = list(_nested_objects(schema))
    common_multiple = 1
    for node in nodes:
        step = node.get("multipleOf", 0)
        if isinstance(step, int | float) and step and isfinite(step) and step is not True:
            fraction = Fraction(str(step))
            common_multiple = lcm(common_multiple, fraction.numerator * fraction.denominator)
    if common_multiple > MAX_STATES:
        raise grammar_error("schema", f"its multipleOf have no common multiple up to {MAX_STATES}")
    patterns = {node["pattern"] for node in nodes if isinstance(node.get("pattern"), str)}
    combines = any("allOf" in node or {"$ref", "pattern"} <= node.keys() for node in nodes)
    if len(patterns) > MAX_PATTERNS and combines:
        raise grammar_error("schema", f"it combines more than {MAX_PATTERNS} patterns")


def _check_optional_properties(schema: Json) -> None:
    """Raise UsageError for a closed schema with an object of more than `MAX_OPTIONAL` optional keys."""
    definitions = schema.get("$defs") if isinstance(schema, dict) else None
    visited = set[int]()
    for node in _nested_objects(schema):
        if id(node) in visited:  # counted with the schema that it belongs to
            continue
        nodes = _schemas_of_same_value(node, definitions if isinstance(definitions, dict) else {})
        visited.update(map(id, nodes))
        optional = sum(map(_optional_properties, nodes))
        if optional > MAX_OPTIONAL:
            excess = f"an object has {optional} properties that may be absent"
            raise grammar_error("schema", f"{excess}, {MAX_OPTIONAL} at most are supported")


def _schemas_of_same_value(node: JsonObject, definitions: JsonObject) -> list[JsonObject]:
    """Return a schema and all schemas that may apply to the same value, each once."""
    nodes = [node]
    visited = {id(node)}
    for schema in nodes:  # grows while it is read
        candidates: list[Json] = []
        for key in IN_PLACE_LISTS:
            branches = schema.get(key)
            candidates += branches if isinstance(branches, list) else []
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith(DEFINITION_PREFIX):
            candidates.append(definitions.get(reference.removeprefix(DEFINITION_PREFIX)))
        for candidate in candidates:
            if isinstance(candidate, dict) and id(candidate) not in visited:
                visited.add(id(candidate))
                nodes.append(candidate)
    return nodes


def _optional_properties(node: JsonObject) -> int:
    """Return the number of optional properties of an object's schema."""
    properties = node.get("properties")
    required = node.get("required")
    if not isinstance(properties, dict):
        return 0
    names = required if isinstance(required, list) else []
    return len(properties.keys() - {name for name in names if isinstance(name, str)})


def _nested_objects(node: Json) -> Iterator[JsonObject]:
    """Yield every object in a JSON value."""
    if isinstance(node, dict):
        yield node
    for child in _child_values(node):
        yield from _nested_objects(child)


def _child_values(value: Json) -> Collection[Json]:
    """Return the values of an object or a list; none of another value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def summarize_error(text: str) -> str:
    """Return the first line of a message of llguidance, and the reason in its later lines."""
    if TOO_MANY_SYMBOLS in text:
        return f"it needs more than the {MAX_SYMBOLS} symbols that llguidance can number"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = lines or ["for no reason it gave"]
    parts = [line.partition(": ") for line in lines]
    reasons = [reason for kind, _, reason in parts if kind == "error"]
    return " ".join([lines[0][:200], *reasons])


def grammar_error(kind: str, reason: str) -> UsageError:
    """Return the error for a grammar of a kind that cannot be used."""
    flag, example = OPTION_EXAMPLES[kind]
    return UsageError(
        f"{flag} cannot be used: {summarize_error(reason)}",
        fix=[f"{flag} {example}"],
        code="grammar",
    )
