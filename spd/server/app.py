"""The HTTP application: which requests it accepts, and the handler of each path."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse

from spd.conversation.fields import (
    TEXT,
    array_of,
    integer,
    object_of,
)
from spd.conversation.prompt import encode_prompt
from spd.conversation.settings import Settings
from spd.conversation.token_ids import check_token_ids
from spd.server.api_request import Generation, without_lines
from spd.server.body import read_body
from spd.server.chat_completions import ChatReply, read_chat
from spd.server.completions import CompletionReply, read_completion
from spd.server.errors import ApiError, as_api_error
from spd.server.messages import MessagesReply, read_messages
from spd.server.replies import Reply
from spd.server.responses import ResponseReply, read_response
from spd.server.service import Service

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from spd.runtime import Json


SEND_SECONDS = 60.0
"""Seconds after which a client that takes none of the data sent to it is dropped."""
LOOPBACK_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?", re.IGNORECASE)
CHANGING_LINE = "x-anthropic-billing-header:"
"""The beginning of a line of Claude Code that changes in every request; X-Spd-Changing names
others."""
MODEL_PATH_PREFIX = "/v1/models/"
"""The beginning of the path of a model's card, with the name behind it."""
Reader: TypeAlias = "Callable[[Json, Settings], Generation]"
"""(body, settings of the server) -> the generation that it requests.

Raises FieldError and ApiError.
"""

Handler: TypeAlias = "Callable[[HttpRequest], Awaitable[ASGIApp]]"
"""Answers requests of one URL."""


class Endpoint(NamedTuple):
    """A path that generates a reply: the reader of its bodies, and the reply that answers them."""

    read: Reader
    reply: type[Reply]


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(read_chat, ChatReply),
    "/v1/completions": Endpoint(read_completion, CompletionReply),
    "/v1/responses": Endpoint(read_response, ResponseReply),
    "/v1/messages": Endpoint(read_messages, MessagesReply),
}
"""Endpoints that generate, by path."""
_check_detokenize_body = object_of(
    {"tokens": array_of(integer(0, 2**31 - 1), 1 << 20), "model": TEXT}, "tokens"
)
"""Checks and returns the body of `/detokenize`."""


