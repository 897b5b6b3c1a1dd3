"""Output of a reply while it streams: thinking, plain or Markdown text, JSON and statistics."""

from __future__ import annotations

import codecs
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Console, Session, write_error, write_stderr, write_stderr_line
from spd.cli.terminal.plain_text import CONTROL, escape_controls
from spd.cli.terminal.progress import Ticker
from spd.cli.terminal.sink import Sink, to_json
from spd.cli.terminal.streams import is_terminal, paint
from spd.conversation.notes import loop_note
from spd.conversation.thinking import UNANSWERED_NOTE, ThinkingCounter
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
"""Parameters of ANSI styles."""
Facts = dict[str, int | str | list[int]]
"""Counts of a reply by their names in text."""


class DraftedTextSplitter:
    """Splits a reply into drafted and other text.

    A character is drafted if its last byte came from an accepted draft.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending_flags: list[bool] = []
        """True if drafted, for each character of decoded tokens whose text has not come yet."""

    def split_event(self, event: Event) -> Iterator[tuple[str, bool]]:
        """Yield stretches of the event's text, and True if drafted.

        Text may come later than its tokens.
        """
        for token_id, drafted in zip(event.token_ids, event.drafted, strict=False):
            self._pending_flags += [drafted] * len(
                self._decoder.decode(self._token_bytes(token_id))
            )
        flagged_characters = itertools.zip_longest(
            event.text, self._pending_flags[: len(event.text)], fillvalue=False
        )
        for drafted, characters in itertools.groupby(
            flagged_characters, key=lambda pair: bool(pair[1])
        ):
            yield "".join(str(character) for character, _ in characters), drafted
        del self._pending_flags[: len(event.text)]


class ReplyView:
    """Writes one reply; `splitter` may have been fed a beginning that was shown before.

    Thinking is written dimmed to standard error if that is a terminal, unless `hidden`; nowhere
    else. `drafted_splitter` colours drafts on a terminal, `markdown` renders the answer there;
    without both the answer is plain text.
    """

    drafted_splitter: DraftedTextSplitter | None = None
    markdown: MarkdownStream | None = None

    def __init__(
        self, console: Console, sink: Sink, splitter: ThinkingSplitter, *, hidden: bool
    ) -> None:
        self._sink = sink
        self._splitter = splitter
        self._color = console.color
        self._hides_thinking = hidden
        self._shows_thinking = is_terminal(sys.stderr) and not console.quiet
        self._ticker = Ticker(console)
        self.report_prefill = partial(
            self._ticker.show_progress, "reading the prompt", amount="{:,} tok".format
        )
        """Takes how many tokens of the prompt are prefilled, and how many there are."""
        self._last_thinking_letter = ""
        """The last letter of thinking that was written; empty before any."""
        self.is_at_row_start = True

    def write_event(self, event: Event) -> None:
        """Write the text of one event."""
        for text, drafted in (
            self.drafted_splitter.split_event(event)
            if self.drafted_splitter
            else [(event.text, False)]
        ):
            self.write_text(text, drafted)

    def finish(self) -> None:
        """Write text that is still buffered, and leave the cursor at the beginning of a row."""
        self.write_text("", final=True)
        self._end_thinking()
        if self.markdown is not None:
            self._sink.write_styled(self.markdown.finish())
        elif not self.is_at_row_start:
            self._sink.write("\n")

    def write_text(self, text: str, drafted: bool = False, *, final: bool = False) -> None:
        """Write the next text, thinking and answer apart."""
        for thinking, part in self._splitter.feed(text, final=final):
            if thinking and self._hides_thinking:
                self._ticker.write("thinking…")
            elif thinking and self._shows_thinking and part:
                self._ticker.write("")
                write_stderr(
                    _styled_lines(escape_controls(part), DIM if self._color else ""), styled=True
                )
                self._last_thinking_letter = part[-1]
            elif part and not thinking:
                self._end_thinking()
                self.is_at_row_start = part.endswith("\n")
                self._write_answer(part, drafted)

    def _end_thinking(self) -> None:
        """Write a blank line between thinking and the answer, once."""
        self._ticker.write("")
        if self._last_thinking_letter:
            write_stderr("\n" if self._last_thinking_letter == "\n" else "\n\n")
        self._last_thinking_letter = ""

    def _write_answer(self, text: str, drafted: bool) -> None:
        """Write a part of the answer: rendered, in the style of drafts, or plain."""
        if self.markdown is not None:
            safe_text = escape_controls(text.replace("\r\n", "\n"), CONTROL)
            self._sink.write_styled(self.markdown.feed(safe_text))
        elif drafted:
            style = GREEN if self._color else UNDERLINE
            self._sink.write_styled(_styled_lines(escape_controls(text, CONTROL), style))
        else:
            self._sink.write(text)


def _styled_lines(text: str, style: str) -> str:
    """Return text in an ANSI style that is closed at the end of each line."""
    return "\n".join(paint(line, style, bool(style and line)) for line in text.split("\n"))


@dataclass(eq=False, repr=False)
class GenerateRun:
    """Runs the request of `spd generate`; writes text, or token ids if there is no tokenizer.

    inside_thinking: the reply begins inside the model's thinking; None if it has no thinking marks.
    """

    session: Session
    options: GenerateOptions
    sink: Sink
    engine: EngineClient
    request: Request
    inside_thinking: bool | None
    marks: ThinkingMarks = KNOWN_MARKS
    reply: RequestOutput = field(default_factory=RequestOutput)

    def __post_init__(self) -> None:
        """Make the view, and make the engine report the prefill to it."""
        splitter = ThinkingSplitter(self.inside_thinking, self.marks)
        hidden = self.options.think == "hide"
        self._view = ReplyView(self.session.console, self.sink, splitter, hidden=hidden)
        self.engine.prefilling = self._view.report_prefill
        self._view.is_at_row_start = False  # an empty reply is one line, too
        self._is_streaming = self.engine.has_tokenizer and not self.options.json

    def run(self) -> int:
        """Decode and write the reply, close sink and engine, and return the exit status.

        Raises Interrupted between writes only, EngineError and IncompleteError.
        """
        with closing(self.sink):
            try:
                self.engine.add(self.request)
                for events in drive(self.engine.step, lambda: self.engine.has_work):
                    for event in events:
                        with self.session.guard.defer_signals():
                            self._take_event(event)
                    self.session.guard.raise_if_received()
            except Interrupted:
                self._abort_request()
                self._write_reply_end()
                raise
            except Exception:
                if not self.options.json and (self.reply.text or self.reply.token_ids):
                    self._write_text_end()
                raise
            with self.session.guard.defer_signals():
                self._write_reply_end()
        self.engine.close()
        return self._exit_status()

    def _take_event(self, event: Event) -> None:
        """Add an event to the reply, and write it if streaming.

        Raises OutputClosed without a reader.
        """
        self.reply.add(event)
        if self._is_streaming:
            self._view.write_event(event)
        self.sink.check_reader()

    def _abort_request(self) -> None:
        """Abort the request and take the text that the engine still buffers, if it can give it."""
        with suppress(Exception):  # the signal may have come anywhere inside the engine
            self.engine.abort(self.request.id)
            for event in self.engine.step():
                self._take_event(event)
        self.reply.finish_reason = "abort"

    def _write_text_end(self) -> None:
        """Write text that was not streamed, and end the text with one newline."""
        if not self.engine.has_tokenizer:
            self._view.write_text(",".join(map(str, self.reply.token_ids)))
        elif not self._is_streaming:
            self._view.write_text(self.reply.text)
        self._view.finish()

    def _write_reply_end(self) -> None:
        """Write the end of the text or the JSON object, then notes and statistics."""
        metrics = RequestMetrics()
        options = self.options
        request = self.request
        with suppress(KeyError):  # it never began
            metrics = self.engine.metrics(request.id)
        fields = reply_fields(
            reply=self.reply,
            metrics=metrics,
            engine=self.engine,
            request=request,
            inside_thinking=self.inside_thinking,
            marks=self.marks,
        )
        if options.json:
            result = {"schema": "spd.generate/1", "model": options.model, **fields}
            result |= {"params": vars(request.params), "plan": self.engine.info.plan}
            self.sink.write(to_json({**result, "versions": package_versions()}) + "\n")
        else:
            self._write_text_end()
        for note in (
            unanswered_note(fields, self.reply, request),
            loop_note(self.reply),
            metrics.draft_note(self.engine.info.spec),
        ):
            if note:
                self.session.console.note(note)
        if options.stats:
            write_stderr_line(stats_line(metrics))

    def _exit_status(self) -> int:
        """Return the exit status of a finished reply; raise its error, or print it with --json."""
        failure = reply_failure(self.reply, self.request)
        if failure is None:
            return 0
        if not self.options.json:
            raise failure
        write_error(failure, self.session.console)  # the one object on stdout is the reply
        return failure.exit_code


def reply_failure(reply: RequestOutput, request: Request) -> SpdError | None:
    """Return the error of a reply that failed or ended before its grammar did, else None."""
    if reply.finish_reason == "error":
        fix = "--dtype float32, or run it again with -vv and report what it prints"
        if request.grammar is not None:
            fix = "a grammar that always allows a next token, or a larger -n"
        message = reply.error or "the model failed while generating"
        reason = ["What came before the fault was printed."]
        return EngineError(message, reason=reason, fix=[fix])
    if reply.error is not None and reply.finish_reason in ("stop", "length"):
        explanation, fix = _early_end_reason(reply, request)
        return IncompleteError(f"{reply.error}: {explanation}", fix=[fix])
    return None


class FinishedFields(TypedDict):
    """JSON fields of every reply."""

    text: str
    reasoning: str | None
    token_ids: list[int]
    finish_reason: str | None
    usage: Mapping[str, object]
    timings: Mapping[str, object]
    metrics: Mapping[str, object]
    seed: int | None


class ReplyFields(FinishedFields, total=False):
    """JSON fields of a reply; `logprobs` only if they were requested."""

    logprobs: list[Mapping[str, object]]


def reply_fields(
    reply: RequestOutput,
    metrics: RequestMetrics,
    engine: EngineClient,
    request: Request,
    inside_thinking: bool | None,
    marks: ThinkingMarks = KNOWN_MARKS,
) -> ReplyFields:
    """Return the JSON fields of a reply; `inside_thinking`: it begins in the model's thinking."""
    reasoning, text = split_thinking(reply.text, inside_thinking, marks)
    params = request.params
    speculation = speculation_fields(engine.info, metrics)
    details = {"reasoning_tokens": 0}
    if reasoning is not None and engine.tokenizer is not None:
        count = ThinkingCounter(inside_thinking, engine.tokenizer.token_bytes, marks)
        count.add(reply.token_ids)
        details["reasoning_tokens"] = count.tokens
    fields: ReplyFields = {
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
        from spd.conversation.logprobs import logprob_entry

        fields["logprobs"] = [logprob_entry(entry, engine.tokenizer) for entry in reply.logprobs]
    return fields


def speculation_fields(info: EngineInfo, metrics: RequestMetrics) -> Mapping[str, object]:
    """Return the JSON object of a request's speculation metrics."""
    imposes_acceptance = info.imposes_acceptance
    return metrics.speculative_decoding(info.spec, info.draft_max, imposed=imposes_acceptance)


def unanswered_note(fields: ReplyFields, reply: RequestOutput, request: Request) -> str | None:
    """Return the note for a reply that ended in its thinking; None for any other."""
    if reply.error is not None or reply.finish_reason not in ("stop", "length"):
        return None
    if fields["reasoning"] is None or fields["text"]:
        return None
    reason, _ = _early_end_reason(reply, request)
    return f"{UNANSWERED_NOTE}: {reason}"


def _early_end_reason(reply: RequestOutput, request: Request) -> tuple[str, str]:
    """Return why a reply ended before it was complete, and what to type instead."""
    if reply.finish_reason == "stop":
        return "a stop text or token came", "leave --stop out, or name another text"
    limit = request.params.max_tokens
    if limit is not None and len(reply.token_ids) >= limit:
        return f"-n {limit:,} was reached", "a larger -n"
    bounds = "bounds in the schema or grammar, such as maxLength, maxItems and maximum"
    return "the context is full", f"{bounds}, or a larger --ctx"


def package_versions() -> dict[str, str]:
    """Return the versions of spd, Python and those of torch, tokenizers and triton installed."""
    import importlib.metadata  # imported here, as it takes a tenth of the start time

    found_versions = {"spd": __version__, "python": sys.version.partition(" ")[0]}
    for name in ("torch", "tokenizers", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found_versions[name] = importlib.metadata.version(name)
    return found_versions


def stats_line(metrics: RequestMetrics) -> str:
    """Return statistics of a reply on one line.

    `318 tok · 64.8 tok/s · load 3.2 s · first 0.21 s · 3.05 tok/round · drafts 213/416 (51%)`.
    """
    queue_seconds = metrics.queue_ms / 1000 if metrics.queue_ms >= 100.0 else 0  # of a server
    figures = (
        (metrics.decode_tokens_per_second, "{:.1f} tok/s"),
        (metrics.load_ms / 1000, "load {:.2f} s"),
        (queue_seconds, "queued {:.2f} s"),
        (metrics.first_token_ms / 1000, "first {:.2f} s"),
        (metrics.rounds and metrics.tokens_per_round, "{:.2f} tok/round"),
    )
    parts = [
        f"{metrics.completion_tokens} tok",
        *(format_string.format(value) for value, format_string in figures if value),
    ]
    if metrics.draft_n:
        share = f"{metrics.draft_acceptance_rate:.0%}"
        parts.append(f"drafts {metrics.draft_n_accepted}/{metrics.draft_n} ({share})")
    if metrics.draft_n_masked:
        waited = f"{metrics.rounds_waited}/{metrics.rounds}"
        parts.append(f"by the grammar {metrics.draft_masked_share:.0%}, waited {waited} rounds")
    return " · ".join(parts)


def stats_facts(metrics: RequestMetrics, info: EngineInfo) -> Mapping[str, Facts]:
    """Return the counts, times and rates of a reply by group and name."""
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
        "with drafts": metrics.num_draft_rounds,
        "tokens per round": f"{metrics.tokens_per_round:.2f}",
    }
    if metrics.rounds_waited:
        rounds["waited for the grammar"] = metrics.rounds_waited
    drafts: Facts = {
        "method": info.spec,
        "draft max": info.draft_max,
        "drafted tokens": metrics.draft_n,
        "accepted drafts": metrics.draft_n_accepted,
        "acceptance rate": f"{metrics.draft_acceptance_rate:.0%}",
        "mean acceptance length": f"{metrics.mean_acceptance_length:.2f}",
        "accepted by position": metrics.accepted_per_position,
    }
    if metrics.draft_n_masked:
        drafts["by the grammar"] = f"{metrics.draft_masked_share:.0%}"
    facts = {"prompt": prompt, "reply": reply, "rounds": rounds}
    return facts if info.spec == "off" else facts | {"drafts": drafts}
