"""`spd generate --jsonl`: one prompt per input line, one reply or error per output line."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.engine import load_engine, print_run_notes
from spd.cli.options import GenerateOptions
from spd.cli.prompt_input import read_shared_prompt
from spd.cli.reply_view import reply_failure, reply_fields
from spd.cli.run_settings import plan_settings
from spd.cli.served import served_engine
from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Session, write_stderr_line
from spd.cli.terminal.progress import Ticker, format_clock
from spd.cli.terminal.sink import Sink, output_error, to_json
from spd.conversation.fields import (
    TEXT,
    FieldError,
    any_value,
    integer,
    object_of,
)
from spd.conversation.messages import check_messages, check_text
from spd.conversation.prompt import Prompt
from spd.conversation.sampling_fields import SAMPLING_FIELDS, TOKEN_IDS
from spd.conversation.settings import PreparedRequest, Settings
from spd.conversation.token_ids import check_token_ids
from spd.errors import EngineError, PartialError, SpdError, UsageError
from spd.formats.files import MAX_INPUT_BYTES, MAX_LINES_BYTES, read_input
from spd.runtime.engine.clock import now
from spd.runtime.engine.driver import drive
from spd.runtime.engine.request import Event, GrammarSpec, Request, RequestOutput, derived_seed
from spd.runtime.round.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from spd.runtime import EngineClient

LINE_SCHEMA = "spd.generate.line/1"
"""The schema in each line of the output that holds a reply."""
ANSWER_PREFIXES = (f'{{"schema": "{LINE_SCHEMA}"'.encode(), b'{"id": ')
"""The beginnings of an answer and of an error."""
BLANKS = "\ufeff \t\r".encode()
"""What may stand before the object of a line."""
GRAMMAR_KINDS: dict[str, Literal["schema", "regex", "lark"]]
GRAMMAR_KINDS = {"schema": "schema", "regex": "regex", "grammar": "lark"}
"""Parameters of a line that constrain the reply, and the engine's kind of grammar."""
parse_parameters = object_of(
    {
        **SAMPLING_FIELDS,
        "logprobs": integer(0, MAX_LOGPROBS),
        "schema": any_value,
        "regex": TEXT,
        "grammar": TEXT,
    }
)
"""Checks and returns the `params` of a line."""
parse_line_fields = object_of(
    {
        "id": any_value,
        "prompt": TEXT,
        "messages": any_value,
        "prompt_ids": TOKEN_IDS,
        "system": TEXT,
    }
    | {"params": parse_parameters}
)
"""Checks and returns a line's object."""


def generate_lines(session: Session, options: GenerateOptions, sink: Sink) -> int:
    """Answer every line of the input in the output; return 0. Raises PartialError if a line failed.

    Prints notes, and the speed with --stats. With --resume, lines that the output answers are
    skipped.
    """
    settings = plan_settings(options)
    shared = read_shared_prompt(options)
    lines = read_lines(options.file[0] if options.file else "-")
    num_done = num_failed = 0
    if options.resume and options.output is not None:
        num_done, num_failed = resume_output(options.output, lines, sink)
    remaining_lines = lines[num_done:]
    if remaining_lines:
        served = served_engine(session, options, settings.config.slots)
        engine = served or load_engine(session, options.model, settings.config)
        slots = engine.info.slots
        if len(remaining_lines) > slots:
            engine.capture_ahead([settings.sampling.params], concurrency=slots)
        print_run_notes(session.console, settings, engine, None)
        settings = dataclasses.replace(settings, context=engine.info.ctx)
        start = now()
        batch = LineBatch(
            session=session,
            settings=settings,
            shared=shared,
            raw=options.raw,
            engine=engine,
            sink=sink,
            num_done=num_done,
            num_failed=num_failed,
        )
        try:
            batch.run(remaining_lines)
        except Interrupted:
            resume_hint = "--resume goes on" + (
                " from here" if options.output else ", with -o FILE"
            )
            session.console.note(
                f"stopped after {batch.num_done:,} of {len(lines):,} lines; {resume_hint}"
            )
            raise
        engine.close()
        num_done = batch.num_done
        num_failed = batch.num_failed
        seconds = now() - start
        if options.stats:
            rate = f"{batch.num_tokens / seconds:.1f} tok/s"
            write_stderr_line(
                f"{num_done:,} lines · {batch.num_tokens:,} tok · {format_clock(seconds)} · {rate}"
            )
    if num_failed:
        reason = ["Each says why in its `error`; the others are complete."]
        fix = ["jq -c 'select(.error)'"]
        raise PartialError(f"{num_failed:,} of {num_done:,} lines failed", reason=reason, fix=fix)
    return 0


# -- what a line requests ------------------------------------------------------------------------


@dataclass
class Line:
    """One line of the input: its number, JSON value or error, request and answer."""

    number: int
    value: Mapping[str, Any]
    error: SpdError | None = None
    request: Request | None = None
    inside_thinking: bool | None = None
    gathered: RequestOutput | None = None
    answer: Mapping[str, object] | None = None

    @property
    def id(self) -> str | float:
        """The id of the line; its number if it has none."""
        line_id: str | float | None = self.value.get("id")
        return self.number if line_id is None else line_id


