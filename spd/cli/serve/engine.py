"""A server's engine in the place of one that is loaded here: a reply is the same bytes without loading.

No torch here, nor anything else that takes time to import.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from spd.cli.serve.local import Line, identity, servers
from spd.errors import NotFoundError
from spd.formats.folder import ModelFolder
from spd.runtime import RequestMetrics
from spd.runtime.engine.request import Event, GrammarText, Request, ThinkingBudget, TokenLogprob
from spd.runtime.round.sampling_params import SamplingParams

if TYPE_CHECKING:
    from spd.cli.options import GenerateOptions, ReplyOptions
    from spd.cli.text.output import Console, Session

STEP_SECONDS, ABORT_SECONDS = 0.05, 5.0
"""For which a step waits for an event, and for the end of what was aborted."""


def served_engine(session: Session, options: ReplyOptions, slots: int = 1) -> Any:
    """The engine of a server that has the one which these options ask for; None where none runs."""
    if options.no_server or not session.runtime_folder.exists():
        return None
    from spd.cli.text.job import engine_config

    named, made_of = (options.model, options.draft_model, options.mtp), dict[str, Any]()
    try:
        model, *_ = [ModelFolder.named(name) for name in named if name is not None]
    except NotFoundError:
        return None  # and none serves it
    for line, said in servers(session, model):
        made_of = made_of or identity(engine_config(options, model))
        other = [name for name, value in said["made_of"].items() if made_of.get(name) != value]
        why = said["refuses"] or (f"another {', '.join(other)}" if other else None)
        if slots > said["slots"]:
            why = why or f"it decodes {said['slots']} together"
        session.console.detail(f"server  {said['url']}" + (f": not used: {why}" if why else ""))
        if why is None:
            return ServedEngine(line, model, {**said["plan"], "slots": slots})
        line.close()
    return None


class ServedEngine:
    """What the command line uses of an engine: requests go and events come over a connection."""

    load_ms = 0.0

    def __init__(self, line: Line, model: ModelFolder, plan: dict[str, Any]) -> None:
        self._line, self._model = line, model
        self.plan: Any = SimpleNamespace(**plan, as_dict=lambda: plan)
        self.plan.shape = self.plan.wishes = self.plan
        """As `EnginePlan`, as far as it is asked."""
        line.send(do="attach")
        self._running: set[str] = set()
        self._aborting = False
        self._events: list[Event] = []
        self._metrics: dict[str, RequestMetrics] = {}

    @property
    def tokenizer(self) -> ServedEngine:
        """What names tokens: itself, for few replies ask for it."""
        return self

    def token_bytes(self, token_id: int) -> bytes:
        """As `Tokenizer.token_bytes`."""
        tokenizer = self._model.tokenizer
        return b"" if tokenizer is None else tokenizer.token_bytes(token_id)

    def prepare(self, console: Console, options: GenerateOptions) -> tuple[Request, bool | None]:
        """The request for one prompt, which the server encodes; says what `spd generate` says before."""
        from spd.cli.text.prompt import gather
        from spd.cli.text.structured import read_grammar

        grammar, asked = read_grammar(options), dataclasses.asdict(gather(options))
        held = None if grammar is None else dataclasses.asdict(grammar)
        self._line.send(do="prepare", options=vars(options), asked=asked, grammar=held)
        begun = self._line.receive()
        for kind, text in begun["said"]:
            getattr(console, kind)(text)
        return read_request(begun["request"]), begun["inside"]

    def add(self, request: Request) -> None:
        """Begin a request. Raises what the server refuses it with."""
        self._line.send(do="add", request=dataclasses.asdict(request))
        while self._take(self._line.receive()):
            pass
        self._running.add(request.id)

    def abort(self, request_id: str) -> None:
        """Have a request ended within a round, if it runs."""
        if request_id in self._running:
            self._line.send(do="abort", id=request_id)
            self._aborting = True

    def capture_ahead(self, *params: Any, **wishes: Any) -> int:
        """Nothing: the server does so while it is idle."""
        return 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._running or self._events)

    def step(self) -> list[Event]:
        """What has come, or comes within a moment; after `abort` an end is waited for."""
        seconds = ABORT_SECONDS if self._aborting else STEP_SECONDS
        while self._running and self._line.pending(seconds if self._aborting or not self._events else 0.0):
            self._take(self._line.receive())
        events, self._events = self._events, []
        return events

    def _take(self, message: dict[str, Any]) -> bool:
        """Keep an event; False for a message that is none."""
        if "event" not in message:
            return False
        name, ids, text, reason, drafted, logprobs, error = message["event"]
        listed = (TokenLogprob(token, logprob, tuple(map(tuple, top))) for token, logprob, top in logprobs)
        self._events.append(Event(name, tuple(ids), text, reason, tuple(drafted), tuple(listed), error))
        if reason is not None:
            self._running.discard(name)
            self._aborting = False
            outcomes = {(drafts, accepted): times for drafts, accepted, times in message["outcomes"]}
            self._metrics[name] = RequestMetrics(**message["metrics"], outcomes=outcomes)
        return True

    def metrics(self, request_id: str) -> RequestMetrics:
        """Counters of a request that has ended. Raises KeyError for another."""
        return self._metrics[request_id]

    def close(self) -> None:
        """Hang up; the server ends what still runs."""
        self._line.close()


def read_request(said: dict[str, Any]) -> Request:
    """A request from the JSON of its fields. Raises what its parts refuse."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    fields = {name: tuples(value) for name, value in said.items()}
    parts = {"params": SamplingParams, "grammar": GrammarText, "thinking": ThinkingBudget}
    for name, kind in parts.items():
        if fields[name] is not None:
            fields[name] = kind(**{field: tuples(value) for field, value in fields[name].items()})
    return Request(**fields)
