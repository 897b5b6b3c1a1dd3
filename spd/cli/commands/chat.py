"""`spd chat`: checks the terminal, then runs the chat."""

from __future__ import annotations

import sys
from contextlib import closing

from spd.cli.chat.options import ChatOptions
from spd.cli.terminal.console import Session
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.streams import is_terminal
from spd.errors import UsageError


def chat(session: Session, options: ChatOptions) -> int:
    """Talk with a model; what is said is saved, and -c continues it.

    Examples:
      spd chat Qwen/Qwen3-4B -s "Be terse"
      spd chat demo < messages.txt
    """
    from spd.cli.run_settings import check_reply_options

    check_reply_options(options)
    sink = Sink.stdout()
    is_interactive = is_terminal(sys.stdin)
    if is_interactive and not sink.is_terminal:
        message = "spd chat needs a terminal on both sides, and standard output is not one"
        fix = ['spd generate "your prompt"', "spd chat < messages.txt, one message a line"]
        raise UsageError(message, fix=fix, code="no_terminal")
    if options.tools is not None and not (is_interactive and is_terminal(sys.stderr)):
        message = (
            "--tools asks before it runs anything, and standard input or error is not a terminal"
        )
        raise UsageError(message, fix=["leave --tools out"], code="no_terminal")
    from spd.cli.chat.conversation import SessionStore
    from spd.cli.chat.loop import Chat
    from spd.cli.chat.slash import Commands

    with closing(SessionStore(session.state_folder / "sessions")) as store:
        chat_loop = Chat(session, options, sink, store)
        try:
            return chat_loop.run(Commands(chat_loop), is_interactive)
        finally:
            if session.guard.received is None:  # after a signal the process ends at once
                chat_loop.model.close()
