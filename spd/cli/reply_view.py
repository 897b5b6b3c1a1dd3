"""The reply while it grows: thinking apart, the answer drawn or plain, and what a signal leaves of it."""

from __future__ import annotations

import codecs
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Console, Session, tell, write_error, write_stderr
from spd.cli.terminal.plain_text import CONTROL, printable
from spd.cli.terminal.progress import Ticker
from spd.cli.terminal.sink import Sink, to_json
from spd.cli.terminal.streams import is_terminal, paint
from spd.conversation.logprobs import logprob_entry
from spd.conversation.notes import loop_note
from spd.conversation.thinking import UNANSWERED, ThinkingCounter
from spd.conversation.thinking_splitter import ThinkingSplitter, split_thinking
from spd.errors import EngineError, IncompleteError, SpdError
from spd.formats.thinking import KNOWN_MARKS, ThinkingMarks
from spd.runtime import RequestMetrics
from spd.runtime.engine.driver import drive
from spd.runtime.engine.request import Event, Request, RequestOutput
from spd.version import __version__

if TYPE_CHECKING:
    from spd.cli.options import GenerateOptions
    from spd.cli.terminal.markdown import MarkdownStream
    from spd.runtime import EngineClient, EngineInfo

DIM = "2"
GREEN = "32"
UNDERLINE = "4"
Facts = dict[str, int | str | list[int]]
"""What was counted, by its name in words."""


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


class ReplyView:
    """Writes one reply, of which `splitter` may have taken a beginning that was shown before.

    Thinking goes to a terminal's standard error, dimmed, unless `hidden`; nowhere else. `drafted` colours
    drafts on a terminal, `markdown` draws the answer there; without both it stays plain.
    """

    drafted: DraftedText | None = None
    markdown: MarkdownStream | None = None

    def __init__(
        self, console: Console, sink: Sink, splitter: ThinkingSplitter, *, hidden: bool
    ) -> None:
        self._sink = sink
        self._splitter = splitter
        self._color = console.color
        self._hidden = hidden
        self._shows = is_terminal(sys.stderr) and not console.quiet
        self._ticker = Ticker(console)
        self.reading = partial(self._ticker.count, "reading the prompt", amount="{:,} tok".format)
        """What hears how far a prompt is read, of how many tokens."""
        self._thought = ""
        """The last letter of thinking that was shown."""
        self.at_row_start = True

    def take(self, event: Event) -> None:
        """Show what a round brought."""
        for text, drafted in self.drafted.take(event) if self.drafted else [(event.text, False)]:
            self.show(text, drafted)

    def finish(self) -> None:
        """Show what is still held back, and leave the cursor at the beginning of a row."""
        self.show("", final=True)
        self._end_thinking()
        if self.markdown is not None:
            self._sink.write_styled(self.markdown.finish())
        elif not self.at_row_start:
            self._sink.write("\n")

    def show(self, text: str, drafted: bool = False, *, final: bool = False) -> None:
        """Show what comes next, thinking apart."""
        for thinking, part in self._splitter.feed(text, final=final):
            if thinking and self._hidden:
                self._ticker.write("thinking…")
            elif thinking and self._shows and part:
                self._ticker.write("")
                write_stderr(
                    _styled_lines(printable(part), DIM if self._color else ""), styled=True
                )
                self._thought = part[-1]
            elif part and not thinking:
                self._end_thinking()
                self.at_row_start = part.endswith("\n")
                self._write(part, drafted)

    def _end_thinking(self) -> None:
        """Leave a blank line before the answer, once."""
        self._ticker.write("")
        write_stderr("\n" * (bool(self._thought) + (self._thought not in ("", "\n"))))
        self._thought = ""

    def _write(self, text: str, drafted: bool) -> None:
        if self.markdown is not None:
            shown = printable(text.replace("\r\n", "\n"), CONTROL)
            self._sink.write_styled(self.markdown.feed(shown))
        elif drafted:
            style = GREEN if self._color else UNDERLINE
            self._sink.write_styled(_styled_lines(printable(text, CONTROL), style))
        else:
            self._sink.write(text)


def _styled_lines(text: str, style: str) -> str:
    """Text in a style that never crosses the end of a line."""
    return "\n".join(paint(line, style, bool(style and line)) for line in text.split("\n"))


