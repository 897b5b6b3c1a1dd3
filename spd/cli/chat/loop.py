"""A conversation, saved as it goes: drawn on a terminal, elsewhere plain lines in and plain text out."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

from spd.cli import prompt_input as prompt
from spd.cli.chat.conversation import PROMPT, Conversation, SessionStore, Turn, is_command
from spd.cli.chat.model import ChatModel
from spd.cli.commands.models import ensure_models
from spd.cli.reply_view import (
    DIM,
    DraftedText,
    ReplyView,
    stats_line,
)
from spd.cli.signals import raise_interrupt
from spd.cli.terminal.console import Session, tell, write_error, write_stderr
from spd.cli.terminal.plain_text import as_line, shortened
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
    """The name to save under, and what was said under it before. Raises NotFoundError and UsageError."""
    if options.continue_ is None:
        return ("" if options.no_save else store.open_new()), None
    name = options.continue_ or next(iter(store.names()), "")
    if not name:
        raise NotFoundError("no chat is saved yet", fix=["spd chat"], code="no_session")
    saved = store.path(name).exists()
    if not (saved and options.no_save):
        store.open(name)
    return name, store.load(name) if saved else None


class SlashCommands(Protocol):
    """The commands of a chat."""

    def run(self, line: str) -> None:
        """Run a typed command. Raises UsageError for an unknown one, and what the command raises."""

    def completions(self) -> Mapping[str, Callable[[], Iterable[str]] | None]:
        """Return every command, and what TAB offers behind it; None for paths."""


class Chat:
    """One conversation with one model at a time, and everything that commands may change."""

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
        conversation = (saved or Conversation(self.model.name)).with_wishes(
            prompt.system_text(system), seed
        )
        self.conversation = conversation.for_model(self.model.name, self.model.fingerprint)
        self.attached = [(path, prompt.read_text(path)) for path in options.file or ()]
        self.draft = ""
        self.leaving = False
        self.styled = sink.is_terminal and not session.dumb_terminal
        self.stats = sink.is_terminal if options.stats is None else options.stats
        if options.show_drafts and not self.styled:
            session.console.note(
                "--show-drafts marks tokens on a terminal only, and this output is not one"
            )
        self.interactive = False
        self.source: PlainLines | Editor
        self._saving = not options.no_save
        self._warned = False

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, commands: SlashCommands, interactive: bool) -> int:
        """Read messages and reply until there are no more; returns the exit status."""
        self.interactive = interactive
        self.source = PlainLines()
        if interactive and not self.session.dumb_terminal:
            from spd.cli.chat.editor import Editor

            self.source = Editor(
                self.session.state_folder / "history",
                color=self.session.console.color,
                status=self._status,
                warn=self.session.console.note,
                loaded=lambda: not self.model.loading_words(),
                commands=commands.completions(),
            )
        if interactive:
            self.tell(
                f"spd {__version__} · {self.model.name}" + f" · {self.name}" * bool(self._saving)
            )
            if self.model.name in DEMOS:
                self.tell(
                    "The demo is a toy: spd pull Qwen/Qwen3-0.6B downloads a model that can talk."
                )
            self.tell("Type a message, /help for commands, Ctrl-D to quit.")
        self.go_on_with(self.conversation)
        self.model.start()
        said = False
        while not self.leaving:
            draft, self.draft = self.draft, ""
            if (text := self.source.read(draft)) is None:
                break
            said = said or bool(text.strip())
            try:
                if is_command(text):
                    self._run_command(commands, text)
                elif text.strip() or self.attached:
                    self.say(text)
                self.answer_calls()
            except SpdError as error:
                if not interactive or self._ends(error):
                    raise
                write_error(error, self._console, as_json=False)
        if not (said or interactive):
            fix = ["spd chat in a terminal", "spd chat < messages.txt, one message a line"]
            raise UsageError("no messages: standard input is empty", fix=fix, code="no_prompt")
        return 0

    def _run_command(self, commands: SlashCommands, text: str) -> None:
        """Run a command; on a terminal Ctrl-C gives it up, and the chat goes on."""
        if not self.interactive:
            commands.run(text)
            return
        try:
            with self.session.guard.soften(raise_interrupt):
                commands.run(text)
        except KeyboardInterrupt:
            self.tell(f"[interrupted] the chat goes on with {self.model.name}")

    def _status(self) -> str:
        """The line at the bottom."""
        if loading := self.model.loading_words():
            return f" {loading}"
        slow = ["slow: no C compiler"] * ("no C compiler" in self.model.info.kernels_reason)
        return " " + " · ".join(
            (self._used(), as_line(self.model.name), self.model.spec_words(), *slow)
        )

    # -- turns -------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Send a message and show the reply. Raises what the message or the engine raises."""
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
        """Let the model reply to the last turn, or go on with its reply. False: none came, `draft` waits."""
        before = self.conversation
        self.change(conversation)  # saved now: whatever happens, the message is not lost
        try:
            replied = run_reply(self, conversation)
        except (Exception, KeyboardInterrupt) as error:
            self.draft = draft
            if not self._ends(error):  # else the message waits in the file
                self.change(before)
            if isinstance(error, IncompatibleError) and error.code == "context_overflow":
                error.fix = self._room_fixes(before)
            raise
        if replied is conversation:
            self.change(before)
            self.draft = draft
            return False
        self.change(replied)
        if self.stats and self.model.metrics is not None:
            figures = stats_line(dataclasses.replace(self.model.metrics, load_ms=0.0))
            self.tell(f"  {figures} · {self._used()}")
        turn = replied.turns[-1]
        if turn.finish == "length" and self.interactive:
            self.tell(f"stopped at {len(turn.reply_ids):,} tokens; /more continues")
        if turn.finish == "stop" and self._only_thought(replied):
            self.tell(UNANSWERED)
        return True

    def _only_thought(self, conversation: Conversation) -> bool:
        """True if the last reply is thinking without an answer or a call."""
        marks = self.model.settings.vocabulary.marks
        inside = opens_thinking(self.model.encoder.encode(conversation).text, marks)
        turn = conversation.turns[-1]
        tools = self.model.tools
        thought, answer = split_thinking(turn.reply or "", inside, marks)
        if thought is None or answer.strip():
            return False
        return tools is None or tools.called(turn, inside) is None

    def _room_fixes(self, said: Conversation) -> tuple[str, ...]:
        """Return what to type where a message does not fit behind what has been said."""
        most = self.model.settings.vocabulary.config.max_positions
        fixes = ["/file none"] * bool(self.attached)
        fixes += ["/undo or /clear"] * bool(said.turns)
        fixes += [f"spd chat -c --ctx N, up to {most:,}"] * (self.model.info.ctx < most)
        return tuple(fixes or ["a shorter message"])

    def answer_calls(self) -> None:
        """Run what the last reply calls, each after a yes, and let the model go on unless one was refused."""
        while (tools := self.model.tools) and self.conversation.turns:
            turn = self.conversation.turns[-1]
            text = self.model.encoder.encode(self.conversation).text
            inside = opens_thinking(text, self.model.settings.vocabulary.marks)
            message = tools.called(turn, inside) if turn.finish == "stop" else None
            if message is None or turn.answered:
                return
            results = [tools.result(call, self.session.guard) for call in message["tool_calls"]]
            said = [message, *(result for result, _ in results)]
            answered = self.conversation.with_last(answered=tuple(map(to_json, said)))
            self.change(answered)
            goes_on = dataclasses.replace(answered, turns=(*answered.turns, Turn("")))
            if not all(ran for _, ran in results) or not self.reply(goes_on):
                return

    def change(self, conversation: Conversation) -> None:
        """Go on with a changed conversation, and save it."""
        self.conversation = conversation
        if not self._saving or not (conversation.turns or self.store.path(self.name).exists()):
            return
        try:
            self.store.save(self.name, conversation)
        except SpdError as error:
            if not self._warned:
                write_error(error, self._console, as_json=False)
            self._warned = True

    def go_on_with(self, conversation: Conversation) -> None:
        """Go on with a saved conversation: its last turns are shown, an unanswered message is the draft."""
        self.conversation = conversation
        turns = conversation.turns
        if turns and turns[-1].reply is None:
            self.draft = turns[-1].user
            self.conversation = conversation.without_last()
        for turn in self.conversation.turns[-2:] if self.interactive else ():
            self.tell(f"› {shortened(turn.user, 300)}", shortened(turn.reply or "", 300))

    def _ends(self, error: BaseException) -> bool:
        """Whether a chat cannot go on: the terminal is gone, or there is no model."""
        gone = isinstance(error, OutputClosed) or getattr(error, "code", "") == "write_failed"
        return gone or error is self.model.thread.failure

    def _used(self) -> str:
        """How much of the context the conversation uses."""
        used = 0
        with suppress(SpdError):  # the next message will meet the error
            used = self.model.encoder.length(self.conversation)
        return f"ctx {used:,}/{self.model.info.ctx:,}"

    # -- what commands change ------------------------------------------------------------------------

    def tell(self, *lines: str) -> None:
        """Answer a command, or say what happens: never part of the conversation."""
        for line in lines:
            tell(line, DIM if self.styled else "")

    def start_new(self) -> None:
        """Leave this chat as it was saved and begin another with the same system message."""
        if self._saving:
            self.name = self.store.open_new()
        old = self.conversation
        self.change(Conversation(old.model, system=old.system, vocabulary=old.vocabulary))
        self.attached = []

    def load(self, name: str) -> None:
        """Go on with a saved chat."""
        saved = self.store.load(name)
        if self._saving:
            self.store.open(name)
        self.name = name
        self.go_on_with(saved.for_model(self.model.name, self.model.fingerprint))

    def reload(self, **changes: Any) -> None:
        """Load with other options, and go back to the old ones if that fails or is interrupted."""
        ensure_models(self.session, dataclasses.replace(self.model.options, **changes))
        stopped = threading.Event()
        stoppable = self.session.guard.soften(stopped.set) if self.interactive else nullcontext()
        with stoppable, self.source.replying(stopped.set):
            self.model.reload(stopped, **changes)
        self.change(self.conversation.for_model(self.model.name, self.model.fingerprint))
        self.tell(*self.model.lines())


