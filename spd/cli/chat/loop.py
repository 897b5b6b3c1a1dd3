"""The loop of a chat: reads messages, shows replies and saves the conversation.

On a terminal replies are rendered; elsewhere it reads plain lines and writes plain text.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

from spd.cli import prompt_input as prompt
from spd.cli.chat.conversation import PROMPT, Conversation, SessionStore, Turn, is_command
from spd.cli.chat.model import ChatModel
from spd.cli.commands.models import ensure_models
from spd.cli.reply_view import (
    DIM,
    DraftedTextSplitter,
    ReplyView,
    stats_line,
)
from spd.cli.signals import raise_interrupt
from spd.cli.terminal.console import Session, write_error, write_stderr, write_stderr_line
from spd.cli.terminal.plain_text import as_line, shorten
from spd.cli.terminal.sink import OutputClosed, Sink, to_json
from spd.cli.terminal.streams import is_terminal, terminal_size
from spd.conversation.messages import check_text
from spd.conversation.thinking import UNANSWERED, thinking_budget
from spd.conversation.thinking_splitter import ThinkingSplitter, split_thinking
from spd.errors import EngineError, IncompatibleError, NotFoundError, SpdError, UsageError
from spd.formats.demo import DEMOS
from spd.formats.files import INPUT_LIMIT
from spd.formats.thinking import opens_thinking
from spd.runtime.engine.request import Request, RequestOutput, derived_seed
from spd.version import __version__

if TYPE_CHECKING:
    from spd.cli.chat.editor import Editor
    from spd.cli.chat.options import ChatOptions


REQUEST_ID = "reply"


def open_session(store: SessionStore, options: ChatOptions) -> tuple[str, Conversation | None]:
    """Return the name to save under and the saved conversation, if any, and lock it.

    Raises NotFoundError and UsageError.
    """
    if options.continue_ is None:
        return ("" if options.no_save else store.open_new()), None
    name = options.continue_ or next(iter(store.names()), "")
    if not name:
        raise NotFoundError("no chat is saved yet", fix=["spd chat"], code="no_session")
    is_saved = store.path(name).exists()
    if not (is_saved and options.no_save):
        store.open(name)
    return name, store.load(name) if is_saved else None


class SlashCommands(Protocol):
    """The slash commands of a chat."""

    def run(self, line: str) -> None:
        """Run a typed command.

        Raises UsageError for an unknown one, and what the command raises.
        """

    def completions(self) -> Mapping[str, Callable[[], Iterable[str]] | None]:
        """Return every command and the source of its completions; None stands for paths."""


class Chat:
    """One conversation with one model at a time, and the state that slash commands change."""

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
        ensure_models(session, options)
        self.model = ChatModel(options, session)
        system = options.system if saved is None or "system" in options.typed else None
        seed = options.seed if saved is None or "seed" in options.typed else None
        if saved is not None and seed == saved.seed:
            seed = None  # the next reply's, not the first one's again
        conversation = (saved or Conversation(self.model.name)).with_overrides(
            prompt.system_text(system), seed
        )
        self.conversation = conversation.for_model(self.model.name, self.model.fingerprint)
        self.attached = [(path, prompt.read_text(path)) for path in options.file or ()]
        self.draft = ""
        self.should_exit = False
        self.styled = sink.is_terminal and not session.dumb_terminal
        self.stats = sink.is_terminal if options.stats is None else options.stats
        if options.show_drafts and not self.styled:
            session.console.note(
                "--show-drafts marks tokens on a terminal only, and this output is not one"
            )
        self.interactive = False
        self.source: PlainLines | Editor
        self._saving = not options.no_save
        self._has_warned_unsaved = False

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, commands: SlashCommands, interactive: bool) -> int:
        """Read messages and reply until there are no more; return the exit status."""
        self.interactive = interactive
        self.source = PlainLines()
        if interactive and not self.session.dumb_terminal:
            from spd.cli.chat.editor import Editor

            self.source = Editor(
                self.session.state_folder / "history",
                color=self.session.console.color,
                status=self._status,
                warn=self.session.console.note,
                loaded=lambda: not self.model.loading_text(),
                commands=commands.completions(),
            )
        if interactive:
            self.print_line(
                f"spd {__version__} · {self.model.name}" + f" · {self.name}" * bool(self._saving)
            )
            if self.model.name in DEMOS:
                self.print_line(
                    "The demo is a toy: spd pull Qwen/Qwen3-0.6B downloads a model that can talk."
                )
            self.print_line("Type a message, /help for commands, Ctrl-D to quit.")
        self.resume(self.conversation)
        if self.attached and not self.session.console.quiet:
            self.print_attached()
        self.model.start()
        has_message = False
        while not self.should_exit:
            draft = self.draft
            self.draft = ""
            text = self.source.read(draft)
            if text is None:
                break
            has_message = has_message or bool(text.strip())
            try:
                if is_command(text):
                    self._run_command(commands, text)
                elif text.strip() or self.attached:
                    self.send(text)
                self.run_tool_calls()
            except SpdError as error:
                if not interactive or self._is_fatal(error):
                    raise
                write_error(error, self._console, as_json=False)
        if not (has_message or interactive):
            fix = ["spd chat in a terminal", "spd chat < messages.txt, one message a line"]
            raise UsageError("no messages: standard input is empty", fix=fix, code="no_prompt")
        return 0

    def _run_command(self, commands: SlashCommands, text: str) -> None:
        """Run a slash command; on a terminal Ctrl-C interrupts it, and the chat continues."""
        if not self.interactive:
            commands.run(text)
            return
        try:
            with self.session.guard.intercept_sigint(raise_interrupt):
                commands.run(text)
        except KeyboardInterrupt:
            self.print_line(f"[interrupted] the chat goes on with {self.model.name}")

    def _status(self) -> str:
        """Return the text of the toolbar."""
        loading_text = self.model.loading_text()
        if loading_text:
            return f" {loading_text}"
        warnings = ["slow: no C compiler"] * ("no C compiler" in self.model.info.kernels_reason)
        return " " + " · ".join(
            (self._context_usage(), as_line(self.model.name), self.model.spec_text(), *warnings)
        )

    # -- turns -------------------------------------------------------------------------------------

    def send(self, text: str) -> None:
        """Send a message and show the reply. Raises what checking it or the engine raises."""
        message = text.removeprefix("/") if text.startswith("//") else text
        parts = [
            *(content for _, content in self.attached),
            *([message] if message.strip() else []),
        ]
        turn = Turn(check_text("\n\n".join(parts), "the message"))
        turns = (*self.conversation.turns, turn)
        if self.reply(dataclasses.replace(self.conversation, turns=turns), text):
            self.attached = []

    def reply(self, conversation: Conversation, draft: str = "") -> bool:
        """Run the reply to the last turn, or its continuation.

        Return False if no reply came; `draft` is kept then.
        """
        previous = self.conversation
        self.update(conversation)  # saved before the reply, so that the message is never lost
        try:
            extended = run_reply(self, conversation)
        except (Exception, KeyboardInterrupt) as error:
            self.draft = draft
            if not self._is_fatal(error):  # a fatal error leaves the message in the file
                self.update(previous)
            if isinstance(error, IncompatibleError) and error.code == "context_overflow":
                error.fix = self._context_fixes(previous)
            raise
        if extended is conversation:
            self.update(previous)
            self.draft = draft
            return False
        self.update(extended)
        if self.stats and self.model.metrics is not None:
            figures = stats_line(dataclasses.replace(self.model.metrics, load_ms=0.0))
            self.print_line(f"  {figures} · {self._context_usage()}")
        if self.model.metrics is not None:
            note = self.model.metrics.draft_note(self.model.info.spec)
            self.session.note_once(self.model.metrics.draft_fault, note)
        turn = extended.turns[-1]
        if turn.finish == "length" and self.interactive:
            self.print_line(f"stopped at {len(turn.reply_ids):,} tokens; /more continues")
        if turn.finish == "stop" and self._has_only_thinking(extended):
            self.print_line(UNANSWERED)
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
        fixes = ["/file none"] * bool(self.attached)
        fixes += ["/undo or /clear"] * bool(conversation.turns)
        fixes += [f"spd chat -c --ctx N, up to {max_positions:,}"] * (
            self.model.info.ctx < max_positions
        )
        return tuple(fixes or ["a shorter message"])

    def run_tool_calls(self) -> None:
        """Run the tool calls of the last reply after consent; continue unless one is refused."""
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
            self.update(answered)
            continued = dataclasses.replace(answered, turns=(*answered.turns, Turn("")))
            if not all(was_allowed for _, was_allowed in results) or not self.reply(continued):
                return

    def update(self, conversation: Conversation) -> None:
        """Replace the conversation and save it."""
        self.conversation = conversation
        if not self._saving or not (conversation.turns or self.store.path(self.name).exists()):
            return
        try:
            self.store.save(self.name, conversation)
        except SpdError as error:
            if not self._has_warned_unsaved:
                write_error(error, self._console, as_json=False)
            self._has_warned_unsaved = True

    def resume(self, conversation: Conversation) -> None:
        """Continue a saved conversation: show its last turns; a message without reply is the draft."""
        self.conversation = conversation
        turns = conversation.turns
        if turns and turns[-1].reply is None:
            self.draft = turns[-1].user
            self.conversation = conversation.without_last()
        for turn in self.conversation.turns[-2:] if self.interactive else ():
            self.print_line(f"› {shorten(turn.user, 300)}")
            self.print_line(shorten(turn.reply or "", 300))

    def _is_fatal(self, error: BaseException) -> bool:
        """True if an error ends the chat: the output is lost, or loading the model failed."""
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
        write_stderr_line(text, DIM if self.styled else "")

    def print_lines(self, lines: Iterable[str]) -> None:
        """Write several lines, see `print_line`."""
        for line in list(lines):
            self.print_line(line)

    def print_attached(self) -> None:
        """Write which files go with the next message, and how long they are."""
        sizes = []
        for path, text in self.attached:
            num_lines = len(text.splitlines())
            lines = f"{num_lines:,} line{'s' * (num_lines != 1)}"
            sizes.append(f"{path}: {lines}, {len(text):,} characters")
        listed = f"goes with the next message: {'; '.join(sizes)}"
        self.print_line(listed if sizes else "no file goes with the next message")

    def start_new(self) -> None:
        """Begin another chat with the same system message; the current one stays saved."""
        if self._saving:
            self.name = self.store.open_new()
        old = self.conversation
        self.update(Conversation(old.model, system=old.system, vocabulary=old.vocabulary))
        self.attached = []

    def load(self, name: str) -> None:
        """Continue a saved chat. Raises what loading and locking raise."""
        saved = self.store.load(name)
        if self._saving:
            self.store.open(name)
        self.name = name
        self.resume(saved.for_model(self.model.name, self.model.fingerprint))

    def reload(self, options: ChatOptions) -> None:
        """Load the model with other options; restore the old ones on failure or interruption."""
        ensure_models(self.session, options)
        stopped = threading.Event()
        stoppable = (
            self.session.guard.intercept_sigint(stopped.set) if self.interactive else nullcontext()
        )
        with stoppable, self.source.capture_typing(stopped.set):
            self.model.reload(stopped, options)
        self.update(self.conversation.for_model(self.model.name, self.model.fingerprint))
        self.print_lines(self.model.summary_lines())


def run_reply(chat: Chat, conversation: Conversation) -> Conversation:
    """Run a reply and show it while it streams; return the conversation extended by it.

    The reply answers the last turn, or continues its reply. On a terminal Ctrl-C and Esc stop it;
    without a token the conversation is returned unchanged. Raises IncompatibleError if it does not
    fit the context, and what the engine raises.
    """
    model = chat.model
    guard = chat.session.guard
    turn = conversation.turns[-1]
    gathered = RequestOutput()
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        model.thread.end(REQUEST_ID)

    # Without a terminal, Ctrl-C ends the whole chat.
    with (
        guard.intercept_sigint(stop) if chat.interactive else nullcontext(),
        chat.source.capture_typing(stop),
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
        request = _make_request(model, conversation, splitter.thinking)
        view = _make_view(chat, splitter)
        model.thread.engine().prefilling = view.report_prefill
        model.reply_info = model.info
        try:
            for event in model.thread.run(request):
                gathered.add(event)
                with guard.defer():
                    view.write_event(event)
                if stopped.is_set():  # possibly before the request was added
                    stop()
        finally:
            model.metrics = model.thread.metrics(request.id)
            with guard.defer() if guard.received is None else nullcontext():
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
    return _extend(conversation, gathered, request.params.seed)


def _extend(conversation: Conversation, gathered: RequestOutput, seed: int | None) -> Conversation:
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


def _make_request(model: ChatModel, conversation: Conversation, inside_thinking: bool) -> Request:
    """Return the request of a reply; `inside_thinking`: its next token is thinking."""
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
    return Request(REQUEST_ID, ids, model.params(seed), spans, thinking=thinking)


def _make_view(chat: Chat, splitter: ThinkingSplitter) -> ReplyView:
    """Return the view that shows a reply on this terminal or pipe."""
    console = chat.session.console
    options = chat.model.options
    view = ReplyView(console, chat.sink, splitter, hidden=options.think == "hide")
    if chat.styled and options.show_drafts:
        view.drafted = DraftedTextSplitter(
            chat.model.settings.vocabulary.need_tokenizer().token_bytes
        )
    elif chat.styled and options.markdown != "off":
        from spd.cli.terminal.markdown import MarkdownStream

        view.markdown = MarkdownStream(lambda: terminal_size(sys.stdout), color=console.color)
    return view


class PlainLines:
    """Reads lines from standard input; writes a prompt if that is a (dumb) terminal."""

    def read(self, draft: str = "") -> str | None:
        """Return the next line, None at the end. Raises UsageError."""
        if is_terminal(sys.stdin):
            write_stderr(PROMPT)
        data = sys.stdin.buffer.readline(INPUT_LIMIT + 1) if sys.stdin is not None else b""
        if len(data) > INPUT_LIMIT:
            raise UsageError(f"a line of stdin is longer than {INPUT_LIMIT >> 20} MiB")
        try:
            return data.decode("utf-8").removesuffix("\n").removesuffix("\r") if data else None
        except UnicodeDecodeError:
            fix = "iconv -f ENCODING -t utf-8 FILE | spd chat"
            raise UsageError("a line of stdin is not UTF-8 text", fix=[fix]) from None

    def capture_typing(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context that captures nothing: typed keys stay in the terminal."""
        return nullcontext()
