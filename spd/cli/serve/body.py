"""A request's body, read and checked: bytes to JSON, a table of fields, and the API's form of an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from spd.errors import (
    CheckpointError,
    EngineError,
    IncompatibleError,
    ResourceError,
    SpdError,
    UsageError,
)
from spd.formats.json_file import decode_utf8, parse_json

MAX_BODY_ITEMS = 1 << 20
"""Tokens of JSON structure in a body: what it costs in memory is bounded by them."""
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
KINDS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
"""Kinds of errors by status, as Anthropic calls them."""
FIELDS_OF_FLAGS = {
    "--schema": "the schema",
    "--grammar": "the grammar of the tools or the format",
    "--prompt-ids": "the prompt",
}
"""What clients know in the place of options of the command line."""
_FLAG = re.compile("|".join(FIELDS_OF_FLAGS))
Check = Callable[[Any, str], Any]
"""(value, its name) → the value as it is used. Raises ApiError."""


class ApiError(Exception):
    """A refusal; clients of each API find its fields in the body. `retry` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: int = 0,
        closes: bool = False,
    ) -> None:
        """closes: whether the connection is to be closed behind the refusal."""
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"retry-after": str(retry)} if retry else {}
        if closes:
            self.headers["connection"] = "close"
        kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body: dict[str, Any] = {"type": "error", "error": error}


def api_error(error: BaseException, *, param: str | None = None) -> ApiError:
    """How the API says what spd says; what is not foreseen is a server's error without its inside."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, SpdError):
        return ApiError(500, f"unexpected {type(error).__name__}", code="internal")
    message = " ".join([f"{error.message}.", *error.reason]) if error.reason else error.message
    message = _FLAG.sub(lambda flag: FIELDS_OF_FLAGS[flag[0]], message)
    if error.code == "context_overflow":  # by these words agents know to shorten a conversation
        message = f"prompt is too long: {message}"
        return ApiError(400, message, param="messages", code="context_length_exceeded")
    if isinstance(error, ResourceError):
        return ApiError(503, message, code=error.code, retry=1)
    if isinstance(error, UsageError | IncompatibleError):
        return ApiError(400, message, param=param, code=error.code)
    message = message if isinstance(error, EngineError) else "unexpected error"
    return ApiError(500, message, code=error.code)


def refuse(name: str, why: str, code: str = "invalid_value") -> NoReturn:
    """Raise ApiError about a field, or about the body, which has no name."""
    raise ApiError(
        400, f"Invalid {repr(name) if name else 'body'}: {why}.", param=name or None, code=code
    )


def parse_body(data: bytes) -> Any:
    """A body as JSON without NaN, as `parse_json` reads it. Raises ApiError."""
    if sum(map(data.count, (b"[", b"{", b","))) > MAX_BODY_ITEMS:
        raise ApiError(400, f"The body holds more than {MAX_BODY_ITEMS:,} values.")
    try:
        text = decode_utf8(data, "The body")
        return parse_json(text, "The body", constant=lambda name: refuse(name, "it is no number"))
    except CheckpointError as error:
        raise ApiError(400, f"{error.message}.") from None


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


TEXT, FLAG, OBJECT = typed("a string", str), typed("a boolean", bool), typed("an object", dict)
_array, _number = typed("an array", list), typed("a number", int, float)


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
        where, found = f"{name}." if name else "", dict[str, Any]()
        for key, one in OBJECT(value, name).items():
            if (check_one := table.get(key)) is not None:
                found |= {} if one is None else {names.get(key, key): check_one(one, where + key)}
            elif (key in table or not others) and (one or type(one) in (int, float)):
                param = f"{where}{key}"[:100]
                raise ApiError(
                    400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter"
                )
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
