"""`spd generate --jsonl`: a prompt a line in, a reply a line out, in the same order.

A line is `{"id", "prompt" | "messages" | "prompt_ids", "system", "params"}` or a line of an OpenAI batch
(`custom_id` and `body`). What is wrong with a line is said in its place, and the others go on.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.commands.generate import say_plan
from spd.cli.options import GenerateOptions, Session
from spd.cli.signals import Interrupted
from spd.cli.text.batch_input import BatchLine, Shared, answer_error, read_lines, read_shared, read_wishes
from spd.cli.text.output import Sink, cannot_write, tell, to_json
from spd.cli.text.progress import Ticker, clock
from spd.errors import PartialError, ResourceError, SpdError, UsageError

if TYPE_CHECKING:
    from spd.cli.text.job import Settings
    from spd.runtime import Engine, Event, Request
    from spd.runtime.engine.driver import Gathered

SCHEMA = "spd.generate.line/1"
BEGINNINGS = (f'{{"schema": "{SCHEMA}"'.encode(), b'{"id": ')
"""Of an answer, and of a line that says what is wrong."""
WINDOW = 512
"""Lines that may be finished beyond the first unfinished one: what order costs in memory."""


def generate_lines(session: Session, options: GenerateOptions, sink: Sink) -> int:
    """Answer every line of the input; returns the exit status."""
    from spd.cli.text.job import plan_settings

    settings, shared = plan_settings(options), read_shared(options)
    lines = read_lines(options.file[0] if options.file else "-")
    path = options.output if options.resume else None
    done = Done() if path is None else resume(path, lines, sink)
    rest = lines[done.lines :]
    if not rest:
        return _end(session, options, done, 0.0)
    from spd.cli.text.progress import loading

    with loading(f"loading {options.model}", session.console) as progress:
        from spd.runtime import Engine

        engine = Engine(settings.config, progress=progress)
        if len(rest) > (slots := engine.plan.shape.slots):
            engine.capture_ahead([settings.sampling.params], together=slots)
    say_plan(session.console, options, engine, settings)
    settings = dataclasses.replace(settings, context=engine.plan.shape.ctx)
    batch = Batch(session, settings, shared, engine, sink, done, len(lines))
    began = time.perf_counter()
    try:
        batch.run(iter(rest))
    except Interrupted:
        how = "--resume goes on from here" if options.output is not None else "with -o FILE, --resume goes on"
        session.console.note(f"stopped after {done.lines:,} of {len(lines):,} lines; {how}")
        raise
    engine.close()
    return _end(session, options, done, time.perf_counter() - began)


def _end(session: Session, options: GenerateOptions, done: Done, seconds: float) -> int:
    """Say how it went. Raises PartialError if a line failed, now or in an earlier part."""
    if options.stats and seconds:
        rate = f"{done.tokens / seconds:.1f} tok/s"
        tell(f"{done.lines:,} lines · {done.tokens:,} tok · {clock(seconds)} · {rate}")
    if done.early:
        session.console.note(f"{len(done.early):,} of {done.lines:,} replies ended early; {done.early[0]}")
    if done.failed:
        raise PartialError(
            f"{done.failed:,} of {done.lines:,} lines failed",
            reason=["Each says why in its `error`; the others are complete."],
            fix=["""jq -c 'select(.error)' shows them"""],
        )
    return 0


@dataclass
class Done:
    """Lines delivered so far, in order; `tokens` and what lines lack that ended `early` of this run only."""

    lines: int = 0
    failed: int = 0
    tokens: int = 0
    early: list[str] = field(default_factory=list)


def resume(path: Path, lines: Sequence[BatchLine], sink: Sink) -> Done:
    """What a file holds of an earlier run; the beginning of one more answer is cut off.

    Raises UsageError for a file that was not made from these lines, or is being written; it stays as it is.
    """
    done = Done()
    try:
        sink.open()  # locked from here on
        if not path.is_file():
            raise UsageError(
                f"{path}: cannot be continued", fix=["leave --resume out, or give another -o FILE"]
            )
        with path.open("r+b") as file:
            whole = 0
            for number, raw in enumerate(file):
                if not raw.endswith(b"\n") and any(raw[: len(b)] == b[: len(raw)] for b in BEGINNINGS):
                    break  # an interruption left it; it is the last
                entry = _entry(raw)
                ours = to_json([(line.number, line.id) for line in lines[number : number + 1]])
                if json.loads(ours.encode("utf-8", "replace")) != [[entry.get("line"), entry.get("id")]]:
                    raise _foreign(path, number)
                whole += len(raw)
                done.lines += 1
                done.failed += "error" in entry
            file.truncate(whole)
    except OSError as error:
        raise cannot_write(path, error) from error
    return done


def _entry(raw: bytes) -> dict[str, Any]:
    """Read a line of an output file; empty if it is not valid."""
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _foreign(path: Path, number: int) -> UsageError:
    return UsageError(
        f"{path}: line {number + 1} does not answer the input's line {number + 1}",
        reason=["--resume goes on where the same input stopped."],
        fix=["give the same input, or another -o FILE"],
        code="resume",
    )


@dataclass
class Open:
    """A line that the engine works on."""

    line: BatchLine
    request: Request
    inside: bool | None
    parts: Gathered


@dataclass
class Batch:
    """Keeps the engine fed, and writes what is finished in the order of the input, a whole line at a time."""

    session: Session
    settings: Settings
    shared: Shared
    engine: Engine
    sink: Sink
    done: Done
    total: int
    open: dict[str, Open] = field(default_factory=dict)
    finished: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Answers that wait for an earlier line, by their place in the input."""
    places: dict[int, int] = field(default_factory=dict)

    def run(self, lines: Iterator[BatchLine]) -> None:
        """Answer all lines. Raises Interrupted between writes, never inside one."""
        from spd.runtime.engine.driver import drive

        guard, place, more = self.session.guard, self.done.lines, True
        ticker = Ticker(self.session.console)
        began, before = time.perf_counter(), self.done.lines

        def fill() -> bool:
            nonlocal more, place
            if not (more or self.engine.has_work):
                return False
            while (
                more
                and len(self.open) < 2 * self.engine.plan.shape.slots
                and place - self.done.lines < WINDOW
            ):
                line = next(lines, None)
                if line is None:
                    more = False
                    break
                self.places[line.number] = place
                self._begin(line)
                place += 1
            return True

        with ticker:
            for events in drive(self.engine.step, fill, self._short):
                for event in events:
                    self._take(event)
                with guard.hold():
                    self._flush(ticker)
                guard.check()
                answered = self.done.lines - before
                left = (self.total - self.done.lines) * (time.perf_counter() - began) / max(1, answered)
                failed = f" · {self.done.failed:,} failed" if self.done.failed else ""
                rate = self.done.tokens / (time.perf_counter() - began)
                eta = f" · {clock(left)} left" if answered else ""
                ticker.write(f"{self.done.lines:,} of {self.total:,} lines{failed} · {rate:.0f} tok/s{eta}")

    def _begin(self, line: BatchLine) -> None:
        """Hand a line to the engine, or answer it at once with what is wrong with it."""
        from spd.runtime.engine.driver import Gathered

        try:
            wanted = read_wishes(line, self.settings, self.shared)
            ids = self.settings.fit(wanted.asked, wanted.params)
            request, inside = self.settings.request(
                str(line.number), wanted.asked, ids, wanted.params, wanted.grammar
            )
            self.engine.add(request)
        except SpdError as error:
            self._finish(line, answer_error(line, error))
        else:
            self.open[request.id] = Open(line, request, inside, Gathered())

    def _short(self, error: ResourceError) -> None:
        self.session.console.note(f"{error.message}: the lines running at that time failed")

    def _take(self, event: Event) -> None:
        one = self.open.get(event.request_id)
        if one is None:
            return
        one.parts.take(event)
        if event.finish_reason is None:
            return
        del self.open[event.request_id]
        self.done.tokens += len(one.parts.token_ids)
        self._finish(one.line, self._answer(one))

    def _answer(self, one: Open) -> dict[str, Any]:
        from spd.cli.text.report import early_end, reply_fields

        metrics = self.engine.metrics(one.request.id)
        fields = reply_fields(one.parts, metrics, self.engine, one.request, one.inside)
        shown = {"schema": SCHEMA, "id": one.line.id, "line": one.line.number, **fields}
        if early := early_end(fields, one.parts.error, one.request):
            self.done.early.append(f"line {one.line.number}: {early}")
        if one.parts.finish_reason == "error":
            code = "grammar" if one.request.grammar is not None else "engine"
            shown["error"] = {"code": code, "message": one.parts.error or "the model failed"}
        return shown

    def _finish(self, line: BatchLine, answer: dict[str, Any]) -> None:
        self.finished[self.places.pop(line.number)] = answer

    def _flush(self, ticker: Ticker) -> None:
        """Write every answer that is next in the order of the input."""
        while self.done.lines in self.finished:
            answer = self.finished.pop(self.done.lines)
            if self.sink.is_terminal:
                ticker.write("")
            self.sink.write(to_json(answer) + "\n")
            self.done.lines += 1
            self.done.failed += "error" in answer
