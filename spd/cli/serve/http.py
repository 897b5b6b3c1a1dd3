"""The HTTP front: which requests are let in, and what answers each path."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route

from spd.cli.serve.answers import Answer, Gone, respond, unless_gone
from spd.cli.serve.body import BODY_LIMIT, ApiError, Body, api_error, parse_body
from spd.cli.serve.metrics import as_prometheus
from spd.cli.serve.service import Service
from spd.cli.serve.wishes import Wish, read_chat, read_completion, read_tokenize
from spd.cli.text.sampling import check_ids
from spd.errors import UsageError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

BODY_SECONDS = 60.0
"""For which a client may take to send a body."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Guard:
    """Lets in what carries the key, and what a web page could not have sent.

    A page on the internet can have a browser send requests here: by a name of its own that leads to this
    machine, which Host shows, or as what they are, which Origin shows.
    """

    def __init__(self, app: ASGIApp, service: Service, *, key: str | None, loopback: bool) -> None:
        self._app, self._service, self._loopback = app, service, loopback
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self._check(scope)
        except ApiError as error:
            self._service.refused(error.status)
            await respond(send, error.status, error.body(), {**error.headers, "connection": "close"})
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        fields: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            fields.setdefault(name.lower(), []).append(value)
        hosts = fields.get(b"host", [])
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if self._loopback and _host_name(f"//{host}") not in LOOPBACK:
            why = (
                f"The host '{host[:100]}' is not this server's: it answers to {', '.join(sorted(LOOPBACK))}."
            )
            raise ApiError(403, why, code="host_not_allowed")
        for origin in fields.get(b"origin", ()):
            if origin.decode("latin-1") not in (f"http://{host}", f"https://{host}"):
                raise ApiError(403, "Web pages are not answered.", code="origin_not_allowed")
        if self._key is not None and scope["path"] != "/health":
            given = b"".join(fields.get(b"authorization", []))
            kind, _, key = given.partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                why = "Incorrect API key provided." if key else "You didn't provide an API key."
                raise ApiError(
                    401, f"{why} It is sent as: Authorization: Bearer KEY.", code="invalid_api_key"
                )


def _host_name(url: str) -> str | None:
    """The host of a URL, without a port; None for one that is none."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.port != 0 and not parts.username and not parts.path and not parts.query:
            return parts.hostname
    return None


def build(service: Service, *, key: str | None = None, loopback: bool = True) -> ASGIApp:
    """The application. Without `loopback` its Host is not looked at, for a key guards it."""
    paths = Paths(service)
    table: tuple[tuple[str, str, Callable[[Request], Awaitable[Any]]], ...] = (
        ("/health", "GET", paths.health),
        ("/metrics", "GET", paths.metrics),
        ("/v1/models", "GET", paths.models),
        ("/v1/models/{name:path}", "GET", paths.model),
        ("/v1/chat/completions", "POST", paths.chat),
        ("/v1/completions", "POST", paths.completions),
        ("/tokenize", "POST", paths.tokenize),
        ("/detokenize", "POST", paths.detokenize),
    )
    routes = [Route(path, _errors_said(end, service), methods=[method]) for path, method, end in table]
    app = Starlette(routes=routes, exception_handlers={404: paths.unknown, 405: paths.unknown})
    app.router.redirect_slashes = False
    return Guard(app, service, key=key, loopback=loopback)


class Sent:
    """A JSON object as a response."""

    def __init__(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._value, self._status, self._headers = value, status, dict(headers or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, self._status, self._value, self._headers)


def _errors_said(
    endpoint: Callable[[Request], Awaitable[Any]], service: Service
) -> Callable[[Request], Awaitable[Any]]:
    """An endpoint whose refusals are answers."""

    async def answer(request: Request) -> Any:
        try:
            return await endpoint(request)
        except (Gone, ClientDisconnect):
            return Sent({})  # goes nowhere
        except Exception as error:
            refusal = api_error(error)
            service.refused(refusal.status)
            return Sent(refusal.body(), refusal.status, refusal.headers)

    return answer


class Paths:
    """What answers each path."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Any:
        service = self._service
        status = "draining" if service.draining else "ok"
        shown = {"status": status, "model": service.names[0], "running": service.open, "slots": service.slots}
        return Sent(shown, 503 if service.draining else 200)

    async def metrics(self, request: Request) -> Any:
        from starlette.responses import PlainTextResponse

        kind = "text/plain; version=0.0.4; charset=utf-8"
        return PlainTextResponse(as_prometheus(self._service), media_type=kind)

    def _card(self) -> dict[str, Any]:
        service = self._service
        card = {"id": service.names[0], "object": "model", "created": service.created, "owned_by": "spd"}
        return {**card, "context_length": service.settings.context, "spec": service.plan.spec}

    async def models(self, request: Request) -> Any:
        return Sent({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Any:
        name = request.path_params["name"]
        if name not in self._service.names:
            why = f"The model '{name[:200]}' does not exist: '{self._service.names[0]}' is served."
            raise ApiError(404, why, param="model", code="model_not_found")
        return Sent(self._card())

    async def chat(self, request: Request) -> Any:
        return await self._complete(request, read_chat)

    async def completions(self, request: Request) -> Any:
        return await self._complete(request, read_completion)

    async def _complete(self, request: Request, read: Callable[..., Wish]) -> Any:
        service = self._service
        value = await read_body(request)
        wish = read(value, service.settings, service.names, service.plan.spec)
        prepared = await unless_gone(request.receive, service.prepare(wish))
        return Answer(service, wish, prepared)

    async def tokenize(self, request: Request) -> Any:
        service = self._service
        asked, special = read_tokenize(await read_body(request), service.settings, service.names)
        ids = await asyncio.to_thread(service.encode, asked, special)
        return Sent({"count": len(ids), "max_model_len": service.settings.context, "tokens": ids})

    async def detokenize(self, request: Request) -> Any:
        body, service = Body(await read_body(request), ("tokens", "model")), self._service
        ids = body.items("tokens", 1 << 20) or []
        if not all(type(one) is int for one in ids):
            body.refuse("tokens", "expected token ids", "invalid_type")
        try:
            check_ids(ids, service.settings.usable_vocab, "tokens")
        except UsageError as error:
            raise api_error(error, param="tokens") from None
        return Sent({"prompt": service.tokenizer.decode(ids, skip_special=False)})

    async def unknown(self, request: Request, error: Exception) -> Any:
        status = getattr(error, "status_code", 404)
        why = f"Unknown request URL: {request.method} {request.url.path[:200]}."
        code = "unknown_url" if status == 404 else "method_not_allowed"
        self._service.refused(status)
        return Sent(ApiError(status, why, code=code).body(), status, getattr(error, "headers", None))


async def read_body(request: Request) -> dict[str, Any]:
    """A request's body. Raises ApiError for one that is too large, too slow or no JSON object."""
    length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"The body is larger than {BODY_LIMIT >> 20} MiB.", code="body_too_large")
    if not length.isascii() or not length.isdigit() or len(length) > 12 or int(length) > BODY_LIMIT:
        raise too_large
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(
            415, "The body is compressed, and plain JSON is expected.", code="unsupported_encoding"
        )
    parts: list[bytes] = []

    async def read() -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > BODY_LIMIT:
                raise too_large
            parts.append(part)

    try:
        await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"The body took more than {BODY_SECONDS:g} s.", code="timeout") from None
    return parse_body(b"".join(parts))
