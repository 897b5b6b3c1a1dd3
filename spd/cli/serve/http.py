"""The HTTP front: which requests are let in, and what answers each path."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse

from spd.cli.serve.body import TEXT, ApiError, api_error, fields, listed, parse_body, refuse, whole
from spd.cli.serve.completions import read_completion
from spd.cli.serve.messages import read_messages
from spd.cli.serve.responses import read_response
from spd.cli.serve.wishes import Wish, read_chat, without_lines
from spd.cli.text.job import check_ids, encode_asked
from spd.cli.text.output import tell
from spd.errors import UsageError
from spd.runtime.engine.request import derived_seed

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from spd.cli.serve.replies import Prepared
    from spd.cli.text.job import Settings
    from spd.runtime import Engine, RequestMetrics
    from spd.runtime.engine.driver import EngineThread
    from spd.runtime.engine.request import GrammarText

COUNTED = {name: name for name in ("prompt_tokens", "cached_tokens", "preemptions")}
COUNTED |= {"generation_tokens": "completion_tokens", "spec_decode_num_drafts": "num_drafts"}
COUNTED |= {
    "spec_decode_num_draft_tokens": "draft_n",
    "spec_decode_num_accepted_tokens": "draft_n_accepted",
}
"""What `/metrics` adds up, by its own names and those of `RequestMetrics`."""


class Service:
    """One loaded model, and the calls on their way through it; so many are `waiting` at most."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        thread: EngineThread,
        *,
        waiting: int = 64,
        aliases: Sequence[str] = (),
        any_model: bool = False,
    ) -> None:
        """aliases: further names of the model; any_model: whether every other name is taken, too."""
        self.aliases = tuple(dict.fromkeys(aliases))
        self.any_model = any_model
        self.engine: Engine = thread.engine()
        self.plan = self.engine.plan
        self.settings = dataclasses.replace(settings, context=self.plan.shape.ctx)
        self.name, self.thread, self.slots = name, thread, self.plan.shape.slots
        self._most = self.slots + waiting
        self.counters = defaultdict[str, float](int)
        """What has been served, by the names that `/metrics` shows."""
        self.open = self.served = 0
        """Requests that run or wait; those that have ended."""
        self.clients = set[asyncio.StreamWriter]()
        """Connections of the command line: a server that has some is not idle."""
        self.draining = False
        self._said: set[str] = set()
        self.used_at = time.monotonic()

    def admit(self, wanted: int) -> None:
        """Raise ApiError where so many more requests of one call cannot wait their turn.

        No more of them run or wait at a time than are decoded together.
        """
        if wanted > MOST_OF_A_CALL:
            refuse("n", f"{wanted:,} replies to one call, and at most {MOST_OF_A_CALL:,} are given")
        if self.draining:
            why = "The server is shutting down."
            raise ApiError(503, why, code="shutting_down", retry=5)
        if self.open + min(wanted, self.slots) > self._most:
            why = f"{self.open} requests run or wait, and at most {self._most} may."
            raise ApiError(429, why, code="rate_limit_exceeded", retry=1 + self.open // self.slots)

    def prepare(self, wish: Wish) -> tuple[Wish, list[Prepared]]:
        """Return a call, with a note where no grammar can hold its tools, and its requests.

        Raises what encoding and compiling a grammar raise.
        """
        tools = wish.tools
        if tools is None:
            return wish, self._prepared(wish, wish.grammar)
        try:
            return wish, self._prepared(wish, tools.grammar)
        except UsageError as error:
            if tools.held:
                raise
            free = self._prepared(wish, None)
            note = f"calls of tools are not held to their schemas: {api_error(error).message}"
        self._say_once(note)
        return dataclasses.replace(wish, notes=(*wish.notes, note)), free

    def _say_once(self, note: str) -> None:
        """Write a note to standard error, unless it or too many others have been written."""
        if note not in self._said and len(self._said) < MOST_NOTES:
            self._said.add(note)
            tell(f"note: {note}")

    def _prepared(self, wish: Wish, grammar: GrammarText | None) -> list[Prepared]:
        """Return the requests of a call, which a grammar holds. Raises what `prepare` raises."""
        prepared: list[Prepared] = []
        speculative = wish.body.get("speculative", {})
        draft_max = 0 if speculative.get("spec") == "off" else speculative.get("draft_max")
        settings = self.settings
        if (think := wish.body.get("think")) is not None:
            settings = dataclasses.replace(settings, think=str(think))
        for asked in wish.prompts:
            request, inside = settings.request("", asked, wish.params, grammar)
            for choice in range(wish.body.get("n", 1)):
                seed = derived_seed(wish.params.seed, choice) if choice else wish.params.seed
                each = dataclasses.replace(
                    request,
                    id=secrets.token_hex(8),
                    params=dataclasses.replace(wish.params, seed=seed),
                    draft_max=draft_max,
                    prompt_logprobs=wish.prompt_logprobs,
                )
                prepared.append((each, inside))
        self.engine.check(prepared[0][0])
        return prepared

    def ended(self, metrics: RequestMetrics, reason: str) -> None:
        """Count a request that has ended."""
        self.open, self.served, self.used_at = self.open - 1, self.served + 1, time.monotonic()
        counters = self.counters
        counters[f'requests_total{{reason="{reason}"}}'] += 1
        for shown, name in COUNTED.items():
            counters[f"{shown}_total"] += getattr(metrics, name)
        for position, count in enumerate(metrics.accepted_per_position):
            counters[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'] += (
                count
            )
        counters["first_token_seconds_total"] += metrics.first_token_ms / 1000
        counters["queue_seconds_total"] += metrics.queue_ms / 1000

    def prometheus(self) -> str:
        """Every figure, in the text format of version 0.0.4."""
        waiting, (used, pages) = max(0, self.open - self.slots), self.engine.pages
        figures = {
            **self.counters,
            "rounds_total": self.engine.rounds,
            "pages_used": used,
            "pages": pages,
        }
        figures |= {
            "requests_running": self.open - waiting,
            "requests_waiting": waiting,
            "slots": self.slots,
        }
        lines: list[str] = []
        for name, value in sorted(figures.items()):
            family = name.partition("{")[0]
            kind = f"# TYPE spd_{family} {'counter' if family.endswith('_total') else 'gauge'}"
            lines += [f"spd_{name} {value}"] if kind in lines else [kind, f"spd_{name} {value}"]
        return "\n".join([*lines, ""])


MOST_NOTES = 64
"""Notes about requests that a server writes to standard error: requests make up what they say."""
MOST_OF_A_CALL = 1024
"""Replies to one call: prompts times `n`. The counters of each are kept until its answer is whole."""
BODY_LIMIT = 16 << 20
BODY_SECONDS = 60.0
"""For which a client may take to send a body."""
SEND_SECONDS = 60.0
"""For which a client may take nothing of what is sent to it."""
OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?", re.IGNORECASE)
CHANGING = "x-anthropic-billing-header:"
"""How a line of Claude Code begins that is new in every request; X-Spd-Changing names others."""
MODEL = "/v1/models/"
Reader = Callable[[Any, Service], Wish]
READERS: Mapping[str, Reader] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/responses": read_response,
    "/v1/messages": read_messages,
}
"""What reads a body that asks for a reply."""
_detokenize = fields({"tokens": listed(whole(0, 2**31 - 1), 1 << 20), "model": TEXT}, "tokens")