@dataclass
class Delivery:
    """Runs the request of `spd generate`; writes its text, or its token ids where there is no tokenizer."""

    session: Session
    options: GenerateOptions
    sink: Sink
    engine: EngineClient
    request: Request
    inside: bool | None
    marks: ThinkingMarks = KNOWN_MARKS
    reply: RequestOutput = field(default_factory=RequestOutput)

    def __post_init__(self) -> None:
        splitter = ThinkingSplitter(self.inside, self.marks)
        hidden = self.options.think == "hide"
        self._view = ReplyView(self.session.console, self.sink, splitter, hidden=hidden)
        self.engine.prefilling = self._view.reading
        self._view.at_row_start = False  # an empty reply is a line, too
        self._streaming = self.engine.has_tokenizer and not self.options.json

    def run(self) -> int:
        """Decode and deliver; returns the exit status. Raises Interrupted between writes only."""
        with closing(self.sink):
            try:
                self.engine.add(self.request)
                for events in drive(self.engine.step, lambda: self.engine.has_work):
                    for event in events:
                        with self.session.guard.hold():
                            self._take(event)
                    self.session.guard.check()
            except Interrupted:
                self._give_up()
                self._finish()
                raise
            except Exception:
                if not self.options.json and (self.reply.text or self.reply.token_ids):
                    self._finish_text()
                raise
            with self.session.guard.hold():
                self._finish()
        self.engine.close()
        return self._outcome()

    def _take(self, event: Event) -> None:
        self.reply.add(event)
        if self._streaming:
            self._view.take(event)
        self.sink.check_reader()

    def _give_up(self) -> None:
        """Stop early; text that the engine still held back is taken if it can be had."""
        with suppress(Exception):  # the signal may have come anywhere inside the engine
            self.engine.abort(self.request.id)
            for event in self.engine.step():
                self._take(event)
        self.reply.finish_reason = "abort"

    def _finish_text(self) -> None:
        """Write what streaming has not, and end the text with one newline."""
        if not self.engine.has_tokenizer:
            self._view.show(",".join(map(str, self.reply.token_ids)))
        elif not self._streaming:
            self._view.show(self.reply.text)
        self._view.finish()

    def _finish(self) -> None:
        """Print what remains to be printed: the end of the text or the object, and what is said about it."""
        metrics = RequestMetrics()
        options = self.options
        request = self.request
        with suppress(KeyError):  # it never began
            metrics = self.engine.metrics(request.id)
        fields = reply_fields(self.reply, metrics, self.engine, request, self.inside, self.marks)
        if options.json:
            shown = {"schema": "spd.generate/1", "model": options.model, **fields}
            shown |= {"params": vars(request.params), "plan": self.engine.info.plan}
            self.sink.write(to_json({**shown, "versions": versions()}) + "\n")
        else:
            self._finish_text()
        if note := unanswered(fields, self.reply, request):
            self.session.console.note(note)
        if note := loop_note(self.reply):
            self.session.console.note(note)
        if options.stats:
            tell(stats_line(metrics))

    def _outcome(self) -> int:
        """Return the exit status of a reply that has ended. Raises EngineError and IncompleteError."""
        failure = reply_failure(self.reply, self.request)
        if failure is None:
            return 0
        if not self.options.json:
            raise failure
        write_error(failure, self.session.console)  # the one object on stdout is the reply
        return failure.exit_code


def reply_failure(reply: RequestOutput, request: Request) -> SpdError | None:
    """Return the error of a reply that failed, or ended before its grammar was complete; else None."""
    if reply.finish_reason == "error":
        fix = "--dtype float32, or run it again with -vv and report what it prints"
        if request.grammar is not None:
            fix = "a grammar that always allows a next token, or a larger -n"
        message = reply.error or "the model failed while generating"
        reason = ["What came before the fault was printed."]
        return EngineError(message, reason=reason, fix=[fix])
    if reply.error is not None and reply.finish_reason in ("stop", "length"):
        why, fix = _early_end(reply, request)
        return IncompleteError(f"{reply.error}: {why}", fix=[fix])
    return None


def reply_fields(
    reply: RequestOutput,
    metrics: RequestMetrics,
    engine: EngineClient,
    request: Request,
    inside: bool | None,
    marks: ThinkingMarks = KNOWN_MARKS,
) -> dict[str, Any]:
    """What JSON says of a reply, alone or one of many; `inside` as in `ThinkingSplitter`."""
    reasoning, text = split_thinking(reply.text, inside, marks)
    params = request.params
    speculation = engine_speculation(engine.info, metrics)
    details = {"reasoning_tokens": 0}
    if reasoning is not None and engine.tokenizer is not None:
        count = ThinkingCounter(inside, engine.tokenizer.token_bytes, marks)
        count.add(reply.token_ids)
        details["reasoning_tokens"] = count.tokens
    shown: dict[str, Any] = {
        "text": text,
        "reasoning": reasoning,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "usage": {**metrics.usage(), "completion_tokens_details": details},
        "timings": metrics.timings(),
        "metrics": {"speculative_decoding": speculation},
        "seed": params.seed,
    }
    if params.logprobs is not None:
        shown["logprobs"] = [logprob_entry(entry, engine.tokenizer) for entry in reply.logprobs]
    return shown


