"""The reply while it grows: events in, text out, and what is left when a signal cuts it short."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spd.cli.output import Sink
from spd.cli.signals import SignalGuard

if TYPE_CHECKING:
    from spd.runtime import Engine, Event, Request, RequestMetrics
    from spd.runtime.request import TokenLogprob


@dataclass
class Reply:
    """What has been produced so far, gathered from events."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)


class Delivery:
    """Runs one request and writes its text, as it comes or at the end.

    A model without a tokenizer has no text: its token ids are written instead, separated by commas.
    """

    def __init__(self, sink: Sink, engine: Engine, request: Request, *, streaming: bool) -> None:
        self.sink = sink
        self.engine = engine
        self.reply = Reply()
        self._request = request
        self._streaming = streaming and engine.tokenizer is not None

    def run(self, guard: SignalGuard) -> None:
        """Decode to the end. Raises Interrupted between writes, never inside one."""
        self.engine.add(self._request)
        while self.engine.has_work:
            for event in self.engine.step():
                with guard.hold():
                    self._take(event)
            guard.check()

    def _take(self, event: Event) -> None:
        reply = self.reply
        reply.pieces.append(event.text)
        reply.token_ids += event.token_ids
        reply.logprobs += event.logprobs
        reply.error = event.error
        reply.finish_reason = event.finish_reason or reply.finish_reason
        if self._streaming and event.text:
            self.sink.write(event.text)

    def give_up(self) -> None:
        """Stop early; text that the engine still held back is taken if it can be had."""
        with suppress(Exception):  # the signal may have come anywhere inside the engine
            self.engine.abort(self._request.id)
            for event in self.engine.step():
                self._take(event)
        self.reply.finish_reason = "abort"

    def finish_text(self) -> None:
        """Write what streaming has not, and end the text with one newline."""
        text = (
            self.reply.text if self.engine.tokenizer is not None else ",".join(map(str, self.reply.token_ids))
        )
        tail = "" if text.endswith("\n") else "\n"
        self.sink.write(tail if self._streaming else text + tail)

    @property
    def metrics(self) -> RequestMetrics:
        """The request's counters; all zero if it never began."""
        from spd.runtime import RequestMetrics

        try:
            return self.engine.metrics(self._request.id)
        except KeyError:
            return RequestMetrics()
