"""`spd generate --jsonl`: a prompt a line in, a reply a line out or what is wrong, in the same order."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.engine import load, say_before
from spd.cli.options import GenerateOptions
from spd.cli.prompt_input import gather_shared
from spd.cli.reply_view import reply_failure, reply_fields
from spd.cli.run_settings import plan_settings
from spd.cli.served import served_engine
from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Session, tell
from spd.cli.terminal.progress import Ticker, clock
from spd.cli.terminal.sink import Sink, cannot_write, to_json
from spd.conversation.fields import (
    TEXT,
    FieldError,
    any_value,
    integer,
    strict_object,
)
from spd.conversation.messages import check_messages, check_text
from spd.conversation.prompt import Prompt
from spd.conversation.sampling_fields import IDS, SAMPLING_FIELDS
from spd.conversation.settings import PreparedRequest, Settings
from spd.conversation.vocabulary import check_ids
from spd.errors import EngineError, PartialError, SpdError, UsageError
from spd.formats.files import INPUT_LIMIT, LINES_LIMIT, read_input
from spd.runtime.engine.clock import now
from spd.runtime.engine.driver import drive
from spd.runtime.engine.request import Event, GrammarSpec, Request, RequestOutput, derived_seed
from spd.runtime.round.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from spd.runtime import EngineClient

SCHEMA = "spd.generate.line/1"
BEGINNINGS = (f'{{"schema": "{SCHEMA}"'.encode(), b'{"id": ')
"""Of an answer, and of a line that says what is wrong."""
SHAPES: dict[str, Literal["schema", "regex", "lark"]]
SHAPES = {"schema": "schema", "regex": "regex", "grammar": "lark"}
"""What says how the whole reply looks, and how the engine calls it."""
PARAMETERS = strict_object(
    {
        **SAMPLING_FIELDS,
        "logprobs": integer(0, MAX_LOGPROBS),
        "schema": any_value,
        "regex": TEXT,
        "grammar": TEXT,
    }
)
LINE = strict_object(
    {"id": any_value, "prompt": TEXT, "messages": any_value, "prompt_ids": IDS, "system": TEXT}
    | {"params": PARAMETERS}
)


def generate_lines(session: Session, options: GenerateOptions, sink: Sink) -> int:
    """Answer every line of the input; returns the exit status. Raises PartialError if a line failed."""
    settings = plan_settings(options)
    shared = gather_shared(options)
    lines = read_lines(options.file[0] if options.file else "-")
    done = failed = 0
    if options.resume and options.output is not None:
        done, failed = resume(options.output, lines, sink)
    if rest := lines[done:]:
        served = served_engine(session, options, settings.config.slots)
        engine = served or load(session.console, options.model, settings.config)
        if len(rest) > (slots := engine.info.slots):
            engine.capture_ahead([settings.sampling.params], concurrency=slots)
        say_before(session.console, settings, engine, None)
        settings = dataclasses.replace(settings, context=engine.info.ctx)
        began = now()
        batch = Batch(session, settings, shared, options.raw, engine, sink, done, failed)
        try:
            batch.run(rest)
        except Interrupted:
            how = "--resume goes on" + (" from here" if options.output else ", with -o FILE")
            session.console.note(f"stopped after {batch.done:,} of {len(lines):,} lines; {how}")
            raise
        engine.close()
        done = batch.done
        failed = batch.failed
        seconds = now() - began
        if options.stats:
            rate = f"{batch.tokens / seconds:.1f} tok/s"
            tell(f"{done:,} lines · {batch.tokens:,} tok · {clock(seconds)} · {rate}")
    if failed:
        why = ["Each says why in its `error`; the others are complete."]
        fix = ["jq -c 'select(.error)'"]
        raise PartialError(f"{failed:,} of {done:,} lines failed", reason=why, fix=fix)
    return 0


# -- what a line asks for ------------------------------------------------------------------------


@dataclass
class Line:
    """One line of the input: its number, its JSON value or what is wrong with it, and what came of it."""

    number: int
    value: Mapping[str, Any]
    error: SpdError | None = None
    request: Request | None = None
    inside: bool | None = None
    parts: RequestOutput | None = None
    answer: dict[str, Any] | None = None

    @property
    def id(self) -> Any:
        """What the line calls itself; its number where it has no name."""
        name = self.value.get("id")
        return self.number if name is None else name


def read_lines(name: str) -> list[Line]:
    """Every line of a file, or of stdin (-), that is not blank. Raises UsageError and NotFoundError."""
    data = read_input(name, "check the path; without -f lines come from stdin", LINES_LIMIT)
    lines = [_read(n, raw) for n, raw in enumerate(data.split(b"\n"), 1) if raw.strip()]
    if not lines:
        why = f"{'stdin' if name == '-' else name} is empty."
        fix = """echo '{"prompt": "Hello"}' | spd generate --jsonl"""
        raise UsageError("no lines to answer", reason=[why], fix=[fix], code="no_prompt")
    return lines


def _read(number: int, raw: bytes) -> Line:
    error = UsageError(f"longer than {INPUT_LIMIT >> 20} MiB")
    if len(raw) <= INPUT_LIMIT:
        try:
            value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            if not isinstance(value, dict):
                error = UsageError("not a JSON object", fix=['{"prompt": "Hello"}'])
            elif isinstance(value.get("id"), (dict, list)):
                error = UsageError("the line's id is neither a text nor a number")
            else:
                return Line(number, value)
        except (ValueError, RecursionError) as why:
            error = UsageError(f"not JSON: {why}")
    return Line(number, {}, error)


def read_request(line: Line, settings: Settings, shared: Prompt, raw: bool) -> PreparedRequest:
    """Return what a line asks for, over what the flags say. Raises SpdError and FieldError."""
    if line.error is not None:
        raise line.error
    value = LINE(dict(line.value), "")
    grammar = settings.grammar
    values = value.get("params", {})
    shapes = {name: values.pop(name) for name in SHAPES if name in values}
    if len(shapes) > 1:
        names = " and ".join(f"params.{name}" for name in shapes)
        raise UsageError(f"{names} each say what the whole reply looks like")
    for name, wish in shapes.items():
        grammar = GrammarSpec(SHAPES[name], wish if isinstance(wish, str) else json.dumps(wish))
    values.setdefault("seed", derived_seed(settings.sampling.params.seed, line.number))
    params = settings.params_with(**values)
    asked = _asked(value, shared, raw)
    check_ids(asked.ids or (), settings.vocabulary.config.vocab_size, "prompt_ids")
    return settings.prepare(str(line.number), asked, params, grammar)


def _asked(line: Mapping[str, Any], shared: Prompt, raw: bool) -> Prompt:
    """The prompt of a line behind what every line begins with; its own system message replaces theirs."""
    kinds = [kind for kind in ("prompt", "messages", "prompt_ids") if kind in line]
    if len(kinds) != 1 or line.get("prompt_ids") == ():
        raise UsageError(
            "one of prompt, messages and prompt_ids is needed", fix=['{"prompt": "Hello"}']
        )
    kind = kinds[0]
    system = line.get("system")
    common = shared.messages
    if kind == "prompt_ids" or (raw and kind == "prompt"):
        if system is not None or common:
            raise UsageError(
                f"`{kind}` is the whole prompt here: nothing of a chat can stand before it"
            )
        if shared.variables:
            raise UsageError(
                f"`{kind}` uses no chat template: --template-arg and --think would do nothing"
            )
        return Prompt(ids=line.get("prompt_ids"), text=line.get("prompt"))
    if raw:
        raise UsageError("--raw uses no chat template, which `messages` need")
    if kind == "messages":
        turns = check_messages(line["messages"], "the line")
    else:
        turns = ({"role": "user", "content": check_text(line["prompt"], "`prompt`")},)
    own = turns[0]["role"] == "system"
    if own and system is not None:
        raise UsageError("the system message is given twice: `system` and the first of `messages`")
    if system is not None:
        turns = ({"role": "system", "content": check_text(system, "`system`")}, *turns)
    if own or system is not None:
        common = (turns[0], *(m for m in common if m["role"] != "system"))
        turns = turns[1:]
    return Prompt(messages=(*common, *turns), variables=shared.variables)


# -- what has been answered ----------------------------------------------------------------------


def resume(path: Path, lines: Sequence[Line], sink: Sink) -> tuple[int, int]:
    """How many answers a file holds, and how many failed; the beginning of one more answer is cut off.

    Raises UsageError for a file that was not made from these lines, or is being written; it stays as it is.
    """
    try:
        sink.open()  # locked from here on
        if not path.is_file():
            raise UsageError(
                f"{path}: cannot be continued", fix=["leave --resume out, or another -o FILE"]
            )
        *whole, rest = path.read_bytes().split(b"\n")
        entries = [_read(n, raw).value for n, raw in enumerate(whole, 1)]
        ours = json.loads(
            to_json([(line.number, line.id) for line in lines]).encode("utf-8", "replace")
        )
        wrong = [
            n for n, e in enumerate(entries) if [[e.get("line"), e.get("id")]] != ours[n : n + 1]
        ]
        if not any(rest[: len(b)] == b[: len(rest)] for b in BEGINNINGS):  # no interruption left it
            wrong.append(len(whole))
        if wrong:
            words = f"{path}: line {wrong[0] + 1} does not answer the input's line {wrong[0] + 1}"
            raise UsageError(words, fix=["give the same input, or another -o FILE"], code="resume")
        os.truncate(path, path.stat().st_size - len(rest))
    except OSError as error:
        raise cannot_write(path, error) from error
    return len(entries), sum("error" in entry for entry in entries)


@dataclass
class Batch:
    """Keeps the engine fed, and writes what is finished in the order of the input, a whole line at a time."""

    session: Session
    settings: Settings
    shared: Prompt
    raw: bool
    engine: EngineClient
    sink: Sink
    done: int
    """Lines answered so far, those of an earlier run too, and how many of them failed."""
    failed: int
    tokens: int = 0
    begun: deque[Line] = field(default_factory=deque)
    """In the order of the input, without those that were written."""
    open: dict[str, Line] = field(default_factory=dict)
    """Those that the engine works on, by the names of their requests."""

    def run(self, lines: Sequence[Line]) -> None:
        """Answer all lines. Raises Interrupted between writes, never inside one."""
        before = self.done
        total = self.done + len(lines)
        rest = iter(lines)
        guard = self.session.guard

        def short(error: SpdError) -> None:
            self.session.console.note(f"{error.message}: the lines running at that time failed")

        with Ticker(self.session.console) as ticker:
            for events in drive(self.engine.step, lambda: self._fill(rest), short):
                for event in events:
                    self._take(event)
                if self.sink.is_terminal and self.begun and self.begun[0].answer is not None:
                    ticker.write("")
                with guard.hold():
                    self._flush()
                guard.check()
                ticker.count("answering", self.done - before, total - before, "{:,} lines".format)

    def _fill(self, rest: Iterator[Line]) -> bool:
        """Begin lines while there is room; False when all are answered."""
        while (
            len(self.open) < 2 * self.engine.info.slots and len(self.begun) < 512
        ):  # order costs memory
            line = next(rest, None)
            if line is None:
                break
            self._begin(line)
        return bool(self.begun)

    def _begin(self, line: Line) -> None:
        """Hand a line to the engine, or answer it at once with what is wrong with it."""
        self.begun.append(line)
        try:
            request, line.inside = read_request(line, self.settings, self.shared, self.raw)
            self.engine.add(request)
            line.request, line.parts, self.open[request.id] = request, RequestOutput(), line
        except (FieldError, RecursionError) as error:
            wrong = UsageError(
                error.message if isinstance(error, FieldError) else "nested too deep"
            )
            line.answer = _refusal(line, wrong)
        except EngineError:  # it has gone
            raise
        except SpdError as error:
            line.answer = _refusal(line, error)

    def _take(self, event: Event) -> None:
        line = self.open[event.request_id]
        request = line.request
        parts = line.parts
        assert request is not None and parts is not None
        parts.add(event)
        if event.finish_reason is None:
            return
        del self.open[event.request_id]
        self.tokens += len(parts.token_ids)
        metrics = self.engine.metrics(request.id)
        marks = self.settings.vocabulary.marks
        fields = reply_fields(parts, metrics, self.engine, request, line.inside, marks)
        line.answer = {"schema": SCHEMA, "id": line.id, "line": line.number, **fields}
        failure = reply_failure(parts, request)
        if failure is not None:
            code = failure.code
            if parts.finish_reason == "error" and request.grammar is not None:
                code = "grammar"
            line.answer["error"] = {"code": code, "message": failure.message}

    def _flush(self) -> None:
        """Write every answer that is next in the order of the input."""
        while self.begun and (answer := self.begun[0].answer) is not None:
            self.sink.write(to_json(answer) + "\n")
            self.begun.popleft()
            self.done += 1
            self.failed += "error" in answer


def _refusal(line: Line, error: SpdError) -> dict[str, Any]:
    """What is said in the place of an answer."""
    shown = {"code": error.code, "message": error.message}
    if error.reason:
        shown["reason"] = " ".join(error.reason)
    return {"id": line.id, "line": line.number, "error": shown}
