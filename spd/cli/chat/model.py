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
from spd.cli.terminal.progress import PHASE_LABELS, compiling, loading
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
"""How long to wait for the thread of an abandoned model; after that it ends in the background."""


class ChatModel:
    """The model of a chat with its options, settings, tools and engine; all may be replaced."""

    def __init__(self, options: ChatOptions, session: Session) -> None:
        self._session = session
        self._console = session.console
        self._initial_options = options
        self.metrics: RequestMetrics | None = None
        """The metrics of the last reply."""
        self.reply_info: EngineInfo | None = None
        """The description of the engine that gave it: `/spec` may have loaded another since."""
        self.thread: EngineThread[EngineClient]
        self._apply_options(options, ModelFolder.resolve(options.model))

    def _apply_options(self, options: ChatOptions, folder: ModelFolder) -> None:
        """Check the options against the model's small files, set the fields, and print notes.

        Raises what reading and checking raise, before any field changes.
        """
        settings = plan_settings(options, folder)
        variables = prompt.template_variables(options)
        tools = None
        if options.tools is not None:
            from spd.cli.chat.tools import ChatTools

            tools = ChatTools(options.tools, settings.vocabulary)
            variables["tools"] = tools.definitions
            for tool_note in tools.notes:
                self._console.note(tool_note)
        self.encoder = ChatEncoder(settings.vocabulary, variables)
        self.tools = tools
        self.options = options
        self.folder = folder
        self.settings = settings
        self.name = options.model
        note = thinking_note(options.think, settings.vocabulary)
        if note is not None:
            self._console.note(note)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer: saved token ids of another one are not reused."""
        return self.settings.vocabulary.need_tokenizer().fingerprint

    def update_options(self, options: ChatOptions) -> None:
        """Set options that need no other engine, such as sampling, and print notes.

        Raises what checking them raises, and changes nothing then.
        """
        self._apply_options(options, self.folder)

    def sampling_params(self, seed: int) -> SamplingParams:
        """Return the chat's sampling parameters with the seed of a reply."""
        return dataclasses.replace(self.settings.sampling.params, seed=seed)

    # -- the engine ------------------------------------------------------------------------------

    def start_loading(self) -> None:
        """Set `thread` and start it: it loads the engine, or takes that of a running server."""
        config = self.settings.config
        served_by = served_engine(self._session, self.options)

        def build(progress: Progress) -> EngineClient:
            """Return the server's engine, or load one."""
            if served_by is not None:
                return served_by
            from spd.runtime import Engine

            with compiling(self._set_loading_label):
                return Engine(config, progress=progress)

        self._loading_label = f"loading {as_line(self.name)}"
        self.thread = EngineThread(build, lambda: [self.sampling_params(seed=0)])
        self.thread.start()

    def _set_loading_label(self, text: str) -> None:
        """Set the text that stands for loading, such as the progress of compiling kernels."""
        self._loading_label = text

    def close(self, seconds: float = 5.0) -> bool:
        """Close the engine if there is one; False if its thread does not end within `seconds`."""
        return not hasattr(self, "thread") or self.thread.close(seconds)

    def reload(self, stopped: threading.Event, new_options: ChatOptions) -> None:
        """Close the engine and load one with other options, or for another model; show its progress.

        The drafter given at the start is used where model and method allow it, else dropped. Options
        that are refused change nothing. If loading fails, the old options are restored, and their
        engine loads in the background. Raises what checking and loading raise, and KeyboardInterrupt
        once `stopped` is set.
        """
        previous_options = self.options
        folder = self.folder
        options = self._with_initial_drafter(new_options)
        self._apply_options(
            options,
            folder
            if options.model == previous_options.model
            else ModelFolder.resolve(options.model),
        )
        self.close()
        try:
            self.start_loading()
            self.wait_until_loaded(lambda: not stopped.is_set())
            if stopped.is_set():
                raise KeyboardInterrupt
            self.thread.engine()
        except (Exception, KeyboardInterrupt):
            self.close(ABANDON_SECONDS)
            self._apply_options(previous_options, folder)
            self.start_loading()
            raise

    def _with_initial_drafter(self, options: ChatOptions) -> ChatOptions:
        """Return the options with the initial drafter if model and method support it, else without.

        Without drafting, how many tokens to draft is left open too.
        """
        from spd.runtime import takes_draft_model

        method, _ = split_spec(options.spec)
        initial_options = self._initial_options
        weight_options = [name for name in DRAFTER_OPTIONS if hasattr(options, name)]
        changes: dict[str, Any] = dict.fromkeys(weight_options)
        if METHODS[method].has_weights and options.model == initial_options.model:
            changes = {name: getattr(initial_options, name) for name in weight_options}
            draft = initial_options.draft_model
            if draft is not None and not takes_draft_model(method, ModelFolder.resolve(draft)):
                changes["draft_model"] = None
        if method == "off":
            changes |= {"adaptive": None, "draft_max": None}
        return dataclasses.replace(options, **changes)

    def wait_until_loaded(self, should_wait: Callable[[], bool]) -> None:
        """Show the progress of loading until it has ended, or `should_wait` returns False."""
        if self.thread.ready.is_set():
            return
        with loading(self._loading_label, self._console) as display:
            while not self.thread.ready.wait(0.1) and should_wait():
                if self.thread.progress is not None:
                    display(self.thread.progress)

    # -- texts about the model -----------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """The description of the loaded engine. Raises what loading raised."""
        return self.thread.engine().info

    def spec_text(self) -> str:
        """Return as text the proposer, its most drafts a round, and if that number adapts."""
        info = self.info
        limit_text = "" if info.spec == "off" else f", up to {info.draft_max}"
        return f"spec {info.spec}{limit_text}{', adaptive' if info.adaptive and limit_text else ''}"

    def loading_text(self) -> str:
        """Return the progress of loading as text, empty once it has ended.

        Raises what loading raised.
        """
        if self.thread.ready.is_set():
            self.thread.engine()
            return ""
        progress = self.thread.progress
        if progress is not None and progress.total:
            progress_text = (
                f"{PHASE_LABELS[progress.phase]} {100 * progress.done // progress.total}%"
            )
            self._loading_label = f"loading {as_line(self.name)} · {progress_text}"
        return self._loading_label

    def last_stats_lines(self) -> Iterator[str]:
        """Return lines of statistics of the last reply. Raises UsageError if there is none."""
        if self.metrics is None or self.reply_info is None:
            raise UsageError("there is no reply yet", fix=["type a message"])
        return fact_lines(stats_facts(self.metrics, self.reply_info))

    def sampling_lines(self) -> Iterator[str]:
        """Return lines of the sampling parameters and where each value comes from."""
        parameters = self.settings.sampling.describe()
        # A seed belongs to a reply, and a chat shows no logprobs.
        del parameters["seed"], parameters["logprobs"]
        return fact_lines(parameters)

    def summary_lines(self) -> Iterator[str]:
        """Return lines about the model, its drafter, and the memory they take."""
        plan = self.info.plan
        field_names = ("spec", "draft_max", "spec_reason", "device", "weights", "ctx")
        size_names = ("weight_bytes", "draft_weight_bytes", "cache_bytes")
        facts = {"model": self.name} | {name: plan[name] for name in field_names}
        return fact_lines(facts | {name: Size(plan[name]) for name in size_names})
