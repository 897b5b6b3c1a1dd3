"""Bodies of requests, read as bounded JSON."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest

from spd.conversation.fields import refuse
from spd.errors import CheckpointError
from spd.formats.json_file import decode_utf8, parse_json
from spd.server.errors import ApiError

if TYPE_CHECKING:
    pass


MAX_BODY_ITEMS = 1 << 20
"""Tokens of JSON structure in a body: what it costs in memory is bounded by them."""


def parse_body(data: bytes) -> Any:
    """A body as JSON without NaN, as `parse_json` reads it. Raises ApiError."""
    if sum(map(data.count, (b"[", b"{", b","))) > MAX_BODY_ITEMS:
        raise ApiError(400, f"The body holds more than {MAX_BODY_ITEMS:,} values.")
    try:
        text = decode_utf8(data, "The body")
        return parse_json(
            text, "The body", parse_constant=lambda name: refuse(name, "it is no number")
        )
    except CheckpointError as error:
        raise ApiError(400, f"{error.message}.") from None


BODY_LIMIT = 16 << 20


BODY_SECONDS = 60.0
"""For which a client may take to send a body."""


async def read_body(request: HttpRequest) -> Any:
    """A request's body. Raises ApiError for one that is packed, too large, too slow or no JSON."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        why = f"The body is sent as {encoding[:40]!r}, and only plain JSON is read."
        raise ApiError(415, why, code="unsupported_content_encoding", closes=True)

    async def read() -> bytes:
        """Return all of it."""
        data = bytearray()
        async for part in request.stream():
            data.extend(part)
            if len(data) > BODY_LIMIT:
                why = f"The body is larger than {BODY_LIMIT >> 20} MiB."
                raise ApiError(413, why, code="body_too_large")
        return bytes(data)

    try:
        return parse_body(await asyncio.wait_for(read(), BODY_SECONDS))
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"The body took more than {BODY_SECONDS:g} s.", code="timeout"
        ) from None
