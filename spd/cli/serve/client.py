"""`spd generate` through a server that runs already: the same bytes, without loading, and without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spd import errors
from spd.cli.chat.view import Thoughts
from spd.cli.options import GenerateOptions, Session
from spd.cli.serve.local import ANSWER_SECONDS, Line, identity, runtime_folder, sockets
from spd.cli.text.output import Sink, tell
from spd.errors import EngineError, SpdError
from spd.runtime.engine.request import Event

if TYPE_CHECKING:
    from spd.cli.text.reply import Delivery

ABORT_SECONDS = 5.0
SENT = (
    *("model", "temperature", "max_tokens", "seed", "top_p", "stop", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "stop_token_id", "ignore_eos"),
    *("logprobs", "think", "verbose", "quiet"),
)
"""Options that go with a prompt; the engine's are in its identity."""


def find_server(session: Session, options: GenerateOptions) -> Line | None:
    """A connection to a server whose engine is the one that these options ask for; None where none runs."""
    if options.no_server or options.trace is not None or options.dry_run or options.jsonl:
        return None
    folder = runtime_folder(session.runtime_folder)
    if folder is None or not sockets(folder):
        return None
    from spd.cli.text.job import engine_config
    from spd.formats.folder import ModelFolder

    model = ModelFolder.named(options.model)
    made_of: dict[str, Any] | None = None
    for path in sockets(folder, model):
        made_of = made_of or identity(engine_config(options, model))
        with suppress(OSError, EngineError):
            line = Line(path)
            line.send({"do": "ask", "made_of": made_of})
            said = line.receive(ANSWER_SECONDS)
            if "yes" in said:
                session.console.detail(f"server  {said['yes']}")
                return line
            line.close()
            session.console.detail(f"server  {path}: not used: {said.get('no')}")
    return None


class WarmEngine:
    """As much of an engine as a reply's delivery asks for, over a connection."""

    tokenizer = True  # a server has one

    def __init__(self, line: Line, order: dict[str, Any]) -> None:
        self._line = line
        line.send(order)
        self.begun = line.receive()
        _raise_refusal(self.begun)
        self.end: dict[str, Any] = {}
        self._aborted = False

    def add(self, request: Any) -> None:
        """The request is on its way already."""

    @property
    def has_work(self) -> bool:
        """Whether the end has not come."""
        return not self.end

    def abort(self, request_id: str) -> None:
        """Have it ended within a round."""
        self._aborted = True
        self._line.send({"do": "abort"})

    def step(self) -> list[Event]:
        """What comes next; after `abort` all that does."""
        events: list[Event] = []
        while not self.end:
            message = self._line.receive(ABORT_SECONDS if self._aborted else None)
            if "text" not in message:
                self.end = message
                events.append(Event("", (), "", message["finish_reason"], error=message["error"]))
                break
            events.append(Event("", (), message["text"]))
            if not self._aborted:
                break
        return events


def generate_warm(session: Session, options: GenerateOptions, sink: Sink, line: Line) -> int:
    """Answer one prompt through a server; returns the exit status."""
    from spd.cli.text.prompt import gather
    from spd.cli.text.reply import Delivery
    from spd.cli.text.structured import read_grammar

    with closing(line):
        grammar = read_grammar(options)
        order = {
            "do": "generate",
            "options": {name: getattr(options, name) for name in SENT},
            "asked": dataclasses.asdict(gather(options)),
            "grammar": None if grammar is None else dataclasses.asdict(grammar),
        }
        engine: Any = WarmEngine(line, order)
        for kind, text in engine.begun["said"]:
            say: Callable[[str], None] = session.console.note if kind == "note" else session.console.detail
            say(text)
        thoughts = Thoughts(session.console, hidden=options.think == "hide")
        request: Any = SimpleNamespace(id="")
        inside = engine.begun["inside"]
        delivery = Delivery(sink, engine, request, inside, thoughts, streaming=not options.json)
        from spd.cli.commands.generate import deliver, outcome

        deliver(session, options, delivery, lambda: _finish(session, options, delivery, engine.end))
        return outcome(session, options, delivery.reply, grammar is not None)


def _finish(session: Session, options: GenerateOptions, delivery: Delivery, end: dict[str, Any]) -> None:
    """Print what remains to be printed, in the server's words."""
    if not options.json:
        delivery.finish_text()
    elif end:
        delivery.sink.write(end["json"] + "\n")
    if early := end.get("early"):
        session.console.note(early)
    if options.stats and end:
        tell(end["stats"])


def _raise_refusal(message: dict[str, Any]) -> None:
    """Raise here what the server refused a prompt with."""
    if name := message.get("refused"):
        kind = getattr(errors, name, SpdError)
        fields = {field: message[field] for field in ("reason", "fix", "code")}
        raise kind(message["message"], **fields)
