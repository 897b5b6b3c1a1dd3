"""The model of a chat: its small files, its engine in a thread, how it draws, and what is said about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.chat.conversation import ChatEncoder
from spd.cli.text.job import engine_config, open_vocabulary
from spd.cli.text.output import Console
from spd.cli.text.progress import WORDS, loading
from spd.cli.text.prompt import template_variables
from spd.cli.text.report import stats_line
from spd.cli.text.sampling import Resolved, resolve_sampling
from spd.cli.text.structured import note_thinking, thinking_budget
from spd.errors import UsageError
from spd.runtime.engine.driver import EngineThread
from spd.runtime.plan.config import METHODS, WEIGHT_WISHES, split_spec

if TYPE_CHECKING:
    from spd.cli.commands.chat import ChatOptions
    from spd.runtime import Engine, EngineConfig, Event, Progress, Request, RequestMetrics, SamplingParams

LEAVE_SECONDS = 5.0
"""For which the engine's thread is waited for at the end."""


class ChatModel:
    """Everything that changes when a chat loads another model or another speculation."""

    def __init__(self, options: ChatOptions, console: Console) -> None:
        self._console = console
        self._requests = 0
        self.metrics: RequestMetrics | None = None
        self.thread: EngineThread
        self._first = options
        self._prepare(options)

    def _prepare(self, options: ChatOptions) -> None:
        """Read the small files and check every option. Raises before anything has changed."""
        from spd.formats.folder import ModelFolder
        from spd.formats.hub import DEMO

        name = options.model or DEMO
        folder = ModelFolder.named(name)
        config: EngineConfig = engine_config(options, folder)
        vocabulary = open_vocabulary(name, folder)
        encoder = ChatEncoder(vocabulary, template_variables(options))
        generation = folder.generation
        usable = min(vocabulary.need_tokenizer().vocab_size, vocabulary.config.vocab_size)
        sampling = resolve_sampling(options, generation, usable)
        thinking_budget(options.think, vocabulary, False)
        note_thinking(self._console, options.think, vocabulary)
        self.options, self.name, self.config, self.vocabulary = options, name, config, vocabulary
        self.encoder, self._generation, self._usable, self.sampling = encoder, generation, usable, sampling

    @property
    def fingerprint(self) -> str:
        """What tells whether saved token ids are this model's."""
        return self.vocabulary.need_tokenizer().fingerprint()

    # -- the engine ------------------------------------------------------------------------------

    def start(self, on_ready: Callable[[], None]) -> None:
        """Begin to load in the background."""
        config = self.config

        def build(progress: Progress) -> Engine:
            from spd.runtime import Engine

            return Engine(config, progress=progress)

        self.thread = EngineThread(build, lambda: [self.params(seed=0)], on_ready, goes_on=True)
        self.thread.start()

    def close(self) -> bool:
        """Let go of the engine; False if its thread does not come back."""
        return not hasattr(self, "thread") or self.thread.close(LEAVE_SECONDS)

    def reload(self, changes: dict[str, Any], on_ready: Callable[[], None]) -> None:
        """Load with changed options, and with the old ones again if that fails."""
        before = self.options
        self._prepare(self._with_drafter(dataclasses.replace(before, **changes)))
        self.thread.close(LEAVE_SECONDS)
        try:
            self._load_now(on_ready)
        except Exception:
            self._prepare(before)
            self._load_now(on_ready)
            raise

    def _with_drafter(self, options: ChatOptions) -> ChatOptions:
        """Options with the drafter that the chat began with, where its model and the method still take it."""
        method, _ = split_spec(options.spec)
        weights = METHODS[method].weights
        taken = [*(weights if options.model == self._first.model else ())]
        taken += ["draft_tp"] if weights else []
        kept: dict[str, Any] = dict.fromkeys(WEIGHT_WISHES)
        kept |= {name: getattr(self._first, name) for name in taken}
        if method == "off":
            kept |= {"adaptive": None, "draft_max": None}
        return dataclasses.replace(options, **kept)

    def _load_now(self, on_ready: Callable[[], None]) -> None:
        self.start(lambda: None)
        with loading(f"loading {self.name}", self._console) as display:
            while not self.thread.ready.wait(0.1):
                if display is not None and self.thread.progress is not None:
                    display(self.thread.progress)
        self.thread.engine()
        on_ready()

    def run(self, request: Request) -> Iterator[Event]:
        """Decode a request; its counters are kept for the figures afterwards."""
        try:
            yield from self.thread.run(request)
        finally:
            self.metrics = self.thread.metrics(request.id)

    def next_request_id(self) -> str:
        """An id that no earlier request had."""
        self._requests += 1
        return f"reply {self._requests}"

    # -- how it draws ------------------------------------------------------------------------------

    def set_thinking(self, think: str) -> None:
        """Think from now on as --think says. Raises IncompatibleError and UsageError."""
        thinking_budget(think, self.vocabulary, False)
        self.options = dataclasses.replace(self.options, think=think)
        self.encoder.variables = template_variables(self.options)
        note_thinking(self._console, think, self.vocabulary)

    def params(self, seed: int) -> SamplingParams:
        """Sampling parameters with a reply's own seed."""
        return dataclasses.replace(self.sampling.params, seed=seed)

    def set_sampling(self, changes: dict[str, Any]) -> None:
        """Change sampling options. Raises UsageError, and changes nothing then."""
        options = dataclasses.replace(self.options, **changes)
        sampling: Resolved = resolve_sampling(options, self._generation, self._usable)
        self.options, self.sampling = options, sampling

    # -- what is said about it -----------------------------------------------------------------------

    @property
    def context(self) -> int:
        """Tokens of context that the engine has."""
        context: int = self.thread.engine().plan.shape.ctx
        return context

    @property
    def used(self) -> int:
        """Tokens of context that the last reply left in use."""
        return 0 if self.metrics is None else self.metrics.prompt_tokens + self.metrics.completion_tokens

    @property
    def is_loaded(self) -> bool:
        """Whether the engine is there."""
        return self.thread.ready.is_set() and self.thread.failure is None

    def loading_words(self) -> str:
        """How far loading is."""
        progress = self.thread.progress
        if progress is None or not progress.total:
            return f"loading {self.name}"
        return f"loading {self.name} · {WORDS[progress.phase]} {100 * progress.done // progress.total}%"

    def spec_words(self) -> str:
        """What proposes tokens, and how many."""
        plan = self.thread.engine().plan
        if plan.spec == "off":
            return "spec off"
        return f"spec {plan.spec}, up to {plan.shape.draft_max}{', adaptive' if plan.adaptive else ''}"

    def context_words(self) -> str:
        """How much of the context is used."""
        return f"{self.used:,}/{self.context:,}"

    def plan_lines(self) -> Sequence[str]:
        """What runs, said once when it is loaded."""
        from spd.runtime.plan.memory import show_size

        plan = self.thread.engine().plan
        sizes = {
            "weights": plan.need.weights,
            "draft": plan.need.draft_weights,
            "caches": plan.need.caches,
        }
        parts = " + ".join(f"{name} {show_size(size)}" for name, size in sizes.items() if size)
        return [
            f"spec  {self.spec_words().removeprefix('spec ')} ({plan.drafter.reason})",
            f"mem   {parts} · {plan.weight_words()} on {plan.device} · ctx {plan.shape.ctx:,}",
        ]

    def stats_words(self) -> str:
        """The figures of the last reply on one line."""
        assert self.metrics is not None
        line = stats_line(dataclasses.replace(self.metrics, load_ms=0.0))
        return f"{line} · ctx {self.context_words()}"

    def full_stats(self) -> Sequence[str]:
        """Everything that was counted for the last reply. Raises UsageError before the first."""
        metrics = self.metrics
        if metrics is None:
            raise UsageError("there is no reply yet", fix=["type a message"])
        new = metrics.prompt_tokens - metrics.cached_tokens
        lines = [
            f"  prompt      {metrics.prompt_tokens:,} tok ({metrics.cached_tokens:,} cached, {new:,} new)"
            f" · {metrics.prompt_ms / 1000:.2f} s · {_rate(new, metrics.prompt_ms)} tok/s new",
            f"  decode      {metrics.completion_tokens:,} tok in {metrics.rounds:,} rounds"
            f" · {metrics.predicted_ms / 1000:.2f} s · {metrics.decode_tokens_per_second:.1f} tok/s",
            f"  drafts      {metrics.draft_n:,} proposed · {metrics.draft_n_accepted:,} accepted"
            f" · {metrics.draft_acceptance_rate:.1%}"
            + (f" · k: mean {metrics.draft_n / metrics.rounds:.1f}" if metrics.rounds else ""),
        ]
        if metrics.rounds and metrics.accepted_per_position:
            shares = (
                f"{i}: {n / metrics.rounds:.0%}" for i, n in enumerate(metrics.accepted_per_position, 1)
            )
            lines.append(f"  by position {'  '.join(shares)}")
            rows = (f"{i}: {n / metrics.rounds:.0%}" for i, n in enumerate(metrics.acceptance_histogram))
            lines.append(f"  by rounds   {'  '.join(rows)}   (accepted drafts: share of rounds)")
        plain, speed = self.thread.engine().plain_round_seconds, metrics.decode_tokens_per_second
        if plain and speed and metrics.draft_n:
            lines.append(
                f"  plain est.  {1 / plain:.1f} tok/s, so this was {speed * plain:.2f} × plain "
                "(from rounds without drafts)"
            )
        return lines

    def shown(self, what: Literal["params", "spec", "model"]) -> Sequence[str]:
        """What /set, /spec and /model show."""
        if what == "params":
            values = dataclasses.asdict(self.sampling.params)
            sources = self.sampling.sources
            del values["seed"], values["logprobs"]  # each reply has its own seed, and shows no others
            return [
                f"  {name:<20} {value}" + (f"  ({sources[name]})" if name in sources else "")
                for name, value in values.items()
            ]
        if what == "spec":
            return [f"  {self.plan_lines()[0]}"]
        plan = self.thread.engine().plan
        return [f"  model {self.name}", f"  from  {plan.model}", *(f"  {li}" for li in self.plan_lines())]


def _rate(count: int, ms: float) -> str:
    return f"{1000 * count / ms:.0f}" if ms else "?"
