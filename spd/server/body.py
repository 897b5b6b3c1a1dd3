"""Bodies of requests, read as bounded JSON."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn, cast

from starlette.requests import Request as HttpRequest

from spd.conversation.fields import refuse
from spd.errors import CheckpointError
from spd.formats.json_file import decode_utf8, parse_json
from spd.server.errors import ApiError

if TYPE_CHECKING:
    from spd.runtime import Json


MAX_BODY_ITEMS = 1 << 20
"""Tokens of JSON structure in a body: they bound the memory that it takes."""


def _refuse_constant(name: str) -> NoReturn:
    """Raise FieldError for NaN or an infinity."""
    refuse(name, "it is no number")


def parse_body(data: bytes) -> Json:
    """Return the value of a body, which is JSON without NaN. Raises ApiError and FieldError."""
    if sum(map(data.count, (b"[", b"{", b","))) > MAX_BODY_ITEMS:
        raise ApiError(400, f"The body holds more than {MAX_BODY_ITEMS:,} values.")
    try:
        text = decode_utf8(data, "The body")
        value = parse_json(text, "The body", parse_constant=_refuse_constant)
    except CheckpointError as error:
        raise ApiError(400, f"{error.message}.") from None
    return cast("Json", value)


MAX_BODY_BYTES = 16 << 20
"""Bytes of a body."""
BODY_SECONDS = 60.0
"""Seconds in which a client has to send a body."""


async def read_body(request: HttpRequest) -> Json:
    """Receive a request's body and return its value.

    Raises ApiError for a body that is compressed, too large, too slow or no JSON.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"The body is sent as {encoding[:40]!r}, and only plain JSON is read."
        raise ApiError(415, message, code="unsupported_content_encoding", closes=True)

    async def read() -> bytes:
        """Receive the bytes of the body. Raises ApiError for too many."""
        data = bytearray()
        async for part in request.stream():
            data.extend(part)
            if len(data) > MAX_BODY_BYTES:
                message = f"The body is larger than {MAX_BODY_BYTES >> 20} MiB."
                raise ApiError(413, message, code="body_too_large")
        return bytes(data)

    try:
        return parse_body(await asyncio.wait_for(read(), BODY_SECONDS))
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"The body took more than {BODY_SECONDS:g} s.", code="timeout"
        ) from None