def read_lines(name: str) -> list[Line]:
    """Read and parse the lines of a file, or of stdin (-), that are not blank.

    Raises NotFoundError, and UsageError if no line can be one of --jsonl.
    """
    data = read_input(name, "check the path; without -f lines come from stdin", MAX_LINES_BYTES)
    lines = [(n, raw) for n, raw in enumerate(data.split(b"\n"), 1) if raw.strip()]
    source = "stdin" if name == "-" else name
    if not lines:
        fix = """echo '{"prompt": "Hello"}' | spd generate --jsonl"""
        reason = f"{source} is empty."
        raise UsageError("no lines to answer", reason=[reason], fix=[fix], code="no_prompt")
    if not any(raw.lstrip(BLANKS).startswith(b"{") for _, raw in lines):
        convert = "jq -cR 'select(length > 0) | {prompt: .}'"
        command = f"… | {convert}" if name == "-" else f"{convert} {shlex.quote(name)}"
        message = f"--jsonl reads JSON objects, and no line of {source} begins one"
        raise UsageError(message, fix=[f"{command} | spd generate --jsonl"])
    return [_parse_line(n, raw) for n, raw in lines]


def _parse_line(number: int, raw: bytes) -> Line:
    """Return a line with its JSON object, or with the error of an invalid one."""
    error = UsageError(f"longer than {MAX_INPUT_BYTES >> 20} MiB")
    if len(raw) <= MAX_INPUT_BYTES:
        try:
            value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            if not isinstance(value, dict):
                error = UsageError("not a JSON object", fix=['{"prompt": "Hello"}'])
            elif isinstance(value.get("id"), (dict, list)):
                error = UsageError("the line's id is neither a text nor a number")
            else:
                return Line(number, value)
        except (ValueError, RecursionError) as failure:
            error = UsageError(f"not JSON: {failure}")
    return Line(number, {}, error)


def prepare_line_request(
    line: Line, settings: Settings, shared: Prompt, raw: bool
) -> PreparedRequest:
    """Return the request of a line, whose parameters override the flags.

    shared: messages before those of the line, and the template's variables. raw: a prompt is text
    to continue, without a chat template. Raises SpdError and FieldError for an invalid line.
    """
    if line.error is not None:
        raise line.error
    value = parse_line_fields(dict(line.value), "")
    grammar = settings.grammar
    values = value.get("params", {})
    grammar_values = {name: values.pop(name) for name in GRAMMAR_KINDS if name in values}
    if len(grammar_values) > 1:
        names = " and ".join(f"params.{name}" for name in grammar_values)
        raise UsageError(f"{names} each say what the whole reply looks like")
    for name, grammar_value in grammar_values.items():
        text = grammar_value if isinstance(grammar_value, str) else json.dumps(grammar_value)
        grammar = GrammarSpec(GRAMMAR_KINDS[name], text)
    values.setdefault("seed", derived_seed(settings.sampling.params.seed, line.number))
    params = settings.params_with(**values)
    prompt = _line_prompt(value, shared, raw)
    check_token_ids(prompt.ids or (), settings.vocabulary.config.vocab_size, "prompt_ids")
    return settings.prepare_request(str(line.number), prompt, params, grammar)


def _line_prompt(line: Mapping[str, Any], shared: Prompt, raw: bool) -> Prompt:
    """Return the prompt of a line after the shared messages; its system message replaces theirs.

    raw: the prompt is text to continue. Raises UsageError for a line without exactly one prompt.
    """
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
    has_system = turns[0]["role"] == "system"
    if has_system and system is not None:
        raise UsageError("the system message is given twice: `system` and the first of `messages`")
    if system is not None:
        turns = ({"role": "system", "content": check_text(system, "`system`")}, *turns)
    if has_system or system is not None:
        common = (turns[0], *(m for m in common if m["role"] != "system"))
        turns = turns[1:]
    return Prompt(messages=(*common, *turns), variables=shared.variables)


# -- answers and errors --------------------------------------------------------------------------


def resume_output(path: Path, lines: Sequence[Line], sink: Sink) -> tuple[int, int]:
    """Lock the output file and cut off an incomplete last answer; return the numbers of answers.

    These are how many it holds and how many of them failed. Raises UsageError for a file that does
    not match the lines or is being written; such a file is unchanged.
    """
    try:
        sink.open()  # locked from here on
        if not path.is_file():
            raise UsageError(
                f"{path}: cannot be continued", fix=["leave --resume out, or another -o FILE"]
            )
        *complete_lines, partial_line = path.read_bytes().split(b"\n")
        entries = [_parse_line(n, raw).value for n, raw in enumerate(complete_lines, 1)]
        expected_ids = json.loads(
            to_json([(line.number, line.id) for line in lines]).encode("utf-8", "replace")
        )
        mismatches = [
            n
            for n, e in enumerate(entries)
            if [[e.get("line"), e.get("id")]] != expected_ids[n : n + 1]
        ]
        is_answer_start = any(
            partial_line[: len(prefix)] == prefix[: len(partial_line)] for prefix in ANSWER_PREFIXES
        )
        if not is_answer_start:  # an interrupted run leaves the beginning of an answer
            mismatches.append(len(complete_lines))
        if mismatches:
            number = mismatches[0] + 1
            message = f"{path}: line {number} does not answer the input's line {number}"
            raise UsageError(
                message, fix=["give the same input, or another -o FILE"], code="resume"
            )
        os.truncate(path, path.stat().st_size - len(partial_line))
    except OSError as error:
        raise output_error(path, error) from error
    return len(entries), sum("error" in entry for entry in entries)


