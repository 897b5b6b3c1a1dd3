"""The reply while it grows: events in, text out, and what is left when a signal cuts it short.

Thinking is shown apart, the answer as Markdown, with coloured drafts, or plain. Control characters of the
reply never reach a terminal.
"""

from __future__ import annotations

import codecs
import importlib.metadata
import itertools
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from spd.cli.signals import SignalGuard
from spd.cli.text.output import CONTROL, Console, Sink, Ticker, is_terminal, paint, printable, write_stderr
from spd.cli.text.prompt import ThinkingSplitter, parted
from spd.runtime.engine.driver import drive
from spd.runtime.engine.request import Gathered

if TYPE_CHECKING:
    from spd.cli.chat.markdown import MarkdownStream
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Engine, Event, Request, RequestMetrics
    from spd.runtime.engine.request import Gathered, TokenLogprob

DIM, GREEN, UNDERLINE = "2", "32", "4"


class DraftedText:
    """Which characters of a reply came from accepted drafts: those whose last byte did."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._known: list[bool] = []
        """Of each character that is still to come."""

    def take(self, event: Event) -> Iterator[tuple[str, bool]]:
        """The event's text in stretches, and whether each was drafted; text may come later than tokens."""
        for token_id, drafted in zip(event.token_ids, event.drafted, strict=False):
            self._known += [drafted] * len(self._decoder.decode(self._token_bytes(token_id)))
        marked = itertools.zip_longest(event.text, self._known[: len(event.text)], fillvalue=False)
        for drafted, stretch in itertools.groupby(marked, key=lambda pair: bool(pair[1])):
            yield "".join(str(character) for character, _ in stretch), drafted
        del self._known[: len(event.text)]


class Thoughts:
    """Thinking on a terminal's standard error, dimmed and apart from the answer; nothing elsewhere.

    `ticker` says meanwhile what there is to wait for: what comes next takes it away.
    """

    def __init__(self, console: Console, *, hidden: bool) -> None:
        self._shows, self.color = is_terminal(sys.stderr) and not console.quiet, console.color
        self._hidden, self.ticker = hidden, Ticker(console)
        self.reading = partial(self.ticker.count, "reading the prompt", amount="{:,} tok".format)
        """What hears how far a prompt is read, of how many tokens."""
        self._last = ""

    def write(self, text: str) -> None:
        """Show what was thought next, or that there is thinking."""
        if self._hidden:
            self.ticker.write("thinking…")
        elif self._shows and text:
            self.ticker.write("")
            write_stderr(_styled_lines(printable(text), DIM if self.color else ""), styled=True)
            self._last = text[-1]

    def end(self) -> None:
        """Leave a blank line before the answer, once."""
        self.ticker.write("")
        write_stderr("\n" * (bool(self._last) + (self._last not in ("", "\n"))))
        self._last = ""


class ReplyView:
    """Writes one reply, of which `splitter` may have taken a beginning that was shown before.

    `drafted` colours drafts on a terminal, `markdown` draws it there; without both the text stays plain.
    """

    def __init__(
        self,
        sink: Sink,
        splitter: ThinkingSplitter,
        thoughts: Thoughts,
        drafted: DraftedText | None = None,
        markdown: MarkdownStream | None = None,
    ) -> None:
        self._sink, self._splitter, self._thoughts = sink, splitter, thoughts
        self._drafted, self._markdown = drafted, markdown
        self.at_row_start = True

    def take(self, event: Event) -> None:
        """Show what a round brought."""
        for text, drafted in [(event.text, False)] if self._drafted is None else self._drafted.take(event):
            self.show(text, drafted)

    def finish(self) -> None:
        """Show what is still held back, and leave the cursor at the beginning of a row."""
        self.show("", final=True)
        self._thoughts.end()
        if self._markdown is not None:
            self._sink.write_styled(self._markdown.finish())
        elif not self.at_row_start:
            self._sink.write("\n")

    def show(self, text: str, drafted: bool = False, *, final: bool = False) -> None:
        """Show what comes next, thinking apart."""
        for thinking, part in self._splitter.feed(text, final=final):
            if thinking:
                self._thoughts.write(part)
            elif part:
                self._thoughts.end()
                self.at_row_start = part.endswith("\n")
                self._write(part, drafted)

    def _write(self, text: str, drafted: bool) -> None:
        if self._markdown is not None:
            self._sink.write_styled(self._markdown.feed(printable(text.replace("\r\n", "\n"), CONTROL)))
        elif drafted:
            style = GREEN if self._thoughts.color else UNDERLINE
            self._sink.write_styled(_styled_lines(printable(text, CONTROL), style))
        else:
            self._sink.write(text)