def run_reply(chat: Chat, conversation: Conversation) -> Conversation:
    """The conversation with the reply to its last turn, or with more of it; shown while it comes.

    On a terminal Ctrl-C and Esc stop the reply; the conversation is as it was if nothing had come. Raises
    IncompatibleError if it does not fit the context, and what the engine raises.
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
    with guard.soften(stop) if chat.interactive else nullcontext(), chat.source.replying(stop):
        model.wait(lambda: not stopped.is_set())
        if stopped.is_set():
            return conversation
        encoded = model.encoder.encode(conversation)
        if stopped.is_set():  # a long file takes its time
            return conversation
        marks = model.settings.vocabulary.marks
        splitter = ThinkingSplitter(opens_thinking(encoded.text, marks), marks)
        splitter.feed(turn.reply or "")
        request = _request(model, conversation, splitter.thinking)
        view = _view(chat, splitter)
        model.thread.engine().prefilling = view.reading
        try:
            for event in model.thread.run(request):
                gathered.add(event)
                with guard.hold():
                    view.take(event)
                if stopped.is_set():  # perhaps before it had begun
                    stop()
        finally:
            model.metrics = model.thread.metrics(request.id)
            with guard.hold() if guard.received is None else nullcontext():
                view.finish()
    if stopped.is_set():
        chat.tell("[interrupted]")
    if gathered.finish_reason == "error":
        why = ["What came before the fault was shown; it is not kept."]
        raise EngineError(
            "the model failed while replying", reason=why, fix=["/regen, or --dtype float32"]
        )
    if stopped.is_set() and not gathered.token_ids:
        return conversation
    reply = (turn.reply or "") + gathered.text
    ids = (*turn.reply_ids, *gathered.token_ids)
    ended = {"finish": gathered.finish_reason, "seed": request.params.seed}
    replied = conversation.with_last(reply=reply, reply_ids=ids, **ended)
    return dataclasses.replace(replied, draws=conversation.draws + (turn.reply is None))


def _request(model: ChatModel, conversation: Conversation, inside: bool) -> Request:
    """The order for the engine; `inside` says whether what comes next is thinking."""
    turn = conversation.turns[-1]
    encoded = model.encoder.encode(conversation)
    context = model.info.ctx
    ids = (*encoded.ids, *turn.reply_ids)
    spans = encoded.spans
    if turn.reply_ids:
        spans = (*spans, ("generated", len(turn.reply_ids)))
    if len(ids) >= context:
        words = f"the conversation is {len(ids):,} tokens but the context is {context:,}"
        raise IncompatibleError(words, code="context_overflow")
    seed = derived_seed(conversation.seed, conversation.draws) if turn.seed is None else turn.seed
    thinking = thinking_budget(
        model.options.think, model.settings.vocabulary, inside, turn.reply_ids
    )
    return Request(REQUEST_ID, ids, model.params(seed), spans, thinking=thinking)


def _view(chat: Chat, splitter: ThinkingSplitter) -> ReplyView:
    """How this terminal, or a pipe, shows a reply."""
    console = chat.session.console
    options = chat.model.options
    view = ReplyView(console, chat.sink, splitter, hidden=options.think == "hide")
    if chat.styled and options.show_drafts:
        view.drafted = DraftedText(chat.model.settings.vocabulary.need_tokenizer().token_bytes)
    elif chat.styled and options.markdown != "off":
        from spd.cli.terminal.markdown import MarkdownStream

        view.markdown = MarkdownStream(lambda: terminal_size(sys.stdout), color=console.color)
    return view


class PlainLines:
    """Lines from standard input; a terminal that cannot move its cursor gets a prompt."""

    def read(self, draft: str = "") -> str | None:
        """The next line. Raises UsageError."""
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

    def replying(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Nothing: what is typed stays in the terminal."""
        return nullcontext()
