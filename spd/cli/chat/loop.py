"""The loop of a chat: reads messages, shows replies and saves the conversation.

On a terminal replies are rendered; elsewhere it reads plain lines and writes plain text.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

from spd.cli import prompt_input as prompt
from spd.cli.chat.conversation import Conversation, SessionStore, Turn, is_command
from spd.cli.chat.model import ChatModel
from spd.cli.chat.plain_lines import PlainLines
from spd.cli.commands.models import offer_downloads
from spd.cli.reply_view import (
    DIM,
    DraftedTextSplitter,
    ReplyView,
    stats_line,
)
from spd.cli.signals import raise_interrupt
from spd.cli.terminal.console import Session, write_error, write_stderr_line
from spd.cli.terminal.plain_text import as_line, shorten
from spd.cli.terminal.sink import OutputClosed, Sink, to_json
from spd.cli.terminal.streams import terminal_size
from spd.conversation.messages import check_text
from spd.conversation.thinking import UNANSWERED_NOTE, thinking_budget
from spd.conversation.thinking_splitter import ThinkingSplitter, split_thinking
from spd.errors import EngineError, IncompatibleError, NotFoundError, SpdError, UsageError
from spd.formats.demo import DEMOS
from spd.formats.thinking import opens_thinking
from spd.runtime.engine.request import Request, RequestOutput, derived_seed
from spd.version import __version__

if TYPE_CHECKING:
    from spd.cli.chat.editor import Editor
    from spd.cli.chat.options import ChatOptions


REQUEST_ID = "reply"
"""The id of each request of a chat, which has one at a time."""


def open_session(store: SessionStore, options: ChatOptions) -> tuple[str, Conversation | None]:
    """Lock the chat of the options; return its name and its saved conversation, None if it is new.

    The name is "" and nothing is locked where nothing is to be saved. Raises what `lock` and `load`
    of `SessionStore` raise, and NotFoundError if no chat is saved that could be continued.
    """
    if options.continue_ is None:
        return ("" if options.no_save else store.lock_new()), None
    name = options.continue_ or next(iter(store.names()), "")
    if not name:
        raise NotFoundError("no chat is saved yet", fix=["spd chat"], code="no_session")
    is_saved = store.path(name).exists()
    if not (is_saved and options.no_save):
        store.lock(name)
    return name, store.load(name) if is_saved else None


class SlashCommands(Protocol):
    """The slash commands of a chat."""

    def run(self, line: str) -> None:
        """Run a typed command. Raises UsageError for an unknown one, and what it raises itself."""

    def completions(self) -> Mapping[str, Callable[[], Iterable[str]] | None]:
        """Return every command and the source of its completions; None stands for paths."""


class Chat:
    """One conversation with one model at a time, and the state that slash commands change.

    Locks the chat, reads its file, the model's small files and files to attach, and downloads a
    model that is not there after asking. Raises what these raise.
    """

    def __init__(
        self, session: Session, options: ChatOptions, sink: Sink, store: SessionStore
    ) -> None:
        self.session = session
        self.sink = sink
        self.store = store
        self.name, saved = open_session(store, options)
        self._console = dataclasses.replace(session.console, help="/help")
        if saved is not None and not options.typed & {"model", "model_argument"}:
            options = dataclasses.replace(options, model=saved.model)
        offer_downloads(session, options)
        self.model = ChatModel(options, session)
        system = options.system if saved is None or "system" in options.typed else None
        seed = options.seed if saved is None or "seed" in options.typed else None
        if saved is not None and seed == saved.seed:
            seed = None  # the next reply's, not the first one's again
        conversation = (saved or Conversation(self.model.name)).with_overrides(
            prompt.read_system_text(system), seed
        )
        self.conversation = conversation.for_model(self.model.name, self.model.fingerprint)
        self.attached_files = [(path, prompt.read_text(path)) for path in options.file or ()]
        """Path and text of each file that goes with the next message."""
        self.unsent_text = ""
        """A message without a reply, which the next prompt begins with."""
        self.should_exit = False
        self.is_styled = sink.is_terminal and not session.dumb_terminal
        self.shows_stats = sink.is_terminal if options.stats is None else options.stats
        if options.show_drafts and not self.is_styled:
            session.console.note(
                "--show-drafts marks tokens on a terminal only, and this output is not one"
            )
        self.is_interactive = False
        self.message_source: PlainLines | Editor
        self._is_saved = not options.no_save
        self._has_warned_unsaved = False

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, commands: SlashCommands, is_interactive: bool) -> int:
        """Print a heading, load the model, and reply to messages until there are no more; return 0.

        Errors are printed where a person types. Elsewhere, and if they are fatal, they are raised.
        Raises UsageError if standard input holds no message.
        """
        self.is_interactive = is_interactive
        self.message_source = PlainLines()
        if is_interactive and not self.session.dumb_terminal:
            from spd.cli.chat.editor import Editor

            self.message_source = Editor(
                self.session.state_folder / "history",
                color=self.session.console.color,
                status=self._toolbar_text,
                warn=self.session.console.note,
                loaded=lambda: not self.model.loading_text(),
                commands=commands.completions(),
            )
        if is_interactive:
            self.print_line(
                f"spd {__version__} · {self.model.name}" + f" · {self.name}" * bool(self._is_saved)
            )
            if self.model.name in DEMOS:
                self.print_line(
                    "The demo is a toy: spd pull Qwen/Qwen3-0.6B downloads a model that can talk."
                )
            self.print_line("Type a message, /help for commands, Ctrl-D to quit.")
        self.resume(self.conversation)
        if self.attached_files and not self.session.console.quiet:
            self.print_attached()
        self.model.start_loading()
        has_message = False
        while not self.should_exit:
            draft = self.unsent_text
            self.unsent_text = ""
            text = self.message_source.read(draft)
            if text is None:
                break
            has_message = has_message or bool(text.strip())
            try:
                if is_command(text):
                    self._run_command(commands, text)
                elif text.strip() or self.attached_files:
                    self.send(text)
                self.run_tool_calls()
            except SpdError as error:
                if not is_interactive or self._is_fatal(error):
                    raise
                write_error(error, self._console, as_json=False)
        if not (has_message or is_interactive):
            fix = ["spd chat in a terminal", "spd chat < messages.txt, one message a line"]
            raise UsageError("no messages: standard input is empty", fix=fix, code="no_prompt")
        return 0

    def _run_command(self, commands: SlashCommands, text: str) -> None:
        """Run a slash command; on a terminal Ctrl-C interrupts it, and the chat continues."""
        if not self.is_interactive:
            commands.run(text)
            return
        try:
            with self.session.guard.intercept_sigint(raise_interrupt):
                commands.run(text)
        except KeyboardInterrupt:
            self.print_line(f"[interrupted] the chat goes on with {self.model.name}")

    def _toolbar_text(self) -> str:
        """Return the toolbar's text: the progress of loading, or context, model and drafter."""
        loading_text = self.model.loading_text()
        if loading_text:
            return f" {loading_text}"
        warnings = ["slow: no C compiler"] * ("no C compiler" in self.model.info.kernels_reason)
        return " " + " · ".join(
            (self._context_usage(), as_line(self.model.name), self.model.spec_text(), *warnings)
        )

    # -- turns -------------------------------------------------------------------------------------

    def send(self, text: str) -> None:
        """Send a message with the attached files and reply to it; then no file is attached.

        Without a reply they stay attached. Raises what checking it or the engine raises.
        """
        message = text.removeprefix("/") if text.startswith("//") else text
        parts = [
            *(content for _, content in self.attached_files),
            *([message] if message.strip() else []),
        ]
        turn = Turn(check_text("\n\n".join(parts), "the message"))
        turns = (*self.conversation.turns, turn)
        if self.reply(dataclasses.replace(self.conversation, turns=turns), text):
            self.attached_files = []

    def reply(self, conversation: Conversation, draft: str = "") -> bool:
        """Run, show and save the reply to the last turn, or its continuation; False if none came.

        Without a reply the previous conversation is restored, and `draft` is the next message's
        text. Prints figures and notes about the reply. Raises what `run_reply` raises.
        """
        previous = self.conversation
        self.set_conversation(
            conversation
        )  # saved before the reply, so that the message is never lost
        try:
            extended = run_reply(self, conversation)
        except (Exception, KeyboardInterrupt) as error:
            self.unsent_text = draft
            if not self._is_fatal(error):  # a fatal error leaves the message in the file
                self.set_conversation(previous)
            if isinstance(error, IncompatibleError) and error.code == "context_overflow":
                error.fix = self._context_fixes(previous)
            raise
        if extended is conversation:
            self.set_conversation(previous)
            self.unsent_text = draft
            return False
        self.set_conversation(extended)
        if self.shows_stats and self.model.metrics is not None:
            figures = stats_line(dataclasses.replace(self.model.metrics, load_ms=0.0))
            self.print_line(f"  {figures} · {self._context_usage()}")
        if self.model.metrics is not None:
            note = self.model.metrics.draft_note(self.model.info.spec)
            self.session.note_once(self.model.metrics.draft_fault, note)
        turn = extended.turns[-1]
        if turn.finish == "length" and self.is_interactive:
            self.print_line(f"stopped at {len(turn.reply_ids):,} tokens; /more continues")
        if turn.finish == "stop" and self._has_only_thinking(extended):
            self.print_line(UNANSWERED_NOTE)
        return True

    def _has_only_thinking(self, conversation: Conversation) -> bool:
        """True if the last reply is thinking without an answer or a tool call."""
        marks = self.model.settings.vocabulary.marks
        inside_thinking = opens_thinking(self.model.encoder.encode(conversation).text, marks)
        turn = conversation.turns[-1]
        tools = self.model.tools
        thinking, answer = split_thinking(turn.reply or "", inside_thinking, marks)
        if thinking is None or answer.strip():
            return False
        return tools is None or tools.parse_calls(turn, inside_thinking) is None

    def _context_fixes(self, conversation: Conversation) -> tuple[str, ...]:
        """Return the fixes for a message that does not fit the context after the conversation."""
        max_positions = self.model.settings.vocabulary.config.max_positions
        fixes = ["/file none"] * bool(self.attached_files)
        fixes += ["/undo or /clear"] * bool(conversation.turns)
        fixes += [f"spd chat -c --ctx N, up to {max_positions:,}"] * (
            self.model.info.ctx < max_positions
        )
        return tuple(fixes or ["a shorter message"])

    def run_tool_calls(self) -> None:
        """Run the tool calls of the last reply, each after consent; let the model reply to them.

        Repeats this for calls of the new reply; ends if a call was refused. Saves each turn.
        """
        while (tools := self.model.tools) and self.conversation.turns:
            turn = self.conversation.turns[-1]
            text = self.model.encoder.encode(self.conversation).text
            inside_thinking = opens_thinking(text, self.model.settings.vocabulary.marks)
            message = tools.parse_calls(turn, inside_thinking) if turn.finish == "stop" else None
            if message is None or turn.answered:
                return
            results = [tools.run_call(call, self.session.guard) for call in message["tool_calls"]]
            new_messages = [message, *(result for result, _ in results)]
            answered_turn = dataclasses.replace(turn, answered=tuple(map(to_json, new_messages)))
            answered = self.conversation.with_last(answered_turn)
            self.set_conversation(answered)
            continued = dataclasses.replace(answered, turns=(*answered.turns, Turn("")))
            if not all(was_allowed for _, was_allowed in results) or not self.reply(continued):
                return

    def set_conversation(self, conversation: Conversation) -> None:
        """Replace the conversation and save it; if that fails, print the first error only."""
        self.conversation = conversation
        if not self._is_saved or not (conversation.turns or self.store.path(self.name).exists()):
            return
        try:
            self.store.save(self.name, conversation)
        except SpdError as error:
            if not self._has_warned_unsaved:
                write_error(error, self._console, as_json=False)
            self._has_warned_unsaved = True

    def resume(self, conversation: Conversation) -> None:
        """Replace the conversation and print its last turns; a message without reply is unsent."""
        self.conversation = conversation
        turns = conversation.turns
        if turns and turns[-1].reply is None:
            self.unsent_text = turns[-1].user
            self.conversation = conversation.without_last()
        for turn in self.conversation.turns[-2:] if self.is_interactive else ():
            self.print_line(f"› {shorten(turn.user, 300)}")
            self.print_line(shorten(turn.reply or "", 300))

    def _is_fatal(self, error: BaseException) -> bool:
        """True if an error ends the chat: output cannot be written, or loading the model failed."""
        is_output_lost = (
            isinstance(error, OutputClosed) or getattr(error, "code", "") == "write_failed"
        )
        return is_output_lost or error is self.model.thread.failure

    def _context_usage(self) -> str:
        """Return how much of the context the conversation uses, as text."""
        num_tokens = 0
        with suppress(SpdError):  # the next message raises the error
            num_tokens = self.model.encoder.count_tokens(self.conversation)
        return f"ctx {num_tokens:,}/{self.model.info.ctx:,}"

    # -- for slash commands ---------------------------------------------------------------------------

    def print_line(self, text: str) -> None:
        """Write a line about the chat, such as the output of a command, to standard error."""
        write_stderr_line(text, DIM if self.is_styled else "")

    def print_lines(self, lines: Iterable[str]) -> None:
        """Write several lines about the chat to standard error."""
        for line in list(lines):
            self.print_line(line)

    def print_attached(self) -> None:
        """Write to standard error which files go with the next message, and how long they are."""
        sizes = []
        for path, text in self.attached_files:
            num_lines = len(text.splitlines())
            lines = f"{num_lines:,} line{'s' * (num_lines != 1)}"
            sizes.append(f"{path}: {lines}, {len(text):,} characters")
        listed = f"goes with the next message: {'; '.join(sizes)}"
        self.print_line(listed if sizes else "no file goes with the next message")

    def start_new(self) -> None:
        """Begin another chat with the same system message, without files; this one stays saved."""
        if self._is_saved:
            self.name = self.store.lock_new()
        old = self.conversation
        self.set_conversation(Conversation(old.model, system=old.system, vocabulary=old.vocabulary))
        self.attached_files = []

    def load_saved(self, name: str) -> None:
        """Continue and lock a saved chat. Raises what the store's `load` and `lock` raise."""
        saved = self.store.load(name)
        if self._is_saved:
            self.store.lock(name)
        self.name = name
        self.resume(saved.for_model(self.model.name, self.model.fingerprint))

    def reload_model(self, options: ChatOptions) -> None:
        """Load the model with other options and print lines about it.

        Restores the old options on failure or interruption. Raises what `ChatModel.reload` raises.
        """
        offer_downloads(self.session, options)
        stopped = threading.Event()
        stoppable = (
            self.session.guard.intercept_sigint(stopped.set)
            if self.is_interactive
            else nullcontext()
        )
        with stoppable, self.message_source.capture_typing(stopped.set):
            self.model.reload(stopped, options)
        self.set_conversation(self.conversation.for_model(self.model.name, self.model.fingerprint))
        self.print_lines(self.model.summary_lines())


