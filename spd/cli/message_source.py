"""Where a chat's messages come from, and plain lines as the simplest source.

A trailing backslash and an open triple quote make a message of several lines, here and in the editor.
"""

from __future__ import annotations

import re
import shlex
import sys
from typing import Protocol

from spd.cli.output import is_terminal, write_stderr
from spd.errors import UsageError

QUOTES = '"""'
PROMPT, INDENT = "› ", "  "


class MessageSource(Protocol):
    """What the chat reads from."""

    def read(self, draft: str = "") -> str | None:
        """The next message, `draft` to begin with; None when there are no more."""

    def say(self, text: str) -> bool:
        """Show news above what is being typed; False where nothing is. May be called from any thread."""

    def wake(self) -> None:
        """Show the status anew; may be called from any thread."""

    def keep(self, typed: bytes) -> None:
        """Take keys that were typed while a reply came, for the next message."""

    def leave(self, error: BaseException) -> None:
        """Make `read` raise this if it waits for a person; may be called from any thread."""


def is_complete(text: str) -> bool:
    """Whether Enter sends this: no open triple quote, no trailing backslash."""
    return text.count(QUOTES) % 2 == 0 and not text.endswith("\\")


def as_message(text: str) -> str:
    """The message without the quotes around it."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and stripped.endswith(QUOTES) and len(stripped) >= 6:
        return stripped[3:-3].removeprefix("\n").removesuffix("\n")
    return text


class PlainLines:
    """Lines from standard input; a terminal that cannot move its cursor gets a prompt."""

    def __init__(self) -> None:
        self._asks = is_terminal(sys.stdin)
        self._number = 0

    def read(self, draft: str = "") -> str | None:
        """The next line, or lines joined by a triple quote or a backslash. Raises UsageError."""
        text: str | None = None
        while text is None or not is_complete(text):
            line = self._line(PROMPT if text is None else INDENT)
            if line is None:
                break
            text = line if text is None else _continued(text) + line
        return None if text is None else as_message(text.removesuffix("\\"))

    def _line(self, prompt: str) -> str | None:
        if self._asks:
            write_stderr(prompt)
        data = sys.stdin.buffer.readline() if sys.stdin is not None else b""
        if not data:
            return None
        self._number += 1
        try:
            return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise UsageError(
                f"line {self._number} of stdin is not UTF-8 text",
                fix=["iconv -f ENCODING -t utf-8 FILE | spd chat"],
            ) from None

    def say(self, text: str) -> bool:
        """Nothing: there is no line that could be kept."""
        return False

    def wake(self) -> None:
        """Nothing: there is no status line."""

    def keep(self, typed: bytes) -> None:
        """Nothing: what is typed stays in the terminal."""

    def leave(self, error: BaseException) -> None:
        """Nothing: the next message will meet the error."""


def _continued(text: str) -> str:
    return (text[:-1] if text.endswith("\\") and text.count(QUOTES) % 2 == 0 else text) + "\n"


def words_of(line: str) -> list[str]:
    """The words behind a command; quotes keep blanks together."""
    try:
        return shlex.split(line)
    except ValueError:
        return re.split(r"\s+", line.strip())
