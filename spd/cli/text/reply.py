"""The reply while it grows: events in, text out, and what is left when a signal cuts it short."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from spd.cli.chat.view import Thoughts
from spd.cli.signals import SignalGuard
from spd.cli.text.output import Sink
from spd.cli.text.structured import ThinkingSplitter
from spd.runtime.engine.driver import drive
from spd.runtime.engine.request import Gathered

if TYPE_CHECKING:
    from spd.runtime import Engine, Event, Request, RequestMetrics


class Delivery:
    """Runs one request and writes its answer, as it comes or at the end; `inside` as in `ThinkingSplitter`.

    A model without a tokenizer has no text: its token ids are written instead, separated by commas.
    """

    def __init__(
        self,
        sink: Sink,
        engine: Engine,
        request: Request,
        inside: bool | None,
        thoughts: Thoughts,
        *,
        streaming: bool,
    ) -> None:
        self.sink, self.engine, self.request, self.inside = sink, engine, request, inside
        self.reply = Gathered()
        self._splitter, self._thoughts = ThinkingSplitter(inside), thoughts
        self._streaming = streaming and engine.tokenizer is not None
        self._at_row_start = False

    def run(self, guard: SignalGuard) -> None:
        """Decode to the end. Raises Interrupted between writes, never inside one."""
        self.engine.add(self.request)
        for events in drive(self.engine.step, lambda: self.engine.has_work):
            for event in events:
                with guard.hold():
                    self._take(event)
            guard.check()

    def _take(self, event: Event) -> None:
        self.reply.take(event)
        if self._streaming:
            self._show(event.text)
        self.sink.check_reader()

    def _show(self, text: str, *, final: bool = False) -> None:
        for thinking, part in self._splitter.feed(text, final=final):
            if thinking:
                self._thoughts.write(part)
            elif part:
                self._thoughts.end()
                self.sink.write(part)
                self._at_row_start = part.endswith("\n")

    def give_up(self) -> None:
        """Stop early; text that the engine still held back is taken if it can be had."""
        with suppress(Exception):  # the signal may have come anywhere inside the engine
            self.engine.abort(self.request.id)
            for event in self.engine.step():
                self._take(event)
        self.reply.finish_reason = "abort"

    def finish_text(self) -> None:
        """Write what streaming has not, and end the text with one newline."""
        ids = "" if self.engine.tokenizer is not None else ",".join(map(str, self.reply.token_ids))
        self._show(ids or ("" if self._streaming else self.reply.text), final=True)
        self._thoughts.end()
        if not self._at_row_start:
            self.sink.write("\n")

    @property
    def metrics(self) -> RequestMetrics:
        """The request's counters; all zero if it never began."""
        from spd.runtime import RequestMetrics

        try:
            return self.engine.metrics(self.request.id)
        except KeyError:
            return RequestMetrics()
