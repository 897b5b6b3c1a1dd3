"""A loaded model, its requests and its counters."""

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
from spd.server.errors import ApiError, as_api_error

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.runtime import Engine, RequestMetrics
    from spd.runtime.engine.driver import EngineThread
    from spd.runtime.engine.request import GrammarSpec


COUNTED_METRICS: dict[str, Callable[[RequestMetrics], int]] = {
    "prompt_tokens": lambda metrics: metrics.prompt_tokens,
    "cached_tokens": lambda metrics: metrics.cached_tokens,
    "preemptions": lambda metrics: metrics.preemptions,
    "generation_tokens": lambda metrics: metrics.completion_tokens,
    "spec_decode_num_drafts": lambda metrics: metrics.num_draft_rounds,
    "spec_decode_num_draft_tokens": lambda metrics: metrics.draft_n,
    "spec_decode_num_accepted_tokens": lambda metrics: metrics.draft_n_accepted,
}
"""Counters that `/metrics` sums up, by their names there without `_total`."""


class Service:
    """One loaded model, and the requests that run or wait for it."""

    def __init__(
        self,
        settings: Settings,
        names: Sequence[str],
        thread: EngineThread[Engine],
        *,
        waiting: int = 64,
        accepts_any_model: bool = False,
        report: Callable[[str], None] = lambda words: None,
    ) -> None:
        """Serve the engine of a thread.

        names: the model's names, first the one in replies. accepts_any_model: True for other names,
        too. waiting: the maximum of requests that wait. report: called with notes about requests,
        for the person who runs the server.
        """
        self.names = tuple(dict.fromkeys(names))
        self.accepts_any_model = accepts_any_model
        self.engine: Engine = thread.engine()
        self.plan = self.engine.plan
        self.settings = dataclasses.replace(settings, context=self.plan.shape.ctx)
        self.name = self.names[0]
        self.thread = thread
        self.slots = self.plan.shape.slots
        self._max_requests = self.slots + waiting
        self.counters = defaultdict[str, float](int)
        """Counters by the names that `/metrics` shows."""
        self.open_requests = self.ended_requests = 0
        """Requests that run or wait; those that have ended."""
        self.clients = set[asyncio.StreamWriter]()
        """Connections of the command line: a server that has some is not idle."""
        self.is_draining = False
        self._report = report
        self._reported: set[str] = set()
        self.used_at = time.monotonic()
        """The time of the last use, of the monotonic clock."""

    def check_limits(self, count: int) -> None:
        """Raise ApiError if `count` requests of one call exceed the limits.

        At a time no more of them run or wait than are decoded together.
        """
        if count > MAX_REPLIES_PER_CALL:
            refuse(
                "n",
                f"{count:,} replies to one call, and at most {MAX_REPLIES_PER_CALL:,} are given",
            )
        if self.is_draining:
            message = "The server is shutting down."
            raise ApiError(503, message, code="shutting_down", retry=5)
        if self.open_requests + min(count, self.slots) > self._max_requests:
            message = (
                f"{self.open_requests} requests run or wait, and at most {self._max_requests} may."
            )
            raise ApiError(
                429, message, code="rate_limit_exceeded", retry=1 + self.open_requests // self.slots
            )

    def prepare_generation(
        self, generation: Generation
    ) -> tuple[Generation, list[PreparedRequest]]:
        """Encode a generation's prompts; return it and its requests.

        It gets a note, which is reported too, where no grammar can constrain its calls. Raises what
        encoding and compiling a grammar raise.
        """
        tools = generation.tools
        if tools is None:
            return generation, self._prepare_requests(generation, generation.grammar)
        try:
            return generation, self._prepare_requests(generation, tools.grammar)
        except UsageError as error:
            if tools.is_constrained:
                raise
            free = self._prepare_requests(generation, None)
            note = f"{UNCONSTRAINED_CALLS}: {as_api_error(error).message}"
        self._report_once(note)
        return dataclasses.replace(generation, notes=(*generation.notes, note)), free

    def _report_once(self, note: str, kind: str = "") -> None:
        """Report a note, unless one of its kind, else it, or too many have been reported."""
        kind = kind or note
        if kind not in self._reported and len(self._reported) < MAX_NOTES:
            self._reported.add(kind)
            self._report(f"note: {note}")

    def _prepare_requests(
        self, generation: Generation, grammar: GrammarSpec | None
    ) -> list[PreparedRequest]:
        """Return the requests of a generation, with its grammar.

        Raises what `prepare_generation` raises.
        """
        prepared: list[PreparedRequest] = []
        settings = self.settings
        if generation.thinking_budget is not None:
            settings = dataclasses.replace(settings, think=str(generation.thinking_budget))
        params = generation.params
        for prompt in generation.prompts:
            request, inside_thinking = settings.prepare_request("", prompt, params, grammar)
            for choice in range(generation.request.n):
                seed = derived_seed(params.seed, choice) if choice else params.seed
                choice_request = dataclasses.replace(
                    request,
                    id=secrets.token_hex(8),
                    params=dataclasses.replace(params, seed=seed),
                    draft_max=generation.request.draft_max,
                    prompt_logprobs=generation.prompt_logprobs,
                )
                prepared.append(PreparedRequest(choice_request, inside_thinking))
        self.engine.check(prepared[0].request)
        return prepared

    def count_ended(self, metrics: RequestMetrics, reason: str) -> None:
        """Count a request that has ended, and report why it stopped drafting, if it did."""
        self.open_requests = self.open_requests - 1
        self.ended_requests = self.ended_requests + 1
        self.used_at = time.monotonic()
        counters = self.counters
        counters[f'requests_total{{reason="{reason}"}}'] += 1
        for name, count_of in COUNTED_METRICS.items():
            counters[f"{name}_total"] += count_of(metrics)
        for position, count in enumerate(metrics.accepted_per_position):
            counters[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'] += (
                count
            )
        counters["first_token_seconds_total"] += metrics.first_token_ms / 1000
        counters["queue_seconds_total"] += metrics.queue_ms / 1000
        note = metrics.draft_note(self.plan.spec)
        if note is not None:
            counters[f'spec_decode_faults_total{{reason="{metrics.draft_fault}"}}'] += 1
            self._report_once(note, metrics.draft_fault)

    def prometheus_text(self) -> str:
        """Return all counters in the text format of version 0.0.4."""
        waiting = max(0, self.open_requests - self.slots)
        used_pages, pages = self.engine.page_counts
        figures = {
            **self.counters,
            "rounds_total": self.engine.rounds,
            "pages_used": used_pages,
            "pages": pages,
        }
        figures |= {
            "requests_running": self.open_requests - waiting,
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
"""Notes about requests that a server reports: clients determine their text."""
MAX_REPLIES_PER_CALL = 1024
"""Replies to one call: prompts times `n`.

The counters of each stay in memory until all have ended.
"""
