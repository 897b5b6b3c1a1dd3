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


def of_type(words: str, *kinds: type) -> Check:
    """A value of these types; true and false are no numbers."""

    def check(value: Any, name: str) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            refuse(name, f"expected {words}, but got {json.dumps(value)[:60]}", "invalid_type")
        return value

    return check


def any_value(value: Any, name: str) -> Any:
    """Whatever it is."""
    return value


TEXT = of_type("a string", str)
FLAG = of_type("a boolean", bool)
OBJECT = of_type("an object", dict)
_array = of_type("an array", list)
_number = of_type("a number", int, float)


def number(value: Any, name: str) -> float:
    """A number that a float can hold; its range is checked where it is used."""
    try:
        return float(_number(value, name))
    except OverflowError:
        refuse(name, "is beyond all numbers")


def integer(minimum: int, maximum: int) -> Check:
    """An integer within a range."""

    def check(value: Any, name: str) -> int:
        if _number(value, name) % 1:  # of an infinity it is no number, which is true
            refuse(name, f"expected an integer, but got {value}", "invalid_type")
        if not minimum <= value <= maximum:
            refuse(name, f"expected a value from {minimum} to {maximum}")
        return int(value)

    return check


def one_of(*values: str) -> Check:
    """One of these texts."""

    def check(value: Any, name: str) -> str:
        if TEXT(value, name) not in values:
            refuse(name, f"expected {', '.join(values)}")
        return str(value)

    return check


def array_of(check: Check, limit: int) -> Check:
    """A list of at most so many, each checked."""

    def check_all(value: Any, name: str) -> tuple[Any, ...]:
        if len(_array(value, name)) > limit:
            refuse(name, f"expected at most {limit} items, but got {len(value):,}")
        return tuple(check(one, f"{name}[{number}]") for number, one in enumerate(value))

    return check_all


def strict_object(
    table: Mapping[str, Check | None], *required: str, is_open: bool = False, **renamed: str
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
                found |= {} if one is None else {renamed.get(key, key): check_one(one, where + key)}
            elif (key in table or not is_open) and (one or type(one) in (int, float)):
                param = f"{where}{key}"[:100]
                words = f"Unknown parameter: '{param}'."
                raise FieldError(words, field=param, code="unknown_parameter")
        for key in required:
            if value.get(key) is None:
                refuse(where + key, "it is missing", "missing_required_parameter")
        return found

    return check


open_object = partial(strict_object, is_open=True)


def content_blocks(block_checks: Mapping[str, Check], default_type: str | None = None) -> Check:
    """A text, or a list of objects of these types, or of the `usual` one, each checked as its type wants."""

    def check_one(value: Any, name: str) -> dict[str, Any]:
        kind = OBJECT(value, name).get("type", default_type)
        if not isinstance(kind, str) or kind not in block_checks:
            why = f"expected {', '.join(block_checks)}, but got {json.dumps(kind)[:60]}"
            refuse(f"{name}.type", f"{why}; this server reads no images, audio or files")
        return {**block_checks[kind](value, name), "type": kind}

    all_of = array_of(check_one, 10_000)
    return lambda value, name: all_of(
        [{"type": "text", "text": value}] if type(value) is str else value, name
    )


def placeholder_block(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a model is told in place of a block that a tool brought, so that an agent goes on."""
    return {"text": f"[{value['type']}: left out, for this model reads nothing but text]"}


def joined_texts(*text_types: str, **other_checks: Check) -> Check:
    """A text, or a list of blocks of these types, `text` among them, that each have one; as one text."""
    parts = content_blocks(
        {**dict.fromkeys(text_types, open_object({"text": TEXT}, "text")), **other_checks}
    )
    return lambda value, name: "\n".join(part["text"] for part in parts(value, name))