@dataclass
class LineBatch:
    """Runs the requests of lines, and writes full answer lines in the order of the input."""

    session: Session
    settings: Settings
    shared: Prompt
    raw: bool
    engine: EngineClient
    sink: Sink
    num_done: int
    """Lines answered so far, including those of an earlier run."""
    num_failed: int
    """How many of the answered lines failed."""
    num_tokens: int = 0
    """Tokens of the replies of this run."""
    unwritten: deque[Line] = field(default_factory=deque)
    """Started lines whose answer is not written, in the order of the input."""
    running: dict[str, Line] = field(default_factory=dict)
    """Lines whose requests the engine runs, by request id."""

    def run(self, lines: Sequence[Line]) -> None:
        """Answer the lines and show progress.

        Raises Interrupted between writes, never inside one.
        """
        num_before = self.num_done
        remaining_lines = iter(lines)
        guard = self.session.guard

        def report_shortage(error: SpdError) -> None:
            """Print a note about a lack of memory that ended the running requests."""
            self.session.console.note(f"{error.message}: the lines running at that time failed")

        with Ticker(self.session.console) as ticker:
            for events in drive(
                self.engine.step, lambda: self._start_lines(remaining_lines), report_shortage
            ):
                for event in events:
                    self._collect_event(event)
                has_answer = bool(self.unwritten) and self.unwritten[0].answer is not None
                if self.sink.is_terminal and has_answer:
                    ticker.write("")
                with guard.defer_signals():
                    self._write_answers()
                guard.raise_if_received()
                ticker.show_progress(
                    "answering", self.num_done - num_before, len(lines), "{:,} lines".format
                )

    def _start_lines(self, remaining_lines: Iterator[Line]) -> bool:
        """Start lines while the engine has room; False when all answers are written."""
        max_running = 2 * self.engine.info.slots
        # Answers wait in memory for those before them.
        while len(self.running) < max_running and len(self.unwritten) < 512:
            line = next(remaining_lines, None)
            if line is None:
                break
            self._start_line(line)
        return bool(self.unwritten)

    def _start_line(self, line: Line) -> None:
        """Add the request of a line to the engine, or set its error as the answer."""
        self.unwritten.append(line)
        try:
            request, line.inside_thinking = prepare_line_request(
                line, self.settings, self.shared, self.raw
            )
            self.engine.add(request)
            line.request = request
            line.gathered = RequestOutput()
            self.running[request.id] = line
        except (FieldError, RecursionError) as error:
            refusal = UsageError(
                error.message if isinstance(error, FieldError) else "nested too deep"
            )
            line.answer = _error_answer(line, refusal)
        except EngineError:  # the engine has ended
            raise
        except SpdError as error:
            line.answer = _error_answer(line, error)

    def _collect_event(self, event: Event) -> None:
        """Add an event to its line; set the line's answer when the reply has ended."""
        line = self.running[event.request_id]
        request = line.request
        gathered = line.gathered
        assert request is not None and gathered is not None
        gathered.add(event)
        if event.finish_reason is None:
            return
        del self.running[event.request_id]
        self.num_tokens += len(gathered.token_ids)
        metrics = self.engine.metrics(request.id)
        marks = self.settings.vocabulary.marks
        fields = reply_fields(
            reply=gathered,
            metrics=metrics,
            engine=self.engine,
            request=request,
            inside_thinking=line.inside_thinking,
            marks=marks,
        )
        self.session.note_once(metrics.draft_fault, metrics.draft_note(self.engine.info.spec))
        answer: dict[str, object] = {
            "schema": LINE_SCHEMA,
            "id": line.id,
            "line": line.number,
            **fields,
        }
        failure = reply_failure(gathered, request)
        if failure is not None:
            code = failure.code
            if gathered.finish_reason == "error" and request.grammar is not None:
                code = "grammar"
            answer["error"] = {"code": code, "message": failure.message}
        line.answer = answer

    def _write_answers(self) -> None:
        """Write and count the answers that are next in the order of the input."""
        while self.unwritten:
            answer = self.unwritten[0].answer
            if answer is None:
                break
            self.sink.write(to_json(answer) + "\n")
            self.unwritten.popleft()
            self.num_done += 1
            self.num_failed += "error" in answer


def _error_answer(line: Line, error: SpdError) -> dict[str, object]:
    """Return the JSON object of the output for a line that has no reply."""
    description = {"code": error.code, "message": error.message}
    if error.reason:
        description["reason"] = " ".join(error.reason)
    return {"id": line.id, "line": line.number, "error": description}