def run_reply(chat: Chat, conversation: Conversation) -> Conversation:
    """Run a reply and show it while it streams; return the conversation extended by it.

    The reply answers the last turn, or continues its reply. On a terminal Ctrl-C and Esc stop it;
    without a token the conversation is returned unchanged. Waits for the model, and sets `metrics`
    and `reply_info` of it. Raises IncompatibleError if the conversation does not fit the context,
    and what the engine raises.
    """
    model = chat.model
    guard = chat.session.guard
    turn = conversation.turns[-1]
    gathered = RequestOutput()
    stopped = threading.Event()

    def stop() -> None:
        """End the reply at the next token."""
        stopped.set()
        model.thread.end(REQUEST_ID)

    # Without a terminal, Ctrl-C ends the whole chat.
    with (
        guard.intercept_sigint(stop) if chat.is_interactive else nullcontext(),
        chat.message_source.capture_typing(stop),
    ):
        model.wait_until_loaded(lambda: not stopped.is_set())
        if stopped.is_set():
            return conversation
        encoded = model.encoder.encode(conversation)
        if stopped.is_set():  # encoding a long file takes time
            return conversation
        marks = model.settings.vocabulary.marks
        splitter = ThinkingSplitter(opens_thinking(encoded.text, marks), marks)
        splitter.feed(turn.reply or "")
        request = _make_reply_request(model, conversation, splitter.is_thinking)
        view = _make_reply_view(chat, splitter)
        model.thread.engine().prefilling = view.report_prefill
        model.reply_info = model.info
        try:
            for event in model.thread.run(request):
                gathered.add(event)
                with guard.defer_signals():
                    view.write_event(event)
                if stopped.is_set():  # possibly before the request was added
                    stop()
        finally:
            model.metrics = model.thread.metrics(request.id)
            with guard.defer_signals() if guard.received is None else nullcontext():
                view.finish()
    if stopped.is_set():
        chat.print_line("[interrupted]")
    if gathered.finish_reason == "error":
        reason = ["What came before the fault was shown; it is not kept."]
        raise EngineError(
            "the model failed while replying", reason=reason, fix=["/regen, or --dtype float32"]
        )
    if stopped.is_set() and not gathered.token_ids:
        return conversation
    return _with_reply(conversation, gathered, request.params.seed)


