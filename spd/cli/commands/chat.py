"""`spd chat`: its options, and which saved chat it goes on with."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from spd.cli.options import ModelArgument, ReplyOptions, first, option
from spd.cli.text.output import Session, Sink, is_terminal
from spd.errors import UsageError

_chat = partial(option, "Chat")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChatOptions(ModelArgument, ReplyOptions):
    """Everything `spd chat` takes."""

    file: list[str] | None = first(None, "FILE", "Goes with the first message. Repeatable.", "-f")
    continue_: str | None = first(
        None, "[NAME]", "Continue the latest chat, or NAME.", "-c", "--continue"
    )
    tools: str | None = _chat(
        None, "FILE", "Commands that the model may call; each runs after your yes."
    )
    no_save: bool = _chat(False, None, "Keep this chat in memory only.")
    markdown: Literal["on", "off"] = _chat("on", "MODE", "on, or off: the text as it is.")
    show_drafts: bool = _chat(False, None, "Colour accepted draft tokens.")
    stats: bool | None = _chat(
        None, None, "Figures after each reply. Default: on a terminal.", "--stats/--no-stats"
    )


def chat(session: Session, options: ChatOptions) -> int:
    """Talk with a model; what is said is saved, and -c continues it.

    Examples:
      spd chat Qwen/Qwen3-4B -s "Be terse"
      spd chat demo < messages.txt
    """
    from spd.cli.text.job import check_shared

    check_shared(options)
    sink = Sink.stdout()
    interactive = is_terminal(sys.stdin)
    if interactive and not sink.is_terminal:
        words = "spd chat needs a terminal on both sides, and standard output is not one"
        fix = ['spd generate "your prompt"', "spd chat < messages.txt, one message a line"]
        raise UsageError(words, fix=fix, code="no_terminal")
    if options.tools is not None and not (interactive and is_terminal(sys.stderr)):
        words = (
            "--tools asks before it runs anything, and standard input or error is not a terminal"
        )
        raise UsageError(words, fix=["leave --tools out"], code="no_terminal")
    from spd.cli.chat.conversation import SessionStore
    from spd.cli.chat.loop import Chat

    with closing(SessionStore(session.state_folder / "sessions")) as store:
        talk = Chat(session, options, sink, store)
        try:
            return talk.run(interactive)
        finally:
            if session.guard.received is None:  # a signal ends the process at once
                talk.model.close()
