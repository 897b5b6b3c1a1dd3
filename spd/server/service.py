"""A loaded model, and the calls on their way through it."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spd.conversation.fields import refuse
from spd.conversation.notes import UNCONSTRAINED_CALLS
from spd.conversation.settings import PreparedRequest
from spd.errors import UsageError
from spd.runtime.engine.request import derived_seed
from spd.server.api_request import Generation
from spd.server.errors import ApiError, api_error

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.runtime import Engine, RequestMetrics
    from spd.runtime.engine.driver import EngineThread
    from spd.runtime.engine.request import GrammarSpec


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
        names: Sequence[str],
        thread: EngineThread[Engine],
        *,
        waiting: int = 64,
        any_model: bool = False,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        """names: of the model, the one that it calls itself first; any_model: whether others are taken, too.

        say: called with what the person who runs the server may not expect of a request.
        """
        self.names = tuple(dict.fromkeys(names))
        self.any_model = any_model
        self.engine: Engine = thread.engine()
        self.plan = self.engine.plan
        self.settings = dataclasses.replace(settings, context=self.plan.shape.ctx)
        self.name = self.names[0]
        self.thread = thread
        self.slots = self.plan.shape.slots
        self._most = self.slots + waiting
        self.counters = defaultdict[str, float](int)
        """What has been served, by the names that `/metrics` shows."""
        self.open = self.served = 0
        """Requests that run or wait; those that have ended."""
        self.clients = set[asyncio.StreamWriter]()
        """Connections of the command line: a server that has some is not idle."""
        self.draining = False
        self._say = say
        self._said: set[str] = set()
        self.used_at = time.monotonic()

    def admit(self, wanted: int) -> None:
        """Raise ApiError where so many more requests of one call cannot wait their turn.

        No more of them run or wait at a time than are decoded together.
        """
        if wanted > MAX_REPLIES_PER_CALL:
            refuse(
                "n",
                f"{wanted:,} replies to one call, and at most {MAX_REPLIES_PER_CALL:,} are given",
            )
        if self.draining:
            why = "The server is shutting down."
            raise ApiError(503, why, code="shutting_down", retry=5)
        if self.open + min(wanted, self.slots) > self._most:
            why = f"{self.open} requests run or wait, and at most {self._most} may."
            raise ApiError(429, why, code="rate_limit_exceeded", retry=1 + self.open // self.slots)

    def prepare(self, generation: Generation) -> tuple[Generation, list[PreparedRequest]]:
        """Return a call, with a note where no grammar can hold its tools, and its requests.

        Raises what encoding and compiling a grammar raise.
        """
        tools = generation.tools
        if tools is None:
            return generation, self._prepared(generation, generation.grammar)
        try:
            return generation, self._prepared(generation, tools.grammar)
        except UsageError as error:
            if tools.is_constrained:
                raise
            free = self._prepared(generation, None)
            note = f"{UNCONSTRAINED_CALLS}: {api_error(error).message}"
        self._say_once(note)
        return dataclasses.replace(generation, notes=(*generation.notes, note)), free

    def _say_once(self, note: str) -> None:
        """Tell the person who runs the server, unless this or too many other notes have been told."""
        if note not in self._said and len(self._said) < MAX_NOTES:
            self._said.add(note)
            self._say(f"note: {note}")

    def _prepared(
        self, generation: Generation, grammar: GrammarSpec | None
    ) -> list[PreparedRequest]:
        """Return the requests of a call, which a grammar holds. Raises what `prepare` raises."""
        prepared: list[PreparedRequest] = []
        settings = self.settings
        if generation.thinking_budget is not None:
            settings = dataclasses.replace(settings, think=str(generation.thinking_budget))
        params = generation.params
        for prompt in generation.prompts:
            request, inside_thinking = settings.prepare("", prompt, params, grammar)
            for choice in range(generation.request.n):
                seed = derived_seed(params.seed, choice) if choice else params.seed
                each = dataclasses.replace(
                    request,
                    id=secrets.token_hex(8),
                    params=dataclasses.replace(params, seed=seed),
                    draft_max=generation.request.draft_max,
                    prompt_logprobs=generation.prompt_logprobs,
                )
                prepared.append(PreparedRequest(each, inside_thinking))
        self.engine.check(prepared[0].request)
        return prepared

    def ended(self, metrics: RequestMetrics, reason: str) -> None:
        """Count a request that has ended."""
        self.open = self.open - 1
        self.served = self.served + 1
        self.used_at = time.monotonic()
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
        waiting = max(0, self.open - self.slots)
        used, pages = self.engine.pages
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


MAX_NOTES = 64
"""Notes about requests that a server writes for people: requests make up what they say."""
MAX_REPLIES_PER_CALL = 1024
"""Replies to one call: prompts times `n`. The counters of each are kept until its answer is whole."""
