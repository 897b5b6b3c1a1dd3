"""Where a chat's messages come from, and plain lines as the simplest source.

A trailing backslash and an open triple quote make a message of several lines, here and in the editor.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import deque
from contextlib import suppress
from typing import Protocol

from spd.cli.text.output import is_terminal, write_stderr
from spd.errors import UsageError
from spd.formats.files import INPUT_LIMIT

QUOTES = '"""'
PROMPT, INDENT = "› ", "  "


class MessageSource(Protocol):
    """What the chat reads from."""

    def read(self, draft: str = "") -> str | None:
        """The next message, `draft` to begin with; None when there are no more."""

    def say(self, text: str) -> None:
        """Show lines of news above what is being typed or will be; may be called from any thread."""

    def unsaid(self) -> str:
        """Take the news that is not shown yet."""

    def wake(self) -> None:
        """Redraw the status; may be called from any thread."""

    def keep(self, typed: bytes) -> None:
        """Take keys that were typed while a reply came, for the next message."""

    def leave(self, error: BaseException) -> None:
        """Make `read` raise this where a person is waited for; may be called from any thread."""


def is_complete(text: str) -> bool:
    """Whether Enter sends this: no open triple quote, no trailing backslash."""
    return text.count(QUOTES) % 2 == 0 and not text.endswith("\\")


def as_message(text: str) -> str:
    """The message without the quotes around it."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and stripped.endswith(QUOTES) and len(stripped) >= 6:
        return stripped[3:-3].removeprefix("\n").removesuffix("\n")
    return text


class Unsaid:
    """News that wait for a place to be shown; any thread may add some."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()

    def append(self, text: str) -> None:
        """Keep these lines, which have no line break at their end."""
        self._lines.append(text)

    def take(self) -> str:
        """All lines kept until now, each with its line break; every one is taken once."""
        taken = ""
        with suppress(IndexError):
            while True:
                taken += self._lines.popleft() + "\n"
        return taken


class PlainLines:
    """Lines from standard input; a terminal that cannot move its cursor gets a prompt."""

    def __init__(self) -> None:
        self._asks = is_terminal(sys.stdin)
        self._number = 0
        self._unsaid = Unsaid()

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
        data = sys.stdin.buffer.readline(INPUT_LIMIT + 1) if sys.stdin is not None else b""
        if not data:
            return None
        self._number += 1
        if len(data) > INPUT_LIMIT:
            raise UsageError(f"line {self._number} of stdin is longer than {INPUT_LIMIT >> 20} MiB")
        try:
            return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise UsageError(
                f"line {self._number} of stdin is not UTF-8 text",
                fix=["iconv -f ENCODING -t utf-8 FILE | spd chat"],
            ) from None

    def say(self, text: str) -> None:
        """Keep it: no line that is being typed could be kept apart from it."""
        self._unsaid.append(text)

    def unsaid(self) -> str:
        """What was kept."""
        return self._unsaid.take()

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
