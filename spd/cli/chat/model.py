"""The model of a chat: loaded in the background, and changed for another one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from spd.cli import prompt_input as prompt
from spd.cli.chat.conversation import ChatEncoder
from spd.cli.reply_view import stats_facts
from spd.cli.run_settings import plan_settings
from spd.cli.served import served_engine
from spd.cli.terminal.console import Session
from spd.cli.terminal.plain_text import as_line
from spd.cli.terminal.progress import WORDS, compiling, loading
from spd.cli.terminal.tables import Size, fact_lines
from spd.conversation.notes import thinking_note
from spd.errors import UsageError
from spd.formats.folder import ModelFolder
from spd.runtime.engine.driver import EngineThread
from spd.runtime.plan.config import DRAFTER_OPTIONS, METHODS, split_spec

if TYPE_CHECKING:
    from spd.cli.chat.options import ChatOptions
    from spd.runtime import EngineClient, EngineInfo, Progress, RequestMetrics, SamplingParams

ABANDON_SECONDS = 1.0
"""How long a model that is not wanted any more may take to end its loading; it goes on unseen."""


class ChatModel:
    """Everything that changes when a chat loads another model, or changes how it draws."""

    def __init__(self, options: ChatOptions, session: Session) -> None:
        self._session = session
        self._console = session.console
        self._first = options
        self.metrics: RequestMetrics | None = None
        """Of the last reply."""
        self.thread: EngineThread[EngineClient]
        self._use(options, ModelFolder.resolve(options.model))

    def _use(self, options: ChatOptions, folder: ModelFolder) -> None:
        """Read the small files and check every option. Raises before anything has changed."""
        settings = plan_settings(options, folder)
        variables = prompt.template_variables(options)
        tools = None
        if options.tools is not None:
            from spd.cli.chat.tools import ChatTools

            tools = ChatTools(options.tools, settings.vocabulary)
            variables["tools"] = tools.shown
            for words in tools.notes:
                self._console.note(words)
        self.encoder = ChatEncoder(settings.vocabulary, variables)
        self.tools = tools
        self.options = options
        self.folder = folder
        self.settings = settings
        self.name = options.model
        if (note := thinking_note(options.think, settings.vocabulary)) is not None:
            self._console.note(note)

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
        config = self.settings.config
        served = served_engine(self._session, self.options)

        def build(progress: Progress) -> EngineClient:
            """Return a server's engine, or load one."""
            if served is not None:
                return served
            from spd.runtime import Engine

            with compiling(lambda words: setattr(self, "_doing", words)):
                return Engine(config, progress=progress)

        self._doing = f"loading {as_line(self.name)}"
        self.thread = EngineThread(build, lambda: [self.params(seed=0)])
        self.thread.start()

    def close(self, seconds: float = 5.0) -> bool:
        """Let go of the engine; False if its thread does not come back."""
        return not hasattr(self, "thread") or self.thread.close(seconds)

    def reload(self, stopped: threading.Event, **changes: Any) -> None:
        """Load with changed options, or go back to the old ones, which load in the background.

        Raises what loading raises, and KeyboardInterrupt once `stopped` is set.
        """
        before = self.options
        folder = self.folder
        options = self._with_drafter(dataclasses.replace(before, **changes))
        self._use(
            options, folder if options.model == before.model else ModelFolder.resolve(options.model)
        )
        self.close()
        try:
            self.start()
            self.wait(lambda: not stopped.is_set())
            if stopped.is_set():
                raise KeyboardInterrupt
            self.thread.engine()
        except (Exception, KeyboardInterrupt):
            self.close(ABANDON_SECONDS)
            self._use(before, folder)
            self.start()
            raise

    def _with_drafter(self, options: ChatOptions) -> ChatOptions:
        """Options with the drafter that the chat began with, where its model and the method still take it."""
        method, _ = split_spec(options.spec)
        taken = METHODS[method].weights if options.model == self._first.model else ()
        unused = {"draft_model", "mtp"} - {*taken} if taken else {*DRAFTER_OPTIONS}
        present = [name for name in DRAFTER_OPTIONS if hasattr(options, name)]
        changes: dict[str, Any] = dict.fromkeys(present)
        changes |= {name: getattr(self._first, name) for name in present if name not in unused}
        if method == "off":
            changes |= {"adaptive": None, "draft_max": None}
        return dataclasses.replace(options, **changes)

    def wait(self, go_on: Callable[[], bool]) -> None:
        """Show how far loading is until it has ended, or `go_on` says no."""
        if self.thread.ready.is_set():
            return
        with loading(self._doing, self._console) as display:
            while not self.thread.ready.wait(0.1) and go_on():
                if self.thread.progress is not None:
                    display(self.thread.progress)

    # -- what is said about it -----------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What runs, once it is loaded. Raises what loading raised."""
        return self.thread.engine().info

    def spec_words(self) -> str:
        """What proposes tokens, and how many."""
        info = self.info
        most = "" if info.spec == "off" else f", up to {info.draft_max}"
        return f"spec {info.spec}{most}{', adaptive' if info.adaptive and most else ''}"

    def loading_words(self) -> str:
        """How far loading is; nothing once it has ended. Raises what ended it."""
        if self.thread.ready.is_set():
            self.thread.engine()
            return ""
        if (progress := self.thread.progress) is not None and progress.total:
            done = f"{WORDS[progress.phase]} {100 * progress.done // progress.total}%"
            self._doing = f"loading {as_line(self.name)} · {done}"
        return self._doing

    def last_stats(self) -> Iterator[str]:
        """Return what was counted for the last reply. Raises UsageError."""
        if self.metrics is None:
            raise UsageError("there is no reply yet", fix=["type a message"])
        return fact_lines(stats_facts(self.metrics, self.info))

    def sampling_lines(self) -> Iterator[str]:
        """How it draws, and where each value comes from."""
        words = self.settings.sampling.describe()
        del words["seed"], words["logprobs"]  # each reply has its own seed, and shows no others
        return fact_lines(words)

    def lines(self) -> Iterator[str]:
        """The model, what drafts for it, and the memory they take."""
        plan = self.info.plan
        shown = ("model", "spec", "draft_max", "spec_reason", "device", "weights", "ctx")
        sizes = ("weight_bytes", "draft_weight_bytes", "cache_bytes")
        facts = {name: plan[name] for name in shown}
        return fact_lines(facts | {name: Size(plan[name]) for name in sizes})
