"""Checks of JSON values by tables of fields: bodies of requests, lines of files, saved chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

Check = Callable[[Any, str], Any]
"""(value, its name) → the value as it is used. Raises FieldError."""


class FieldError(Exception):
    """A field that is missing, unknown or has a wrong value.

    field: its name with those of the objects around it; None for the whole value. code: the kind of
    the fault in OpenAI's words, such as `invalid_type`.
    """

    def __init__(self, message: str, *, field: str | None, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code


def refuse(name: str, why: str, code: str = "invalid_value") -> NoReturn:
    """Raise FieldError about a field, or about the whole value, which has no name."""
    shown = repr(name) if name else "body"
    raise FieldError(f"Invalid {shown}: {why}.", field=name or None, code=code)


def typed(words: str, *kinds: type) -> Check:
    """A value of these types; true and false are no numbers."""

    def check(value: Any, name: str) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            refuse(name, f"expected {words}, but got {json.dumps(value)[:60]}", "invalid_type")
        return value

    return check


def anything(value: Any, name: str) -> Any:
    """Whatever it is."""
    return value


TEXT = typed("a string", str)
FLAG = typed("a boolean", bool)
OBJECT = typed("an object", dict)
_array = typed("an array", list)
_number = typed("a number", int, float)


def number(value: Any, name: str) -> float:
    """A number that a float can hold; its range is checked where it is used."""
    try:
        return float(_number(value, name))
    except OverflowError:
        refuse(name, "is beyond all numbers")


def whole(low: int, high: int) -> Check:
    """An integer within a range."""

    def check(value: Any, name: str) -> int:
        if _number(value, name) % 1:  # of an infinity it is no number, which is true
            refuse(name, f"expected an integer, but got {value}", "invalid_type")
        if not low <= value <= high:
            refuse(name, f"expected a value from {low} to {high}")
        return int(value)

    return check


def one_of(*values: str) -> Check:
    """One of these texts."""

    def check(value: Any, name: str) -> str:
        if TEXT(value, name) not in values:
            refuse(name, f"expected {', '.join(values)}")
        return str(value)

    return check


def listed(check: Check, most: int) -> Check:
    """A list of at most so many, each checked."""

    def check_all(value: Any, name: str) -> tuple[Any, ...]:
        if len(_array(value, name)) > most:
            refuse(name, f"expected at most {most} items, but got {len(value):,}")
        return tuple(check(one, f"{name}[{number}]") for number, one in enumerate(value))

    return check_all


def fields(
    table: Mapping[str, Check | None], *needed: str, others: bool = False, **names: str
) -> Check:
    """An object with these fields, each checked; null counts as absent; `names` rename them.

    With `others`, fields that are not in the table are passed over. Without it, and where the check is None,
    a field has to be empty.
    """

    def check(value: Any, name: str) -> dict[str, Any]:
        where = f"{name}." if name else ""
        found = dict[str, Any]()
        for key, one in OBJECT(value, name).items():
            if (check_one := table.get(key)) is not None:
                found |= {} if one is None else {names.get(key, key): check_one(one, where + key)}
            elif (key in table or not others) and (one or type(one) in (int, float)):
                param = f"{where}{key}"[:100]
                words = f"Unknown parameter: '{param}'."
                raise FieldError(words, field=param, code="unknown_parameter")
        for key in needed:
            if value.get(key) is None:
                refuse(where + key, "it is missing", "missing_required_parameter")
        return found

    return check


some = partial(fields, others=True)


def blocks(kinds: Mapping[str, Check], usual: str | None = None) -> Check:
    """A text, or a list of objects of these types, or of the `usual` one, each checked as its type wants."""

    def check_one(value: Any, name: str) -> dict[str, Any]:
        kind = OBJECT(value, name).get("type", usual)
        if not isinstance(kind, str) or kind not in kinds:
            why = f"expected {', '.join(kinds)}, but got {json.dumps(kind)[:60]}"
            refuse(f"{name}.type", f"{why}; this server reads no images, audio or files")
        return {**kinds[kind](value, name), "type": kind}

    all_of = listed(check_one, 10_000)
    return lambda value, name: all_of(
        [{"type": "text", "text": value}] if type(value) is str else value, name
    )


def left_out(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a model is told in place of a block that a tool brought, so that an agent goes on."""
    return {"text": f"[{value['type']}: left out, for this model reads nothing but text]"}


def texts(*kinds: str, **others: Check) -> Check:
    """A text, or a list of blocks of these types, `text` among them, that each have one; as one text."""
    parts = blocks({**dict.fromkeys(kinds, some({"text": TEXT}, "text")), **others})
    return lambda value, name: "\n".join(part["text"] for part in parts(value, name))
