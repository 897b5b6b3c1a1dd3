"""A request's body, read and checked: bytes to JSON, fields by type, and the API's form of an error."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from spd.cli.text.prompt import check_text
from spd.errors import EngineError, IncompatibleError, ResourceError, SpdError, UsageError

BODY_LIMIT = 16 << 20
MAX_DEPTH = 100
"""Lists and objects that lie in each other."""
MAX_BODY_ITEMS = 1 << 20
"""Tokens of JSON structure in a body: what it costs in memory is bounded by them."""
JSON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (str, "a string"),
    (int, "an integer"),
    (float, "a number"),
    (list, "an array"),
    (dict, "an object"),
)


class ApiError(Exception):
    """A refusal as the API says it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def body(self) -> dict[str, Any]:
        """The object that clients turn into an exception."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def api_error(error: BaseException, *, param: str | None = None) -> ApiError:
    """How the API says what spd says; what is not foreseen is a server's error without its inside."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, SpdError):
        return ApiError(500, f"unexpected {type(error).__name__}", kind="server_error", code="internal")
    message = error.message.replace("--schema", "the schema")
    message = " ".join([f"{message}.", *error.reason]) if error.reason else message
    if error.code == "context_overflow":
        return ApiError(400, message, param=param or "messages", code="context_length_exceeded")
    if isinstance(error, ResourceError):
        return ApiError(503, message, kind="server_error", code=error.code, retry_after=1)
    if isinstance(error, UsageError | IncompatibleError):
        return ApiError(400, message, param=param, code=error.code)
    kind = "server_error"
    return ApiError(500, message if isinstance(error, EngineError) else "unexpected error", kind=kind)


def parse_body(data: bytes) -> dict[str, Any]:
    """A body as a JSON object without NaN, half surrogates and deep nesting. Raises ApiError."""
    if sum(map(data.count, (b"[", b"{", b","))) > MAX_BODY_ITEMS:
        raise ApiError(400, f"The body holds more than {MAX_BODY_ITEMS:,} values.")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        if isinstance(value, dict | list) and _is_deep(value):
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        check_text(json.dumps(value, ensure_ascii=False) if rb"\u" in data else "", "the body")
    except UnicodeDecodeError as error:
        why = f"byte 0x{data[error.start]:02x} at {error.start} is not UTF-8"
        raise ApiError(400, f"The body is not JSON: {why}.") from None
    except RecursionError:
        raise ApiError(400, f"The body is not JSON: nested more than {MAX_DEPTH} deep.") from None
    except UsageError as error:
        raise ApiError(400, f"The body is not JSON: {error.message}.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"The body is {named_type(value)}, and an object is expected.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _is_deep(value: Any) -> bool:
    """Whether more than MAX_DEPTH lists and objects lie in each other."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        parts = (one.values() if isinstance(one, dict) else one for one in layer)
        layer = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
        if not layer:
            return False
    return True


def named_type(value: Any) -> str:
    """What a JSON value is, in words."""
    return next((words for kind, words in JSON_TYPES if isinstance(value, kind)), "null")


class Body:
    """An object's fields, each taken by its type; null is as if it were not there.

    `where` is put before names in errors. Raises ApiError for a field that is not `known`.
    """

    def __init__(self, value: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
        self._where = where
        self._value = {name: one for name, one in value.items() if one is not None}
        for name in value:
            if name not in known:
                param = f"{where}{name}"[:100]
                raise ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def refuse(self, name: str, why: str, code: str = "invalid_value") -> NoReturn:
        """Raise ApiError about a field."""
        param = self._where + name
        raise ApiError(400, f"Invalid '{param}': {why}.", param=param, code=code)

    def _typed(self, name: str, kinds: type | tuple[type, ...], words: str) -> Any:
        value = self._value.get(name)
        if value is None:
            return None
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            param = self._where + name
            why = f"expected {words}, but got {named_type(value)} instead"
            raise ApiError(400, f"Invalid type for '{param}': {why}.", param=param, code="invalid_type")
        return value

    def text(self, name: str) -> str | None:
        """A string."""
        value: str | None = self._typed(name, str, "a string")
        return value

    def flag(self, name: str) -> bool | None:
        """A boolean."""
        value: bool | None = self._typed(name, bool, "a boolean")
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """An integer within a range."""
        value: int | float | None = self._typed(name, (int, float), "an integer")
        if isinstance(value, float):
            if not value.is_integer():
                self.refuse(name, f"expected an integer, but got {value}", "invalid_type")
            value = int(value)
        if value is not None and not low <= value <= high:
            self.refuse(name, f"expected a value from {low} to {high}")
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        """A finite number; its range is checked where it is used."""
        given = self._typed(name, (int, float), "a number")
        try:
            value = None if given is None else float(given)
        except OverflowError:
            value = float("inf")
        if value is not None and value - value != 0.0:
            self.refuse(name, "is beyond all numbers")
        return value

    def items(self, name: str, most: int) -> list[Any] | None:
        """A list of at most so many."""
        value: list[Any] | None = self._typed(name, list, "an array")
        if value is not None and len(value) > most:
            self.refuse(name, f"expected at most {most} items, but got {len(value):,}")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        """An object."""
        value: dict[str, Any] | None = self._typed(name, dict, "an object")
        return value

    def raw(self, name: str) -> Any:
        """Whatever it is."""
        return self._value.get(name)


def check_name(body: Body, name: str, value: str) -> str:
    """A name as the API allows it for functions and schemas."""
    if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", value):
        body.refuse(name, "expected 1 to 64 of a-z, A-Z, 0-9, _, . and -")
    return value
