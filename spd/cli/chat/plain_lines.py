"""Messages of a chat as lines of standard input, where there is no line editor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from spd.cli.chat.conversation import PROMPT
from spd.cli.terminal.console import write_stderr
from spd.cli.terminal.streams import is_terminal
from spd.errors import UsageError
from spd.formats.files import MAX_INPUT_BYTES


class PlainLines:
    """Reads lines from standard input; writes a prompt if that is a (dumb) terminal."""

    def read(self, draft: str = "") -> str | None:
        """Return the next line, None at the end; `draft` is ignored.

        Raises UsageError for a line that is too long or not UTF-8.
        """
        if is_terminal(sys.stdin):
            write_stderr(PROMPT)
        data = sys.stdin.buffer.readline(MAX_INPUT_BYTES + 1) if sys.stdin is not None else b""
        if len(data) > MAX_INPUT_BYTES:
            raise UsageError(f"a line of stdin is longer than {MAX_INPUT_BYTES >> 20} MiB")
        try:
            return data.decode("utf-8").removesuffix("\n").removesuffix("\r") if data else None
        except UnicodeDecodeError:
            fix = "iconv -f ENCODING -t utf-8 FILE | spd chat"
            raise UsageError("a line of stdin is not UTF-8 text", fix=[fix]) from None

    def capture_typing(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context that captures nothing: typed keys stay in the terminal."""
        return nullcontext()
