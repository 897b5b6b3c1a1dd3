"""Checks of JSON values by tables of fields: bodies of requests, lines of files, saved chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from typing import TypeAlias

    from spd.runtime import Json

T = TypeVar("T")
Check: TypeAlias = "Callable[[Json, str], T]"
"""(value, its name) → the checked value. Raises FieldError."""


class FieldError(Exception):
    """A field that is missing, unknown or has a wrong value.

    field: its name with those of the objects around it; None for the full value. code: the kind of
    the fault in OpenAI's words, such as `invalid_type`.
    """

    def __init__(self, message: str, *, field: str | None, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code


def refuse(name: str, reason: str, code: str = "invalid_value") -> NoReturn:
    """Raise FieldError about a field, or about the full body, which has no name."""
    display_name = repr(name) if name else "body"
    raise FieldError(f"Invalid {display_name}: {reason}.", field=name or None, code=code)


def of_type(description: str, *types: type[T]) -> Check[T]:
    """Return the check of a value of these types; true and false are no numbers."""

    def check(value: Json, name: str) -> T:
        """Return the value. Raises FieldError for another type."""
        if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
            return value
        got = json.dumps(value)[:60]
        refuse(name, f"expected {description}, but got {got}", "invalid_type")

    return check


def any_value(value: Json, name: str) -> Json:
    """Return the value as it is: nothing is checked."""
    return value


TEXT = of_type("a string", str)
FLAG = of_type("a boolean", bool)
OBJECT: Check[dict[str, Json]] = of_type("an object", dict)
"""Checks of a value's type alone."""
_array: Check[list[Json]] = of_type("an array", list)
_number: Check[float] = of_type("a number", int, float)
"""Checks of a value's type alone, without ranges or elements."""


def number(value: Json, name: str) -> float:
    """Return a number as a float, NaN and infinities too; its range is checked where it is used.

    Raises FieldError for another type, and for a number that no float can hold.
    """
    try:
        return float(_number(value, name))
    except OverflowError:
        refuse(name, "is beyond all numbers")


def integer(minimum: int, maximum: int) -> Check[int]:
    """Return the check of a whole number from `minimum` to `maximum`, such as 3 or 3.0."""

    def check(value: Json, name: str) -> int:
        """Return the integer. Raises FieldError."""
        count = _number(value, name)
        if count % 1:  # the remainder of an infinity is NaN, which is true
            refuse(name, f"expected an integer, but got {value}", "invalid_type")
        if not minimum <= count <= maximum:
            refuse(name, f"expected a value from {minimum} to {maximum}")
        return int(count)

    return check


def one_of(*values: str) -> Check[str]:
    """Return the check of a text that is one of these."""

    def check(value: Json, name: str) -> str:
        """Return the text. Raises FieldError."""
        text = TEXT(value, name)
        if text not in values:
            refuse(name, f"expected {', '.join(values)}")
        return text

    return check


def array_of(check: Check[T], limit: int) -> Check[tuple[T, ...]]:
    """Return the check of an array of at most `limit` items, each checked."""

    def check_all(value: Json, name: str) -> tuple[T, ...]:
        """Return the checked items. Raises FieldError."""
        items = _array(value, name)
        if len(items) > limit:
            refuse(name, f"expected at most {limit} items, but got {len(items):,}")
        return tuple(check(item, f"{name}[{index}]") for index, item in enumerate(items))

    return check_all


def object_of(
    table: Mapping[str, Check[object] | None],
    *required: str,
    is_open: bool = False,
    **renamed: str,
) -> Check[Any]:
    """Return the check of an object with these fields, each checked.

    A field that is null counts as absent; `renamed` maps fields to their names in the checked
    object. With `is_open`, fields that are not in the table are ignored. Without it, and where the
    check is None, a field has to be empty. The caller annotates the type of the checked object.
    """

    def check(value: Json, name: str) -> dict[str, object]:
        """Return the checked fields. Raises FieldError."""
        prefix = f"{name}." if name else ""
        fields = OBJECT(value, name)
        checked: dict[str, object] = {}
        for key, item in fields.items():
            field_check = table.get(key)
            if field_check is not None:
                if item is not None:
                    checked[renamed.get(key, key)] = field_check(item, prefix + key)
            elif (key in table or not is_open) and (item or type(item) in (int, float)):
                param = f"{prefix}{key}"[:100]
                message = f"Unknown parameter: '{param}'."
                raise FieldError(message, field=param, code="unknown_parameter")
        for key in required:
            if fields.get(key) is None:
                refuse(prefix + key, "it is missing", "missing_required_parameter")
        return checked

    return check


open_object = partial(object_of, is_open=True)
"""Returns the check of an object in which unknown fields are ignored."""


def content_blocks(
    block_checks: Mapping[str, Check[Any]], default_type: str | None = None
) -> Check[tuple[dict[str, Any], ...]]:
    """Return the check of a text, or of an array of typed objects, each checked by its type.

    default_type: the type of an object that has none.
    """

    def check_block(value: Json, name: str) -> dict[str, Any]:
        """Return a checked block with its `type`. Raises FieldError."""
        kind = OBJECT(value, name).get("type", default_type)
        if not isinstance(kind, str) or kind not in block_checks:
            reason = f"expected {', '.join(block_checks)}, but got {json.dumps(kind)[:60]}"
            refuse(f"{name}.type", f"{reason}; this server reads no images, audio or files")
        return {**block_checks[kind](value, name), "type": kind}

    check_all = array_of(check_block, 10_000)

    def check(value: Json, name: str) -> tuple[dict[str, Any], ...]:
        """Return the checked blocks, of a text one block. Raises FieldError."""
        return check_all([{"type": "text", "text": value}] if type(value) is str else value, name)

    return check


def placeholder_block(value: Json, name: str) -> dict[str, str]:
    """Return the text that stands for a tool's block that is no text, so that an agent goes on."""
    kind = OBJECT(value, name)["type"]
    return {"text": f"[{kind}: left out, for this model reads nothing but text]"}


def joined_texts(*text_types: str, **other_checks: Check[Any]) -> Check[str]:
    """Return the check of a text, or of an array of blocks with a `text` each, joined by line
    breaks.
    """
    text_block = open_object({"text": TEXT}, "text")
    parts = content_blocks({**dict.fromkeys(text_types, text_block), **other_checks})
    return lambda value, name: "\n".join(part["text"] for part in parts(value, name))
