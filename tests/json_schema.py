"""The part of JSON Schema that the shipped schemas use; an unknown keyword is an error."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[1] / "spd" / "runtime" / "lab" / "schemas"
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}
NO_RULE = {"$schema", "$id", "$defs", "title"}


def faults(value: object, name: str, part: str | None = None) -> list[str]:
    """Return how `value` breaks the shipped schema `name`, or a part that it defines."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    return list(_walk(value, schema if part is None else schema["$defs"][part], schema, "$"))


def faults_by_name(value: dict[str, Any]) -> list[str]:
    """Return how an object breaks the schema that it names; without a name, an error's."""
    match = re.fullmatch(r"spd\.([a-z.-]+)/1", value.get("schema", "spd.error/1"))
    assert match is not None, value
    return faults(value, match[1])


def _walk(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    for keyword, rule in schema.items():
        if keyword == "$ref":
            yield from _walk(value, root["$defs"][rule.rpartition("/")[2]], root, at)
        elif keyword == "type":
            kinds = [TYPES[kind] for kind in ([rule] if isinstance(rule, str) else rule)]
            fits = [kind for kind in kinds if isinstance(value, kind)]
            if not any(isinstance(value, bool) == (kind is bool) for kind in fits):
                yield f"{at} is {type(value).__name__}, not {rule}"
        elif keyword in ("const", "enum"):
            if value not in (rule if keyword == "enum" else [rule]):
                yield f"{at} is not one of {rule}"
        elif keyword == "anyOf":
            if all(list(_walk(value, option, root, at)) for option in rule):
                yield f"{at} fits none of {len(rule)} forms"
        elif keyword == "required":
            missing = set(rule) - value.keys() if isinstance(value, dict) else ()
            yield from (f"{at}.{name} is missing" for name in missing)
        elif keyword == "properties":
            for name in rule.keys() & value.keys() if isinstance(value, dict) else ():
                yield from _walk(value[name], rule[name], root, f"{at}.{name}")
        elif keyword == "additionalProperties":
            unknown = value.keys() - schema.get("properties", {}) if isinstance(value, dict) else ()
            yield from (f"{at}.{name} is unknown" for name in unknown)
        elif keyword == "items":
            for number, item in enumerate(value if isinstance(value, list) else ()):
                yield from _walk(item, rule, root, f"{at}[{number}]")
        elif keyword not in NO_RULE:
            raise AssertionError(f"keyword {keyword} is not known")
