"""The model of a chat: its small files, its engine in a thread, how it draws, and what is said about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from spd.cli.chat.conversation import ChatEncoder
from spd.cli.text.job import plan_settings
from spd.cli.text.output import Size, as_line, fact_lines
from spd.cli.text.progress import WORDS, loading
from spd.cli.text.prompt import template_variables
from spd.cli.text.reply import stats_line
from spd.cli.text.structured import note_thinking
from spd.errors import UsageError
from spd.runtime.engine.driver import EngineThread
from spd.runtime.plan.config import METHODS, WEIGHT_WISHES, split_spec

if TYPE_CHECKING:
    from spd.cli.commands.chat import ChatOptions
    from spd.cli.text.output import Session
    from spd.formats.folder import ModelFolder
    from spd.runtime import EnginePlan, Progress, RequestMetrics, SamplingParams

LEAVE_SECONDS = 5.0
"""For which the engine's thread is waited for at the end."""


class ChatModel:
    """Everything that changes when a chat loads another model, or changes how it draws."""

    def __init__(self, options: ChatOptions, session: Session) -> None:
        from spd.formats.folder import ModelFolder

        self._session, self._console, self._first = session, session.console, options
        self.metrics: RequestMetrics | None = None
        """Of the last reply."""
        self.thread: EngineThread
        self._use(options, ModelFolder.named(options.model))

    def _use(self, options: ChatOptions, folder: ModelFolder) -> None:
        """Read the small files and check every option. Raises before anything has changed."""
        settings = plan_settings(options, folder)
        variables, tools = template_variables(options), None
        if options.tools is not None:
            from spd.cli.chat.tools import ChatTools

            tools = ChatTools(options.tools, settings.vocabulary)
            variables["tools"] = tools.shown
        self.encoder, self.tools = ChatEncoder(settings.vocabulary, variables), tools
        self.options, self.folder, self.settings, self.name = options, folder, settings, options.model
        note_thinking(self._console, options.think, settings.vocabulary)

    @property
    def fingerprint(self) -> str:
        """What tells whether saved token ids are this model's."""
        return self.settings.vocabulary.need_tokenizer().fingerprint

    def change(self, **changes: Any) -> None:
        """Change options that are not the engine's. Raises UsageError, and changes nothing then."""
        self._use(dataclasses.replace(self.options, **changes), self.folder)

    def params(self, seed: int) -> SamplingParams:
        """Sampling parameters with a reply's own seed."""
        return dataclasses.replace(self.settings.sampling.params, seed=seed)

    # -- the engine ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load in the background, unless a server has the engine."""
        from spd.cli.serve.local import served_engine

        config, served = self.settings.config, served_engine(self._session, self.options)

        def build(progress: Progress) -> Any:
            if served is not None:
                return served
            from spd.runtime import Engine

            return Engine(config, progress=progress)

        self.thread = EngineThread(build, lambda: [self.params(seed=0)])
        self.thread.start()

    def close(self) -> bool:
        """Let go of the engine; False if its thread does not come back."""
        return not hasattr(self, "thread") or self.thread.close(LEAVE_SECONDS)

    def reload(self, **changes: Any) -> None:
        """Load with changed options, or go back to the old ones if that fails."""
        from spd.formats.folder import ModelFolder

        before, options = self.options, self._with_drafter(dataclasses.replace(self.options, **changes))
        folder = self.folder
        self._use(options, folder if options.model == before.model else ModelFolder.named(options.model))
        self.close()
        self.start()
        try:
            self.wait(lambda: True)
            self.thread.engine()
        except Exception:
            self._use(before, folder)
            self.start()
            raise

    def _with_drafter(self, options: ChatOptions) -> ChatOptions:
        """Options with the drafter that the chat began with, where its model and the method still take it."""
        method, _ = split_spec(options.spec)
        taken = METHODS[method].weights if options.model == self._first.model else ()
        unused = {"draft_model", "mtp"} - {*taken} if taken else {*WEIGHT_WISHES}
        wishes = [name for name in WEIGHT_WISHES if hasattr(options, name)]
        changes: dict[str, Any] = dict.fromkeys(wishes)
        changes |= {name: getattr(self._first, name) for name in wishes if name not in unused}
        if method == "off":
            changes |= {"adaptive": None, "draft_max": None}
        return dataclasses.replace(options, **changes)

    def wait(self, go_on: Callable[[], bool]) -> None:
        """Show how far loading is until it has ended, or `go_on` says no."""
        if self.thread.ready.is_set():
            return
        with loading(f"loading {self.name}", self._console) as display:
            while not self.thread.ready.wait(0.1) and go_on():
                if self.thread.progress is not None:
                    display(self.thread.progress)

    # -- what is said about it -----------------------------------------------------------------------

    @property
    def plan(self) -> EnginePlan:
        """What runs, once it is loaded. Raises what loading raised."""
        return self.thread.engine().plan

    def spec_words(self) -> str:
        """What proposes tokens, and how many."""
        plan = self.plan
        most = "" if plan.spec == "off" else f", up to {plan.shape.draft_max}"
        return f"spec {plan.spec}{most}{', adaptive' if plan.adaptive and most else ''}"

    def loading_words(self) -> str:
        """How far loading is; nothing once it has ended. Raises what ended it."""
        if self.thread.ready.is_set():
            self.thread.engine()
            return ""
        progress, words = self.thread.progress, f"loading {as_line(self.name)}"
        if progress is None or not progress.total:
            return words
        return f"{words} · {WORDS[progress.phase]} {100 * progress.done // progress.total}%"

    def stats_words(self) -> str:
        """The figures of the last reply on one line."""
        assert self.metrics is not None
        return stats_line(dataclasses.replace(self.metrics, load_ms=0.0))

    def last_stats(self) -> Iterator[str]:
        """What was counted for the last reply, as `spd generate --json` calls it. Raises UsageError."""
        metrics = self.metrics
        if metrics is None:
            raise UsageError("there is no reply yet", fix=["type a message"])
        return fact_lines(
            metrics.timings() | metrics.speculative_decoding(self.plan.spec, self.plan.shape.draft_max)
        )

    def sampling_lines(self) -> Iterator[str]:
        """How it draws, and where each value comes from."""
        words = self.settings.sampling.words()
        del words["seed"], words["logprobs"]  # each reply has its own seed, and shows no others
        return fact_lines(words)

    def lines(self) -> Iterator[str]:
        """The model, what drafts for it, and the memory they take."""
        plan = self.plan.as_dict()
        shown = ("model", "spec", "draft_max", "spec_reason", "device", "weights", "ctx")
        sizes = ("weight_bytes", "draft_weight_bytes", "cache_bytes")
        return fact_lines({name: plan[name] for name in shown} | {name: Size(plan[name]) for name in sizes})
