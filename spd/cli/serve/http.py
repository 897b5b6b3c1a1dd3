"""The HTTP front: which requests are let in, and what answers each path."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse

from spd.cli.serve.body import TEXT, ApiError, api_error, fields, listed, parse_body, whole
from spd.cli.serve.messages import read_messages
from spd.cli.serve.responses import read_response
from spd.cli.serve.service import Answer, Service
from spd.cli.serve.wishes import Wish, read_chat, read_completion, read_tokenize, without_lines
from spd.cli.text.job import encode_asked
from spd.cli.text.prompt import Asked
from spd.cli.text.sampling import check_ids

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_LIMIT = 16 << 20
BODY_SECONDS = 60.0
"""For which a client may take to send a body."""
SEND_SECONDS = 60.0
"""For which a client may take nothing of what is sent to it."""
OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?", re.IGNORECASE)
CHANGING = "x-anthropic-billing-header:"
"""How a line of Claude Code begins that is new in every request; X-Spd-Changing names others."""
MODEL, MESSAGES = "/v1/models/", "/v1/messages"
READERS: Mapping[str, Callable[[Any, Service], Wish]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/responses": read_response,
    MESSAGES: read_messages,
}
"""What reads a body that asks for a reply."""
_detokenize = fields({"tokens": listed(whole(0, 2**31 - 1), 1 << 20), "model": TEXT}, "tokens")


class App:
    """What answers each path, as an ASGI application.

    It lets in what carries the key, and what a web page could not have sent: a page can have a browser send
    requests by a name of its own that leads to this machine, which Host shows, or as what they are, which
    Origin shows. Without `loopback` Host is not looked at, for a key guards the server.
    """

    def __init__(self, service: Service, *, key: str | None = None, loopback: bool = True) -> None:
        self._service, self._loopback = service, loopback
        self._key = None if key is None else key.encode()
        self._created = int(time.time())
        self._paths: dict[str, tuple[str, Callable[[Request], Awaitable[ASGIApp]]]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            MODEL: ("GET", self._model),
            **{path: ("POST", partial(self._complete, read)) for path, read in READERS.items()},
            f"{MESSAGES}/count_tokens": ("POST", self._count_tokens),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patient(message: Message) -> None:
            await asyncio.wait_for(send(message), SEND_SECONDS)

        try:
            request = Request(scope, receive)
            self._check(request)
            response = await self._endpoint(request)(request)
            await response(scope, receive, patient)
        except (ClientDisconnect, OSError, asyncio.TimeoutError):
            pass  # the client has gone, or takes nothing
        except Exception as error:
            refusal = api_error(error)
            if scope["path"].startswith(MESSAGES):
                refusal = refusal.of_messages()
            self._service.count(f'refused_total{{status="{refusal.status}"}}')
            shown = JSONResponse(refusal.body, refusal.status, refusal.headers)
            await shown(scope, receive, send)

    def _check(self, request: Request) -> None:
        """Raise ApiError for a request that is not let in."""
        headers = request.headers
        host = headers.get("host", "")
        if self._loopback and not OWN_HOST.fullmatch(host):
            why = f"The host '{host[:100]}' is not this server's: it answers to 127.0.0.1, localhost and ::1."
            raise ApiError(403, why, code="host_not_allowed")
        if headers.get("origin", f"http://{host}") not in (f"http://{host}", f"https://{host}"):
            raise ApiError(403, "Web pages are not answered.", code="origin_not_allowed")
        if self._key is not None and request.scope["path"] != "/health":
            sent = headers.get("authorization", f"bearer {headers.get('x-api-key', '')}")
            kind, _, key = sent.partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key):
                why = "Incorrect API key provided." if key else "You didn't provide an API key."
                why += " It is sent as: Authorization: Bearer KEY, or x-api-key: KEY."
                raise ApiError(401, why, code="invalid_api_key")

    def _endpoint(self, request: Request) -> Callable[[Request], Awaitable[ASGIApp]]:
        """What answers the path. Raises ApiError where nothing does."""
        path, method = request.scope["path"], request.method
        known, endpoint = self._paths.get(MODEL if path.startswith(MODEL) else path, ("", self._model))
        if method != known:
            status, code = (405, "method_not_allowed") if known else (404, "unknown_url")
            raise ApiError(status, f"Unknown request URL: {method} {path[:200]}.", code=code)
        return endpoint

    async def _health(self, request: Request) -> ASGIApp:
        service = self._service
        status = "draining" if service.draining else "ok"
        shown = {"status": status, "model": service.name, "running": service.open, "slots": service.slots}
        return JSONResponse(shown, 503 if service.draining else 200)

    async def _metrics(self, request: Request) -> ASGIApp:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return PlainTextResponse(self._service.prometheus(), media_type=kind)

    def _card(self) -> dict[str, Any]:
        service = self._service
        card = {"id": service.name, "object": "model", "created": self._created, "owned_by": "spd"}
        return {**card, "context_length": service.settings.context, "spec": service.plan.spec}

    async def _models(self, request: Request) -> ASGIApp:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> ASGIApp:
        self._service.check_name(request.scope["path"].removeprefix(MODEL))
        return JSONResponse(self._card())

    async def _count_tokens(self, request: Request) -> ASGIApp:
        wish = await self._wish(partial(read_messages, counted=True), request)
        return JSONResponse({"input_tokens": len(await asyncio.to_thread(self._ids, wish.prompts[0]))})

    def _ids(self, asked: Asked) -> list[int]:
        vocabulary = self._service.settings.vocabulary
        return encode_asked(asked, vocabulary, vocabulary.config.max_positions)

    async def _wish(self, read: Callable[[Any, Service], Wish], request: Request) -> Wish:
        """What a request asks for, without the lines that change from one to the next."""
        named = (word.strip() for word in request.headers.get("x-spd-changing", "").split("|"))
        return without_lines(read(await read_body(request), self._service), (CHANGING, *filter(None, named)))

    async def _complete(self, read: Callable[[Any, Service], Wish], request: Request) -> ASGIApp:
        wish = await self._wish(read, request)
        self._service.admit(len(wish.prompts) * wish.n)
        return Answer(self._service, wish, await asyncio.to_thread(self._service.prepare, wish))

    async def _tokenize(self, request: Request) -> ASGIApp:
        asked, settings = read_tokenize(await read_body(request), self._service), self._service.settings
        ids = await asyncio.to_thread(self._ids, asked)
        return JSONResponse({"count": len(ids), "max_model_len": settings.context, "tokens": ids})

    async def _detokenize(self, request: Request) -> ASGIApp:
        settings = self._service.settings
        ids = _detokenize(await read_body(request), "")["tokens"]
        check_ids(ids, settings.usable_vocab, "tokens")
        text = settings.vocabulary.need_tokenizer().decode(ids, skip_special=False)
        return JSONResponse({"prompt": text})


async def read_body(request: Request) -> Any:
    """A request's body. Raises ApiError for one that is too large, too slow or no JSON."""
    length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"The body is larger than {BODY_LIMIT >> 20} MiB.", code="body_too_large")
    if len(length) > 9 or int(length) > BODY_LIMIT:
        raise too_large
    if request.headers.get("content-encoding", "identity") != "identity":
        why = "The body is compressed, and plain JSON is expected."
        raise ApiError(415, why, code="unsupported_encoding")
    data = bytearray()

    async def read() -> None:
        async for part in request.stream():
            data.extend(part)
            if len(data) > BODY_LIMIT:
                raise too_large

    try:
        await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"The body took more than {BODY_SECONDS:g} s.", code="timeout") from None
    return parse_body(bytes(data))
