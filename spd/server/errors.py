"""Errors in the form of the APIs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from spd.conversation.fields import FieldError
from spd.errors import EngineError, IncompatibleError, ResourceError, SpdError, UsageError

if TYPE_CHECKING:
    pass


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
        self.status = status
        self.message = message
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
    if isinstance(error, FieldError):
        return ApiError(400, error.message, param=error.field, code=error.code)
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
