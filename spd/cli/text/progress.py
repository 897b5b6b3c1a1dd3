"""A line that a terminal shows while something takes its time; nothing is left of it.

Only on a terminal's standard error, never with --quiet.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spd.cli.text.output import Console, as_line, columns_of, is_terminal, write_stderr
from spd.runtime.plan.config import show_size

if TYPE_CHECKING:
    from spd.runtime import LoadProgress

DELAY = 0.5
"""Seconds before a bar is worth its while."""
INTERVAL = 0.2
BAR = 20
WORDS = {"read": "reading weights", "pack": "packing weights", "download": "downloading"}


class Ticker:
    """Rewrites its line at most five times a second, and takes it away at the end."""

    def __init__(self, console: Console) -> None:
        self._shows = not console.quiet and is_terminal(sys.stderr)
        self._drawn, self._width = float("-inf"), 0
        self._counted, self._began, self._first = "", 0.0, 0

    def __enter__(self) -> Ticker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.write("")

    def count(self, what: str, done: int, total: int, amount: Callable[[int], str]) -> None:
        """A bar: `reading the prompt [####......] 8,192 tok of 20,000 tok · 4,100 tok/s · 0:03 left`."""
        now = time.perf_counter()
        if what != self._counted:
            self._counted, self._began, self._first = what, now, done
        if (passed := now - self._began) < DELAY or done <= self._first:
            return
        if done >= total:
            self.write("")
            return
        rate = (done - self._first) / passed
        words = f"{amount(done)} of {amount(total)} · {amount(round(rate))}/s"
        bar = "#" * (BAR * done // total)
        self.write(f"{what} [{bar:.<{BAR}}] {words} · {clock((total - done) / rate)} left")

    def write(self, text: str) -> None:
        """Put a text in the line's place; an empty one clears it."""
        now = time.perf_counter()
        if not self._shows or now - self._drawn < INTERVAL * bool(text) or not (text or self._width):
            return
        text = as_line(text)[: (columns_of(sys.stderr) or 80) - 1]
        write_stderr("\r" + text.ljust(self._width) + ("" if text else "\r"), styled=True)
        self._drawn, self._width = now, len(text)


@contextmanager
def loading(text: str, console: Console) -> Iterator[Callable[[LoadProgress], None]]:
    """Say on a terminal what takes its time, and take it back when it is done.

    Yields what is to be told of the progress.
    """
    with Ticker(console) as ticker:
        ticker.write(f"{text} …")
        yield lambda progress: ticker.count(WORDS[progress.phase], progress.done, progress.total, show_size)


@contextmanager
def writing(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """As `loading`, for a file of tensors; yields what hears of bytes, of how many, and the tensor."""
    with Ticker(console) as ticker:
        yield lambda done, total, tensor: ticker.count("writing", done, total, show_size)


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
