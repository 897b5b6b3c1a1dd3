"""The model behind a server: calls are prepared beside the engine's thread, admitted, and followed."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from spd import __version__
from spd.cli.serve.body import ApiError
from spd.cli.serve.wishes import Wish
from spd.cli.text.encode import encode_asked
from spd.cli.text.prompt import Asked

if TYPE_CHECKING:
    from spd.cli.text.job import Settings
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Engine, Event, Request, RequestMetrics
    from spd.runtime.engine.driver import Answer, EngineThread, Listener

QUEUE = 64
"""Requests that may wait beyond those that decode."""


@dataclass(frozen=True)
class Prepared:
    """One request, and how its reply is parted: see `ThinkingSplitter`."""

    request: Request
    inside: bool | None


@dataclass
class Counters:
    """What has been served so far."""

    ended: dict[str, int] = field(default_factory=dict)
    """Requests by how they ended."""
    refused: dict[int, int] = field(default_factory=dict)
    """HTTP calls by the status that refused them."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    first_token_seconds: float = 0.0
    queue_seconds: float = 0.0

    def add(self, metrics: RequestMetrics, reason: str) -> None:
        """A request has ended."""
        self.ended[reason] = self.ended.get(reason, 0) + 1
        self.prompt_tokens += metrics.prompt_tokens
        self.cached_tokens += metrics.cached_tokens
        self.generated_tokens += metrics.completion_tokens
        self.draft_rounds += metrics.num_drafts
        self.draft_tokens += metrics.draft_n
        self.accepted_tokens += metrics.draft_n_accepted
        positions = metrics.accepted_per_position
        missing = len(positions) - len(self.accepted_by_position)
        self.accepted_by_position += [0] * missing
        for position, count in enumerate(positions):
            self.accepted_by_position[position] += count
        self.first_token_seconds += metrics.first_token_ms / 1000
        self.queue_seconds += metrics.queue_ms / 1000


class Service:
    """One loaded model, and the calls on their way through it."""

    def __init__(
        self, settings: Settings, names: Sequence[str], thread: EngineThread, *, waiting: int = QUEUE
    ) -> None:
        self.engine: Engine = thread.engine()
        plan = self.engine.plan
        self.settings = dataclasses.replace(settings, context=plan.shape.ctx)
        self.names, self.thread, self.plan = tuple(names), thread, plan
        self.slots, self.most = plan.shape.slots, plan.shape.slots + waiting
        self.counters = Counters()
        self.open = 0
        """Requests that run or wait."""
        self.draining = False
        self.used_at = time.monotonic()
        self.created = int(time.time())
        said = json.dumps([__version__, plan.as_dict()], default=str)
        self.fingerprint = f"spd-{__version__}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
        """Of what the text depends on beside the request."""
        self._prefix = secrets.token_hex(4)
        self._calls = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own. Raises IncompatibleError where it has none."""
        return self.settings.vocabulary.need_tokenizer()

    def admit(self, wanted: int) -> None:
        """Raise ApiError where so many more requests cannot wait their turn."""
        if self.draining:
            why = "The server is shutting down."
            raise ApiError(503, why, kind="server_error", code="shutting_down", retry_after=5)
        if wanted > self.slots:
            why = f"{wanted} replies at once, and this server decodes {self.slots} together"
            raise ApiError(400, f"Invalid 'n': {why}.", param="n", code="invalid_value")
        if self.open + wanted > self.most:
            why = f"{self.open} requests run or wait, and at most {self.most} may."
            code, kind = "rate_limit_exceeded", "rate_limit_error"
            raise ApiError(429, why, kind=kind, code=code, retry_after=1 + self.open // self.slots)

    async def prepare(self, wish: Wish) -> list[Prepared]:
        """The requests of a call. Raises what encoding and compiling a grammar raise."""
        self.admit(len(wish.prompts) * wish.n)
        return await asyncio.to_thread(self._prepare, wish)

    def _prepare(self, wish: Wish) -> list[Prepared]:
        prepared: list[Prepared] = []
        for asked in wish.prompts:
            ids = self.settings.fit(asked, wish.params)
            for choice in range(wish.n):
                params = wish.params_of(choice)
                request, inside = self.settings.request(self.name(), asked, ids, params, wish.grammar)
                request = dataclasses.replace(request, draft_max=wish.draft_max)
                prepared.append(Prepared(request, inside))
        self.engine.check(prepared[0].request)
        return prepared

    def encode(self, asked: Asked, special: bool) -> list[int]:
        """Token ids of a prompt; those that the tokenizer puts around a text with `special` only."""
        vocabulary, most = self.settings.vocabulary, self.settings.vocabulary.config.max_positions
        if asked.text is None:
            return encode_asked(asked, vocabulary, most)
        return self.tokenizer.encode(self.tokenizer.bounded(asked.text, most), add_special=special)

    def refused(self, status: int) -> None:
        """Count a call that was refused."""
        self.counters.refused[status] = self.counters.refused.get(status, 0) + 1

    def name(self) -> str:
        """An id that no other request has."""
        self._calls += 1
        return f"{self._prefix}-{self._calls}-{secrets.token_hex(2)}"

    def start(self, prepared: Sequence[Prepared]) -> Call:
        """Hand requests to the engine. Raises ApiError as `admit`, EngineError where there is no engine."""
        self.admit(len(prepared))
        return Call(self, [one.request for one in prepared])


class Call:
    """Requests that are answered together; `close` it whatever happens: what still runs is aborted then."""

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self._service, self._requests = service, list(requests)
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()
        self._listeners: list[Listener] = []
        self._open = set(range(len(requests)))
        service.open += len(requests)
        try:
            for index, request in enumerate(requests):
                listener = partial(self._hear, index)
                self._listeners.append(listener)
                service.thread.submit(request, listener)
        except BaseException:
            self.close()
            raise

    def _hear(self, index: int, answer: Answer) -> None:
        with suppress(RuntimeError):  # the loop has ended: nothing listens any more
            self._loop.call_soon_threadsafe(self._answers.put_nowait, (index, answer))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(number of the request, event) as they come, to the last end. Raises what the engine raised."""
        while self._open:
            index, answer = await self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
            if answer.finish_reason is not None:
                self._end(index, answer.finish_reason)
            yield index, answer

    def metrics(self, index: int) -> RequestMetrics:
        """A request's counters."""
        return self._service.thread.metrics(self._requests[index].id)

    def _end(self, index: int, reason: str) -> None:
        self._open.discard(index)
        service = self._service
        service.open -= 1
        service.used_at = time.monotonic()
        service.counters.add(self.metrics(index), reason)

    def close(self) -> None:
        """Abort what still runs, within a round."""
        for index in sorted(self._open):
            if index < len(self._listeners):
                self._service.thread.forget(self._requests[index], self._listeners[index])
            self._end(index, "abort")