def _styled_lines(text: str, style: str) -> str:
    """Text in a style that never crosses the end of a line."""
    return "\n".join(paint(line, style, bool(style and line)) for line in text.split("\n"))


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
        self._view = ReplyView(sink, ThinkingSplitter(inside), thoughts)
        self._view.at_row_start = False  # an empty reply is a line, too
        self._streaming = streaming and engine.tokenizer is not None

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
            self._view.take(event)
        self.sink.check_reader()

    def give_up(self) -> None:
        """Stop early; text that the engine still held back is taken if it can be had."""
        with suppress(Exception):  # the signal may have come anywhere inside the engine
            self.engine.abort(self.request.id)
            for event in self.engine.step():
                self._take(event)
        self.reply.finish_reason = "abort"

    def finish_text(self) -> None:
        """Write what streaming has not, and end the text with one newline."""
        if self.engine.tokenizer is None:
            self._view.show(",".join(map(str, self.reply.token_ids)))
        elif not self._streaming:
            self._view.show(self.reply.text)
        self._view.finish()

    @property
    def metrics(self) -> RequestMetrics:
        """The request's counters; all zero if it never began."""
        from spd.runtime import RequestMetrics

        try:
            return self.engine.metrics(self.request.id)
        except KeyError:
            return RequestMetrics()


def reply_fields(
    reply: Gathered, metrics: RequestMetrics, engine: Engine, request: Request, inside: bool | None
) -> dict[str, Any]:
    """What JSON says of a reply, alone or one of many; `inside` as in `ThinkingSplitter`."""
    reasoning, text = parted(reply.text, inside)
    plan, params = engine.plan, request.params
    shown: dict[str, Any] = {
        "text": text,
        "reasoning": reasoning,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "usage": metrics.usage(),
        "timings": metrics.timings(),
        "metrics": {
            "speculative_decoding": metrics.speculative_decoding(
                plan.spec, plan.shape.draft_max, imposed=plan.wishes.synthetic_acceptance is not None
            )
        },
        "seed": params.seed,
    }
    if params.logprobs is not None:
        shown["logprobs"] = [logprob_entry(entry, engine.tokenizer) for entry in reply.logprobs]
    return shown


def early_end(fields: Mapping[str, Any], lacks: str | None, request: Request) -> str | None:
    """What a reply lacks because it ended early, and why it did; None where it lacks nothing."""
    if lacks is None and fields["reasoning"] is not None and not fields["text"]:
        lacks = "the reply ended while thinking, without an answer"
    finish, most = fields["finish_reason"], request.params.max_tokens
    if lacks is None or finish not in ("stop", "length"):
        return None
    full = most is not None and len(fields["token_ids"]) >= most
    why = f"-n {most:,} was reached" if full else "the context is full"
    return f"{lacks}: {why if finish == 'length' else 'a stop text or token came'}"


def versions() -> dict[str, str]:
    """Versions of what takes part, here or in a server."""
    from spd import __version__

    found = {"spd": __version__, "python": platform.python_version()}
    for name in ("torch", "tokenizers", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def logprob_entry(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A token's log-probability, and those of the likeliest, with their text and bytes."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
        return {
            "token_id": token_id,
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            "logprob": logprob,
        }

    return {**named(entry.token_id, entry.logprob), "top": [named(*likely) for likely in entry.top]}


def stats_line(metrics: RequestMetrics) -> str:
    """`318 tok · 64.8 tok/s · load 3.2 s · first 0.21 s · 3.05 tok/round · drafts 213/416 (51%)`.

    The first token takes `first` when the model is loaded, and `load` more when it is not. A chat shows the
    same and how much of the context is used.
    """
    facts = (
        (metrics.decode_tokens_per_second, "{:.1f} tok/s"),
        (metrics.load_ms / 1000, "load {:.2f} s"),
        (metrics.queue_ms / 1000 if metrics.queue_ms >= 100.0 else 0, "queued {:.2f} s"),  # on a server
        (metrics.first_token_ms / 1000, "first {:.2f} s"),
        (metrics.rounds and metrics.tokens_per_round, "{:.2f} tok/round"),
    )
    parts = [f"{metrics.completion_tokens} tok", *(form.format(fact) for fact, form in facts if fact)]
    if metrics.draft_n:
        share = f"{metrics.draft_acceptance_rate:.0%}"
        parts.append(f"drafts {metrics.draft_n_accepted}/{metrics.draft_n} ({share})")
    return " · ".join(parts)