def _with_reply(
    conversation: Conversation, gathered: RequestOutput, seed: int | None
) -> Conversation:
    """Return the conversation with a reply, or its continuation, added to the last turn."""
    turn = conversation.turns[-1]
    extended_turn = dataclasses.replace(
        turn,
        reply=(turn.reply or "") + gathered.text,
        reply_ids=(*turn.reply_ids, *gathered.token_ids),
        finish=gathered.finish_reason,
        seed=seed,
    )
    extended = conversation.with_last(extended_turn)
    return dataclasses.replace(extended, draws=conversation.draws + (turn.reply is None))


def _make_reply_request(
    model: ChatModel, conversation: Conversation, inside_thinking: bool
) -> Request:
    """Return the request of a reply or its continuation. Raises IncompatibleError if too long.

    inside_thinking: its first token is thinking.
    """
    turn = conversation.turns[-1]
    encoded = model.encoder.encode(conversation)
    context = model.info.ctx
    ids = (*encoded.ids, *turn.reply_ids)
    spans = encoded.spans
    if turn.reply_ids:
        spans = (*spans, ("generated", len(turn.reply_ids)))
    if len(ids) >= context:
        message = f"the conversation is {len(ids):,} tokens but the context is {context:,}"
        raise IncompatibleError(message, code="context_overflow")
    seed = derived_seed(conversation.seed, conversation.draws) if turn.seed is None else turn.seed
    thinking = thinking_budget(
        model.options.think, model.settings.vocabulary, inside_thinking, turn.reply_ids
    )
    return Request(REQUEST_ID, ids, model.sampling_params(seed), spans, thinking=thinking)


def _make_reply_view(chat: Chat, splitter: ThinkingSplitter) -> ReplyView:
    """Return the view of a reply: with drafts in colour, rendered Markdown, or plain text."""
    console = chat.session.console
    options = chat.model.options
    view = ReplyView(console, chat.sink, splitter, hidden=options.think == "hide")
    if chat.is_styled and options.show_drafts:
        view.drafted_splitter = DraftedTextSplitter(
            chat.model.settings.vocabulary.need_tokenizer().token_bytes
        )
    elif chat.is_styled and options.markdown != "off":
        from spd.cli.terminal.markdown import MarkdownStream

        view.markdown = MarkdownStream(lambda: terminal_size(sys.stdout), color=console.color)
    return view