class App:
    """The server's ASGI application.

    It accepts requests with the key that no web page can have sent: Host shows a page's own name
    for this machine, Origin the page. Without `loopback` Host is not checked, for a key guards the
    server.
    """

    def __init__(self, service: Service, *, key: str | None = None, loopback: bool = True) -> None:
        self._service = service
        self._loopback = loopback
        self._key = None if key is None else key.encode()
        self._created = int(time.time())
        self._paths: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            MODEL_PATH_PREFIX: ("GET", self._models),
            **{
                path: ("POST", partial(self._reply_to, endpoint))
                for path, endpoint in ENDPOINTS.items()
            },
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; a refusal is counted and sent as the API's error."""

        async def send_in_time(message: Message) -> None:
            """Send a part of the answer. Raises TimeoutError if the client does not take it."""
            await asyncio.wait_for(send(message), SEND_SECONDS)

        try:
            request = HttpRequest(scope, receive)
            self._check_request(request)
            answer = self._find_handler(request.method, request.scope["path"])
            await (await answer(request))(scope, receive, send_in_time)
        except (ClientDisconnect, OSError, asyncio.TimeoutError):
            pass  # the client is gone, or takes no data
        except Exception as error:
            refusal = as_api_error(error)
            self._service.counters[f'refused_total{{status="{refusal.status}"}}'] += 1
            response = JSONResponse(refusal.body, refusal.status, refusal.headers)
            await response(scope, receive, send)

    def _find_handler(self, method: str, path: str) -> Handler:
        """Return the handler of a URL. Raises ApiError for an unknown URL or method."""
        entry = self._paths.get(MODEL_PATH_PREFIX if path.startswith(MODEL_PATH_PREFIX) else path)
        message = f"Unknown request URL: {method} {path[:200]}."
        if entry is None:
            raise ApiError(404, message, code="unknown_url")
        expected_method, handler = entry
        if method != expected_method:
            raise ApiError(405, message, code="method_not_allowed")
        return handler

    def _check_request(self, request: HttpRequest) -> None:
        """Raise ApiError for a request of a web page, without the key, or of two lengths."""
        headers = request.headers
        host = headers.get("host", "")
        if self._loopback and not LOOPBACK_HOST.fullmatch(host):
            message = (
                f"The host '{host[:100]}' is not this server's: it answers to 127.0.0.1, localhost"
                " and ::1."
            )
            raise ApiError(403, message, code="host_not_allowed")
        if headers.get("origin", f"http://{host}") not in (f"http://{host}", f"https://{host}"):
            raise ApiError(403, "Web pages are not answered.", code="origin_not_allowed")
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "Content-Length and Transfer-Encoding stand together"
            message += ", so the body's end is not sure."
            raise ApiError(400, message, code="ambiguous_length", closes=True)
        if self._key is not None and request.scope["path"] != "/health":
            authorization = headers.get("authorization", f"bearer {headers.get('x-api-key', '')}")
            kind, _, key = authorization.partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key):
                message = "Incorrect API key provided." if key else "You didn't provide an API key."
                message += " It is sent as: Authorization: Bearer KEY, or x-api-key: KEY."
                raise ApiError(401, message, code="invalid_api_key")

    async def _health(self, request: HttpRequest) -> ASGIApp:
        """Answer with the state of the server; 503 while it ends."""
        service = self._service
        status = "draining" if service.is_draining else "ok"
        status_fields = {
            "status": status,
            "model": service.name,
            "running": service.open_requests,
            "slots": service.slots,
        }
        return JSONResponse(status_fields, 503 if service.is_draining else 200)

    async def _metrics(self, request: HttpRequest) -> ASGIApp:
        """Answer with all counters in Prometheus' text format."""
        return PlainTextResponse(
            self._service.prometheus_text(), media_type="text/plain; version=0.0.4"
        )

    async def _models(self, request: HttpRequest) -> ASGIApp:
        """Answer with the card of one model, or with all cards."""
        service = self._service
        path = request.scope["path"]
        card = {"object": "model", "created": self._created, "owned_by": "spd"}
        card |= {"context_length": service.settings.context, "spec": service.plan.spec}
        if (name := path.removeprefix(MODEL_PATH_PREFIX)) != path:
            self._check_model_name(name)
            return JSONResponse({"id": name, **card})
        cards = [{"id": model_name, **card} for model_name in service.names]
        return JSONResponse({"object": "list", "data": cards})

    def _check_model_name(self, name: str) -> None:
        """Raise ApiError for a model that is not served."""
        service = self._service
        if name not in service.names and not service.accepts_any_model:
            message = f"The model '{name[:200]}' does not exist: '{self._service.name}' is served."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _count_tokens(self, request: HttpRequest) -> ASGIApp:
        """Answer with the number of tokens of a message's prompt."""
        return JSONResponse({"input_tokens": len(await self._prompt_ids(read_messages, request))})

    async def _prompt_ids(self, read: Reader, request: HttpRequest) -> list[int]:
        """Read a request's body and return its first prompt as token ids."""
        generation = await self._read_generation(read, request)
        vocabulary = self._service.settings.vocabulary
        limit = vocabulary.config.max_positions
        return await asyncio.to_thread(encode_prompt, generation.prompts[0], vocabulary, limit)

    async def _read_generation(self, read: Reader, request: HttpRequest) -> Generation:
        """Read a request's body; return its generation, without lines that change in every request.

        Raises FieldError and ApiError.
        """
        generation = read(await read_body(request), self._service.settings)
        if generation.request.model is not None:
            self._check_model_name(generation.request.model)
        beginnings = (word.strip() for word in request.headers.get("x-spd-changing", "").split("|"))
        return without_lines(generation, (CHANGING_LINE, *filter(None, beginnings)))

    async def _reply_to(self, endpoint: Endpoint, request: HttpRequest) -> ASGIApp:
        """Read a request and begin its reply, which is returned.

        Raises FieldError, ApiError, and what preparing the generation raises.
        """
        service = self._service
        generation = await self._read_generation(endpoint.read, request)
        service.check_limits(len(generation.prompts) * generation.request.n)
        generation, prepared = await asyncio.to_thread(service.prepare_generation, generation)
        service.check_limits(len(prepared))
        return endpoint.reply(service, generation, prepared)

    async def _tokenize(self, request: HttpRequest) -> ASGIApp:
        """Answer with the token ids of a prompt or of a chat."""

        def read(body: Json, settings: Settings) -> Generation:
            """Return the generation of a body of chat completions or completions."""
            is_chat = isinstance(body, dict) and "messages" in body
            return (read_chat if is_chat else read_completion)(body, settings)

        ids = await self._prompt_ids(read, request)
        max_length = self._service.settings.context
        return JSONResponse({"count": len(ids), "max_model_len": max_length, "tokens": ids})

    async def _detokenize(self, request: HttpRequest) -> ASGIApp:
        """Answer with the text of token ids."""
        settings = self._service.settings
        ids = _check_detokenize_body(await read_body(request), "")["tokens"]
        check_token_ids(ids, settings.usable_vocab, "tokens")
        text = settings.vocabulary.need_tokenizer().decode(ids, skip_special=False)
        return JSONResponse({"prompt": text})
