"""Errors in the form of the APIs."""

from __future__ import annotations

import re

from spd.conversation.fields import FieldError
from spd.errors import EngineError, IncompatibleError, ResourceError, SpdError, UsageError

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
ERROR_TYPES |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
"""Types of errors by HTTP status, by Anthropic's names."""


API_NAMES = {
    "--schema": "the schema",
    "--grammar": "the grammar of the tools or the format",
    "--prompt-ids": "the prompt",
}
"""The names that clients know for options of the command line."""


_OPTION_NAME = re.compile("|".join(API_NAMES))
"""An option's name in a message."""


class ApiError(Exception):
    """A refusal, with the fields that clients of each API look for in the body."""

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
        """Write the body and headers of a refusal.

        param: the field at fault. retry: seconds after which the client may try again; 0 sends
        none. closes: True if the connection is closed behind the refusal.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = {"retry-after": str(retry)} if retry else {}
        if closes:
            self.headers["connection"] = "close"
        kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body: dict[str, object] = {"type": "error", "error": error}


def as_api_error(error: BaseException, *, param: str | None = None) -> ApiError:
    """Return an exception as an error of the API; an unexpected one becomes a 500 without details.

    param: the field at fault, for an error of a value that names none.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FieldError):
        return ApiError(400, error.message, param=error.field, code=error.code)
    if not isinstance(error, SpdError):
        return ApiError(500, f"unexpected {type(error).__name__}", code="internal")
    message = " ".join([f"{error.message}.", *error.reason]) if error.reason else error.message
    message = _OPTION_NAME.sub(lambda flag: API_NAMES[flag[0]], message)
    if error.code == "context_overflow":  # agents shorten a conversation when they read these words
        message = f"prompt is too long: {message}"
        return ApiError(400, message, param="messages", code="context_length_exceeded")
    if isinstance(error, ResourceError):
        return ApiError(503, message, code=error.code, retry=1)
    if isinstance(error, UsageError | IncompatibleError):
        return ApiError(400, message, param=param, code=error.code)
    message = message if isinstance(error, EngineError) else "unexpected error"
    return ApiError(500, message, code=error.code)
