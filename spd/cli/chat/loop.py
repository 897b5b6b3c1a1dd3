"""A conversation, saved as it goes, each turn continuing the cache of the one before.

On a terminal with line editing, Markdown and a line of figures; elsewhere plain lines in, plain text out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spd.cli.options import Session
from spd.cli.text.output import (
    OutputClosed,
    Sink,
    as_line,
    paint,
    terminal_size,
    write_error,
    write_stderr,
)
from spd.cli.text.wrap import cells, fit_lines
from spd.errors import SpdError, UsageError

if TYPE_CHECKING:
    from spd.cli.chat.conversation import Conversation
    from spd.cli.chat.message_source import MessageSource
    from spd.cli.chat.model import ChatModel
    from spd.cli.chat.sessions import SessionStore
    from spd.cli.chat.view import Look
    from spd.cli.commands.chat import ChatOptions

FULL_SHARE = 0.8
"""Share of the context above which a chat says that it fills up."""


class Chat:
    """One conversation with one model at a time, and everything that commands may change."""

    def __init__(
        self,
        session: Session,
        options: ChatOptions,
        sink: Sink,
        store: SessionStore,
        name: str,
        conversation: Conversation | None,
    ) -> None:
        from spd.cli.chat.conversation import begin
        from spd.cli.chat.model import ChatModel
        from spd.cli.commands.models import ensure_models
        from spd.cli.text.prompt import read_text, system_text

        self._session, self._sink = session, sink
        self._console = dataclasses.replace(session.console, help="/help")
        self.store, self.name = store, name
        if conversation is not None:
            options = options.continuing(conversation.model)
        ensure_models(session, options)
        self.model: ChatModel = ChatModel(options, session.console)
        fresh = begin(self.model.name, options.seed, system_text(options.system), self.model.fingerprint)
        self.conversation = fresh if conversation is None else conversation.continued_as(fresh, options.seed)
        self.attached = [(path, read_text(path)) for path in options.file or ()]
        self.draft = ""
        self.leaving = False
        self.look: Look = self._first_look(options)
        self.stats = sink.is_terminal if options.stats is None else options.stats
        self.source: MessageSource
        self._saving = not options.no_save
        self._warned_full = self._warned_save = False

    def _first_look(self, options: ChatOptions) -> Look:
        from spd.cli.chat.view import Look

        terminal = self._sink.is_terminal and not self._session.dumb_terminal
        if options.show_drafts and not terminal:
            self._session.console.note(
                "--show-drafts marks tokens on a terminal only, and this output is not one"
            )
        return Look(
            terminal=self._sink.is_terminal,
            styled=terminal,
            color=self._session.console.color,
            unicode=self._sink.is_unicode,
            size=terminal_size,
            markdown=terminal and options.markdown != "off",
            drafts=options.show_drafts and terminal,
            hide_thinking=options.think == "hide",
        )

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, interactive: bool) -> int:
        """Read messages and reply until there are no more; returns the exit status."""
        from spd.cli.chat.slash import Commands

        commands = Commands(self)
        self.source = self._open_source(interactive)
        self._recall_unanswered()
        if interactive:
            self._greet()
        self.model.start(self._loaded)
        said = False
        while not self.leaving:
            draft, self.draft = self.draft, ""
            text = self.source.read(draft)
            if text is None:
                break
            said = said or bool(text.strip())
            try:
                if text.startswith("/") and not text.startswith("//"):
                    commands.run(text)
                elif text.strip() or self.attached:
                    self.say(text.removeprefix("/") if text.startswith("//") else text)
            except SpdError as error:
                if not interactive or self._ends(error):
                    raise
                write_error(error, self._console, as_json=False)
        if not (said or interactive):
            raise UsageError(
                "no messages: standard input is empty",
                fix=["spd chat in a terminal", "spd chat < messages.txt, one message a line"],
                code="no_prompt",
            )
        return 0

    def _open_source(self, interactive: bool) -> MessageSource:
        from spd.cli.chat.message_source import PlainLines
        from spd.cli.chat.slash import WITH_PATH, Commands

        if not interactive or self._session.dumb_terminal:
            return PlainLines()
        from spd.cli.chat.editor import Editor

        return Editor(
            self._session.state_folder / "history",
            color=self._session.console.color,
            status=self._status,
            commands=Commands.names(),
            with_path=WITH_PATH,
        )

    def _greet(self) -> None:
        from spd import __version__

        turns = len(self.conversation.turns)
        more = f" · {turns} turn{'s' if turns != 1 else ''} of {self.name}" if turns else ""
        self.tell(f"spd {__version__} · {self.model.name}{more}")
        self.tell("Type a message, /help for commands, Ctrl-D to quit.")

    def _recall_unanswered(self) -> None:
        """A message that was never answered, because everything ended, waits to be sent again."""
        turns = self.conversation.turns
        if turns and turns[-1].reply is None:
            self.draft = turns[-1].user
            self.conversation = self.conversation.without_last()

    def _loaded(self) -> None:
        """Called in the engine's thread when loading has ended."""
        failure = self.model.thread.failure
        if failure is not None:
            self.source.leave(failure)
        elif self.look.terminal and not self._session.console.quiet:
            self.source.say("\n".join(self._dimmed(line) for line in self.model.plan_lines()))
        self.source.wake()

    def _status(self) -> str:
        """The line at the bottom."""
        if not self.model.is_loaded:
            return f" {as_line(self.model.loading_words())}"
        name, used = as_line(self.model.name), f"ctx {self.model.context_words()}"
        choices = [f" {' · '.join(parts)}" for parts in ((name, self.model.spec_words(), used), (name, used))]
        return next((line for line in choices if cells(line) < self.look.size().columns), f" {used}")

    # -- turns -------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Send a message and show the reply. Raises what the message or the engine raises."""
        from spd.cli.chat.conversation import Turn
        from spd.cli.text.prompt import check_text

        files = [content for _, content in self.attached]
        turn = Turn(check_text("\n\n".join([*files, *([text] if text.strip() else [])]), "the message"))
        turns = (*self.conversation.turns, turn)
        try:
            self.reply_to(dataclasses.replace(self.conversation, turns=turns), text)
        except SpdError as error:
            if error.code == "context_overflow":
                tokenizer = self.model.vocabulary.need_tokenizer()
                for path, content in self.attached:
                    error.reason += (
                        f"{path}: {len(tokenizer.encode(content)):,} tokens, no longer attached",
                    )
                self.attached = []
            raise
        self.attached = []

    def reply_to(self, conversation: Conversation, draft: str = "") -> None:
        """Let the model reply to a changed conversation; without a reply all is as before, but the draft."""
        before, self.conversation = self.conversation, conversation
        try:
            self.reply()
        except Exception as error:
            if self.conversation is conversation:
                self.conversation, self.draft = before, draft
                if not self._ends(error):
                    self._save()  # the terminal is gone: the message waits in the file
            raise

    def _ends(self, error: Exception) -> bool:
        """Whether a chat cannot go on: the terminal is gone, or there is no model."""
        gone = isinstance(error, OutputClosed) or getattr(error, "code", "") == "write_failed"
        return gone or error is self.model.thread.failure

    def reply(self, *, more: bool = False) -> None:
        """Let the model reply to the last turn, or go on with its reply."""
        from spd.cli.chat.reply import run_reply

        self._save()
        conversation = run_reply(
            self._session,
            self._sink,
            self.model,
            self.look,
            self.conversation,
            more,
            lambda: write_stderr(self.source.unsaid(), styled=True),
            self.source.keep,
        )
        turn = conversation.turns[-1]
        if turn.reply is None:
            self.change(conversation.without_last())
            self.draft = turn.user
            return
        self.change(conversation)
        if self.stats:
            self.tell("  " + self.model.stats_words())
        self._warn_when_full()
        if turn.finish == "length" and self.look.terminal:
            self.tell(f"stopped at {len(turn.reply_ids):,} tokens; /more continues")

    def change(self, conversation: Conversation) -> None:
        """Go on with a changed conversation, and save it."""
        self.conversation = conversation
        self._save()

    def _warn_when_full(self) -> None:
        used, context = self.model.used, self.model.context
        if used >= FULL_SHARE * context and not self._warned_full:
            self._warned_full = True
            self._session.console.note(
                f"{used:,} of {context:,} tokens of context are used: /clear begins a new chat"
            )

    def _save(self) -> None:
        if not self._saving or not (self.conversation.turns or self.store.path(self.name).exists()):
            return
        try:
            self.store.save(self.name, self.conversation)
        except SpdError as error:
            if not self._warned_save:
                self._warned_save = True
                write_error(error, self._console, as_json=False)

    # -- what commands change ------------------------------------------------------------------------

    def tell(self, *lines: str) -> None:
        """Answer a command, or say what happens: never part of the conversation."""
        for line in lines:
            write_stderr(self._dimmed(line) + "\n", styled=True)

    def _dimmed(self, line: str) -> str:
        """A line from outside as this terminal shows it."""
        fitted = fit_lines(as_line(line), self.look.size().columns if self.look.terminal else None)
        return paint(fitted, "2", self.look.styled)

    def start_new(self) -> None:
        """Leave this chat as it was saved and begin another with the same system message."""
        from spd.cli.chat.conversation import begin

        if self._saving:
            self.name = self.store.open_new()
        old = self.conversation
        self.conversation = begin(old.model, None, old.system, old.vocabulary)
        self.attached, self._warned_full = [], False

    def load(self, name: str) -> None:
        """Go on with a saved chat."""
        loaded = self.store.load(name)
        if self._saving:
            self.store.open(name)
        self.name = name
        self.conversation = loaded.for_model(self.model.name, self.model.fingerprint)
        self._recall_unanswered()
        self.tell(*(line for turn in self.conversation.turns[-1:] for line in _recap(turn)))

    def set_sampling(self, changes: dict[str, Any]) -> None:
        """Change sampling options; a seed begins the chat's own line of seeds anew."""
        self.model.set_sampling(changes)
        if changes.get("seed") is not None:
            self.change(dataclasses.replace(self.conversation, seed=changes["seed"], draws=0))

    def set_thinking(self, think: str) -> None:
        """Think from now on as --think says. Raises IncompatibleError and UsageError."""
        self.model.set_thinking(think)
        self.look = dataclasses.replace(self.look, hide_thinking=think == "hide")

    def reload(self, **changes: Any) -> None:
        """Load with other options, and go back to the old ones if that fails."""
        from spd.cli.commands.models import ensure_models

        ensure_models(self._session, dataclasses.replace(self.model.options, **changes))
        self.model.reload(changes, self._loaded)
        self.change(self.conversation.for_model(self.model.name, self.model.fingerprint))
        self._session.console.note(f"loaded {self.model.name}")


def _recap(turn: Any) -> Sequence[str]:
    return [f"you   {turn.user[:200]}", f"reply {(turn.reply or '')[:200]}"]
