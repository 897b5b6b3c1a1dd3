"""One reply of a chat: prompt, request, what comes back, and Ctrl-C, which keeps what came."""

from __future__ import annotations

import dataclasses
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spd.cli.chat.view import ReplyView, Thoughts
from spd.cli.text.output import OutputClosed, is_terminal
from spd.cli.text.progress import loading
from spd.cli.text.structured import ThinkingSplitter, opens_thinking, thinking_budget
from spd.errors import EngineError, IncompatibleError, SpdError
from spd.runtime.engine.driver import Gathered

if TYPE_CHECKING:
    from spd.cli.chat.conversation import Conversation, Turn
    from spd.cli.chat.model import ChatModel
    from spd.cli.chat.view import Look
    from spd.cli.options import Session
    from spd.cli.text.output import Sink
    from spd.runtime import Request


PASTES_MARKED, PASTES_UNMARKED = "\x1b[?2004h", "\x1b[?2004l"


@dataclass
class _Reply(Gathered):
    """What has come of a reply so far, and whether it was stopped."""

    stopped: bool = False


def run_reply(
    session: Session,
    sink: Sink,
    model: ChatModel,
    look: Look,
    conversation: Conversation,
    more: bool,
    loaded: Callable[[], None],
    typed: Callable[[bytes], None],
) -> Conversation:
    """The conversation with the reply to its last turn, or with `more` of it; shown while it comes.

    `loaded` is called once the model is there, `typed` with the keys that came meanwhile. The last turn has
    no reply if Ctrl-C or Esc came before the first token. Raises IncompatibleError if the conversation does
    not fit the context, and what the engine raises.
    """
    gathered = _Reply()
    turn = conversation.turns[-1]
    seed = turn.seed if more and turn.seed is not None else conversation.next_seed

    def stop() -> None:
        gathered.stopped = True
        model.thread.stop()

    with session.guard.soften(stop), _quiet_input(sink, look, stop, typed):
        _wait(session, model, gathered)
        if gathered.stopped:
            return conversation
        loaded()
        splitter = ThinkingSplitter(opens_thinking(model.encoder.encode(conversation).text))
        splitter.feed(turn.reply or "" if more else "")
        request = _request(model, conversation, seed, more, splitter.thinking)
        thoughts = Thoughts(session.console, hidden=look.hide_thinking)
        view = ReplyView(sink, look, model.vocabulary.tokenizer, splitter, thoughts)
        events = model.run(request)
        try:
            for event in events:
                gathered.take(event)
                with session.guard.hold():
                    view.take(event)
                session.guard.check()
        finally:
            remark = "[interrupted]" if gathered.stopped else ""
            with session.guard.hold() if session.guard.received is None else nullcontext():
                view.finish(remark)
    if not gathered.token_ids and gathered.stopped and not more:
        return conversation
    return _settled(conversation, turn, gathered, seed, more)


def _settled(conversation: Conversation, turn: Turn, gathered: _Reply, seed: int, more: bool) -> Conversation:
    if gathered.finish_reason == "error":
        raise EngineError(
            "the model failed while replying",
            reason=["What came before the fault was shown; it is not kept."],
            fix=["/regen, or --dtype float32"],
        )
    replied = conversation.with_last(
        reply=(turn.reply or "" if more else "") + gathered.text,
        reply_ids=((*turn.reply_ids,) if more else ()) + tuple(gathered.token_ids),
        finish=gathered.finish_reason,
        seed=seed,
    )
    return replied if more else dataclasses.replace(replied, draws=conversation.draws + 1)


def _wait(session: Session, model: ChatModel, gathered: _Reply) -> None:
    """Wait until the model is loaded, showing how far it is."""
    if model.thread.ready.is_set():
        return
    with loading(f"loading {model.name}", session.console) as display:
        while not model.thread.ready.wait(0.1) and not gathered.stopped:
            session.guard.check()
            if display is not None and model.thread.progress is not None:
                display(model.thread.progress)


def _request(model: ChatModel, conversation: Conversation, seed: int, more: bool, inside: bool) -> Request:
    from spd.runtime import Request

    encoded = model.encoder.encode(conversation)
    ids, spans = encoded.ids, encoded.spans
    if more:
        reply_ids = conversation.turns[-1].reply_ids
        ids, spans = (*ids, *reply_ids), (*spans, ("generated", len(reply_ids)))
    context = model.context
    if len(ids) >= context:
        raise IncompatibleError(
            f"the conversation is {len(ids):,} tokens but the context is {context:,}",
            reason=["Nothing is dropped in silence."],
            fix=["/undo to take back turns, /clear for a new chat, or start with a larger --ctx"],
            code="context_overflow",
        )
    spent = conversation.turns[-1].reply_ids if more else ()
    thinking = thinking_budget(model.options.think, model.vocabulary, inside, spent)
    return Request(model.next_request_id(), ids, model.params(seed), spans, thinking=thinking)


@contextmanager
def _quiet_input(
    sink: Sink, look: Look, escape: Callable[[], None], typed: Callable[[bytes], None]
) -> Iterator[None]:
    """Keep keys that are typed meanwhile off the screen, as they are, for the next message; Esc is told.

    A paste stays marked as one, so that its lines do not become messages.
    """
    if not (look.styled and is_terminal(sys.stdin)):
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[0] &= ~termios.ICRNL
    quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH  # Ctrl-C drops nothing typed
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    sink.write_styled(PASTES_MARKED)
    keys = KeyWatch(descriptor, escape)
    keys.start()
    try:
        yield
    finally:
        typed(keys.stop())
        with suppress(OutputClosed, SpdError):
            sink.write_styled(PASTES_UNMARKED)
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


ESCAPE = b"\x1b"
PASTE_BEGINS, PASTE_ENDS = b"\x1b[200~", b"\x1b[201~"
ALONE_SECONDS = 0.05
"""How long nothing may follow an Esc: what a key sends comes at once."""

PASTE_SECONDS = 0.5
"""How long the rest of a paste is waited for when the reply has ended in its middle."""


class KeyWatch:
    """Reads a terminal in a thread of its own from `start` to `stop`; `escape` is called in that thread."""

    def __init__(self, descriptor: int, escape: Callable[[], None]) -> None:
        self._descriptor, self._escape = descriptor, escape
        self._kept = b""
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._work, name="keys", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> bytes:
        """Stop listening; returns what was typed, without the Esc that stopped the reply."""
        os.write(self._waker, b"x")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)
        return self._kept

    def _work(self) -> None:
        with suppress(OSError, ValueError):  # a terminal that has gone types nothing
            while self._waits(None):
                data = os.read(self._descriptor, 4096)
                if not data:
                    return
                self._take(data)
            while self._pasting and select.select([self._descriptor], [], [], PASTE_SECONDS)[0]:
                self._kept += os.read(self._descriptor, 4096)

    @property
    def _pasting(self) -> bool:
        """Whether the end of a paste is still to come."""
        return self._kept.rfind(PASTE_BEGINS) > self._kept.rfind(PASTE_ENDS)

    def _take(self, data: bytes) -> None:
        if data == ESCAPE and not self._pasting and not self._waits(ALONE_SECONDS):
            self._escape()
        else:
            self._kept += data

    def _waits(self, seconds: float | None) -> bool:
        """Whether something has been typed within so long; False too when `stop` was called."""
        ready, _, _ = select.select([self._descriptor, self._wake], [], [], seconds)
        return self._descriptor in ready and self._wake not in ready