class App:
    """What answers each path, as an ASGI application.

    It lets in what carries the key, and what no web page can have sent: Host shows a page's own name for this
    machine, Origin the page. Without `loopback` Host is not looked at, for a key guards the server.
    """

    def __init__(self, service: Service, *, key: str | None = None, loopback: bool = True) -> None:
        self._service, self._loopback = service, loopback
        self._key = None if key is None else key.encode()
        self._created = int(time.time())
        self._paths: dict[str, tuple[str, Callable[[HttpRequest], Awaitable[ASGIApp]]]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            MODEL: ("GET", self._models),
            **{path: ("POST", partial(self._complete, read)) for path, read in READERS.items()},
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patient(message: Message) -> None:
            await asyncio.wait_for(send(message), SEND_SECONDS)

        try:
            request = HttpRequest(scope, receive)
            self._check(request)
            path, method = request.scope["path"], request.method
            known, answer = self._paths.get(
                MODEL if path.startswith(MODEL) else path, ("", self._models)
            )
            if method != known:
                status, code = (405, "method_not_allowed") if known else (404, "unknown_url")
                raise ApiError(status, f"Unknown request URL: {method} {path[:200]}.", code=code)
            await (await answer(request))(scope, receive, patient)
        except (ClientDisconnect, OSError, asyncio.TimeoutError):
            pass  # the client has gone, or takes nothing
        except Exception as error:
            refusal = api_error(error)
            self._service.counters[f'refused_total{{status="{refusal.status}"}}'] += 1
            shown = JSONResponse(refusal.body, refusal.status, refusal.headers)
            await shown(scope, receive, send)

    def _check(self, request: HttpRequest) -> None:
        """Raise ApiError for a request that is not let in."""
        headers = request.headers
        host = headers.get("host", "")
        if self._loopback and not OWN_HOST.fullmatch(host):
            why = f"The host '{host[:100]}' is not this server's: it answers to 127.0.0.1, localhost and ::1."
            raise ApiError(403, why, code="host_not_allowed")
        if headers.get("origin", f"http://{host}") not in (f"http://{host}", f"https://{host}"):
            raise ApiError(403, "Web pages are not answered.", code="origin_not_allowed")
        if "content-length" in headers and "transfer-encoding" in headers:
            why = "Content-Length and Transfer-Encoding stand together, so the body's end is not sure."
            raise ApiError(400, why, code="ambiguous_length", closes=True)
        if self._key is not None and request.scope["path"] != "/health":
            sent = headers.get("authorization", f"bearer {headers.get('x-api-key', '')}")
            kind, _, key = sent.partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key):
                why = "Incorrect API key provided." if key else "You didn't provide an API key."
                why += " It is sent as: Authorization: Bearer KEY, or x-api-key: KEY."
                raise ApiError(401, why, code="invalid_api_key")

    async def _health(self, request: HttpRequest) -> ASGIApp:
        service = self._service
        status = "draining" if service.draining else "ok"
        shown = {
            "status": status,
            "model": service.name,
            "running": service.open,
            "slots": service.slots,
        }
        return JSONResponse(shown, 503 if service.draining else 200)

    async def _metrics(self, request: HttpRequest) -> ASGIApp:
        return PlainTextResponse(self._service.prometheus(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: HttpRequest) -> ASGIApp:
        service, path = self._service, request.scope["path"]
        card = {"object": "model", "created": self._created, "owned_by": "spd"}
        card |= {"context_length": service.settings.context, "spec": service.plan.spec}
        if (name := path.removeprefix(MODEL)) != path:
            self._check_name(name)
            return JSONResponse({"id": name, **card})
        cards = [{"id": each, **card} for each in (service.name, *service.aliases)]
        return JSONResponse({"object": "list", "data": cards})

    def _check_name(self, name: str) -> None:
        """Raise ApiError for another model than the one that is served."""
        service = self._service
        if name not in (service.name, *service.aliases) and not service.any_model:
            why = f"The model '{name[:200]}' does not exist: '{self._service.name}' is served."
            raise ApiError(404, why, param="model", code="model_not_found")

    async def _count_tokens(self, request: HttpRequest) -> ASGIApp:
        return JSONResponse({"input_tokens": len(await self._ids(read_messages, request))})

    async def _ids(self, read: Reader, request: HttpRequest) -> list[int]:
        """The first prompt of a request as token ids."""
        wish, vocabulary = await self._wish(read, request), self._service.settings.vocabulary
        most = vocabulary.config.max_positions
        return await asyncio.to_thread(encode_asked, wish.prompts[0], vocabulary, most)

    async def _wish(self, read: Reader, request: HttpRequest) -> Wish:
        """What a request asks for, without the lines that change from one to the next. Raises ApiError."""
        wish = read(await read_body(request), self._service)
        self._check_name(wish.body.get("model", self._service.name))
        named = (word.strip() for word in request.headers.get("x-spd-changing", "").split("|"))
        return without_lines(wish, (CHANGING, *filter(None, named)))

    async def _complete(self, read: Reader, request: HttpRequest) -> ASGIApp:
        service, wish = self._service, await self._wish(read, request)
        service.admit(len(wish.prompts) * wish.body.get("n", 1))
        wish, prepared = await asyncio.to_thread(service.prepare, wish)
        service.admit(len(prepared))
        return wish.reply(service, wish, prepared)

    async def _tokenize(self, request: HttpRequest) -> ASGIApp:
        def read(body: Any, service: Service) -> Wish:
            is_chat = isinstance(body, dict) and "messages" in body
            return (read_chat if is_chat else read_completion)(body, service)

        ids, most = await self._ids(read, request), self._service.settings.context
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids})

    async def _detokenize(self, request: HttpRequest) -> ASGIApp:
        settings = self._service.settings
        ids = _detokenize(await read_body(request), "")["tokens"]
        check_ids(ids, settings.usable_vocab, "tokens")
        text = settings.vocabulary.need_tokenizer().decode(ids, skip_special=False)
        return JSONResponse({"prompt": text})


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