def engine_speculation(info: EngineInfo, metrics: RequestMetrics) -> dict[str, Any]:
    """Return what JSON says of speculation for a request."""
    imposed = info.imposes_acceptance
    return metrics.speculative_decoding(info.spec, info.draft_max, imposed=imposed)


def unanswered(fields: Mapping[str, Any], reply: RequestOutput, request: Request) -> str | None:
    """Return the note for a reply that ended while it was thinking; None for any other."""
    if reply.error is not None or reply.finish_reason not in ("stop", "length"):
        return None
    if fields["reasoning"] is None or fields["text"]:
        return None
    why, _ = _early_end(reply, request)
    return f"{UNANSWERED}: {why}"


def _early_end(reply: RequestOutput, request: Request) -> tuple[str, str]:
    """Return what ended a reply early, and what to type instead."""
    if reply.finish_reason == "stop":
        return "a stop text or token came", "leave --stop out, or name another text"
    limit = request.params.max_tokens
    if limit is not None and len(reply.token_ids) >= limit:
        return f"-n {limit:,} was reached", "a larger -n"
    bounds = "bounds in the schema or grammar, such as maxLength, maxItems and maximum"
    return "the context is full", f"{bounds}, or a larger --ctx"


def versions() -> dict[str, str]:
    """Versions of what takes part, here or in a server."""
    import importlib.metadata  # here, for it takes a tenth of a start

    found = {"spd": __version__, "python": sys.version.partition(" ")[0]}
    for name in ("torch", "tokenizers", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def stats_line(metrics: RequestMetrics) -> str:
    """`318 tok · 64.8 tok/s · load 3.2 s · first 0.21 s · 3.05 tok/round · drafts 213/416 (51%)`."""
    facts = (
        (metrics.decode_tokens_per_second, "{:.1f} tok/s"),
        (metrics.load_ms / 1000, "load {:.2f} s"),
        (
            metrics.queue_ms / 1000 if metrics.queue_ms >= 100.0 else 0,
            "queued {:.2f} s",
        ),  # on a server
        (metrics.first_token_ms / 1000, "first {:.2f} s"),
        (metrics.rounds and metrics.tokens_per_round, "{:.2f} tok/round"),
    )
    parts = [
        f"{metrics.completion_tokens} tok",
        *(form.format(fact) for fact, form in facts if fact),
    ]
    if metrics.draft_n:
        share = f"{metrics.draft_acceptance_rate:.0%}"
        parts.append(f"drafts {metrics.draft_n_accepted}/{metrics.draft_n} ({share})")
    return " · ".join(parts)


def stats_facts(metrics: RequestMetrics, info: EngineInfo) -> Mapping[str, Facts]:
    """Return everything that was counted for a reply, in words."""
    prompt: Facts = {
        "new tokens": metrics.prompt_tokens - metrics.cached_tokens,
        "cached tokens": metrics.cached_tokens,
        "time": f"{metrics.prompt_ms / 1000:.2f} s",
    }
    reply: Facts = {
        "tokens": metrics.completion_tokens,
        "first token": f"{metrics.first_token_ms / 1000:.2f} s",
        "per token": f"{metrics.time_per_output_token_ms:.2f} ms",
        "speed": f"{metrics.decode_tokens_per_second:.1f} tok/s",
    }
    rounds: Facts = {
        "count": metrics.rounds,
        "with drafts": metrics.num_drafts,
        "tokens per round": f"{metrics.tokens_per_round:.2f}",
    }
    drafts: Facts = {
        "method": info.spec,
        "draft max": info.draft_max,
        "drafted tokens": metrics.draft_n,
        "accepted drafts": metrics.draft_n_accepted,
        "acceptance rate": f"{metrics.draft_acceptance_rate:.0%}",
        "mean acceptance length": f"{metrics.mean_acceptance_length:.2f}",
        "accepted by position": metrics.accepted_per_position,
    }
    facts = {"prompt": prompt, "reply": reply, "rounds": rounds}
    return facts if info.spec == "off" else facts | {"drafts": drafts}
