"""How far long work has come, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from spd.cli.terminal.console import Console, write_stderr
from spd.cli.terminal.plain_text import as_line
from spd.cli.terminal.streams import columns_of, is_terminal
from spd.runtime.plan.config import format_size

if TYPE_CHECKING:
    from spd.runtime import LoadProgress

DELAY = 0.5
"""Seconds before a bar is worth its while."""

INTERVAL = 0.2

BAR = 20

WORDS = {"read": "reading weights", "pack": "packing weights", "download": "downloading"}


class Ticker(AbstractContextManager["Ticker"]):
    """Rewrites its line at most five times a second, and takes it away at the end."""

    def __init__(self, console: Console) -> None:
        self._shows = not console.quiet and is_terminal(sys.stderr)
        self._drawn = float("-inf")
        self._width = 0
        self._counted = ""
        self._began = 0.0
        self._first = 0

    def __exit__(self, *_: object) -> None:
        self.write("")

    def count(self, what: str, done: int, total: int, amount: Callable[[int], str]) -> None:
        """As far as the row has room: `reading 40% [##..] 0:03 left · 8 tok of 20 tok · 4 tok/s`."""
        now = time.perf_counter()
        if what != self._counted:
            self._counted = what
            self._began = now
            self._first = done
        if (passed := now - self._began) < DELAY or done <= self._first:
            return
        if done >= total:
            self.write("")
            return
        rate = (done - self._first) / passed
        begin = f"{what} {100 * done // total}%"
        left = f"{clock((total - done) / rate)} left"
        facts = [left, f"{amount(done)} of {amount(total)}", f"{amount(round(rate))}/s"]
        room = (columns_of(sys.stderr) or 80) - len(begin) - 2
        while len(words := " · ".join(facts)) > room and len(facts) > 1:
            facts.pop()
        width = min(BAR, room - len(words) - 3)
        bar = f"[{'#' * (width * done // total):.<{width}}] " if width > 3 else ""
        self.write(f"{begin} {bar}{words}")

    def write(self, text: str) -> None:
        """Put a text in the line's place; an empty one clears it."""
        now = time.perf_counter()
        if (
            not self._shows
            or now - self._drawn < INTERVAL * bool(text)
            or not (text or self._width)
        ):
            return
        text = as_line(text)[: (columns_of(sys.stderr) or 80) - 1]
        write_stderr("\r" + text.ljust(self._width) + ("" if text else "\r"), styled=True)
        self._drawn = now
        self._width = len(text)


@contextmanager
def compiling(say: Callable[[str], None]) -> Iterator[None]:
    """Let `say` hear that kernels are compiled, which happens inside at a first run."""
    import logging

    logger = logging.getLogger("spd.kernels.native.build.compiling")
    handler = logging.Handler()
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def loading(text: str, console: Console) -> Iterator[Callable[[LoadProgress], None]]:
    """Say on a terminal what takes its time, until it is done; yields what is to be told of the progress."""
    with Ticker(console) as ticker, compiling(lambda words: ticker.write(f"{words} …")):
        ticker.write(f"{text} …")
        yield lambda progress: ticker.count(
            WORDS[progress.phase], progress.done, progress.total, format_size
        )


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
