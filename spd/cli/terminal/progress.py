"""Progress of long work, shown on a terminal."""

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

BAR_DELAY_SECONDS = 0.5
"""Seconds of work before a bar is drawn."""

WRITE_INTERVAL_SECONDS = 0.2
"""The least time between two texts of a ticker."""

BAR_WIDTH = 20
"""The most characters of a bar."""

PHASE_LABELS = {"read": "reading weights", "pack": "packing weights", "download": "downloading"}
"""Texts in front of a bar, by `LoadProgress.phase`."""


class Ticker(AbstractContextManager["Ticker"]):
    """One line on standard error, rewritten at most five times a second and cleared at the end.

    Nothing is written with --quiet or without a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._is_enabled = not console.quiet and is_terminal(sys.stderr)
        self._last_write = float("-inf")
        self._width = 0
        self._task = ""
        self._task_start = 0.0
        self._task_first = 0

    def __exit__(self, *_: object) -> None:
        """Clear the line."""
        self.write("")

    def show_progress(self, task: str, done: int, total: int, amount: Callable[[int], str]) -> None:
        """Show how much of a task is done, as far as the row has room; clear the line at its end.

        For example `reading 40% [##..] 0:03 left · 8 tok of 20 tok · 4 tok/s`. Nothing is shown
        before `BAR_DELAY_SECONDS`. amount: formats a number of what is counted.
        """
        now = time.perf_counter()
        if task != self._task:
            self._task = task
            self._task_start = now
            self._task_first = done
        elapsed = now - self._task_start
        if elapsed < BAR_DELAY_SECONDS or done <= self._task_first:
            return
        if done >= total:
            self.write("")
            return
        rate = (done - self._task_first) / elapsed
        label = f"{task} {100 * done // total}%"
        remaining = f"{format_clock((total - done) / rate)} left"
        parts = [remaining, f"{amount(done)} of {amount(total)}", f"{amount(round(rate))}/s"]
        room = (columns_of(sys.stderr) or 80) - len(label) - 2
        while len(text := " · ".join(parts)) > room and len(parts) > 1:
            parts.pop()
        width = min(BAR_WIDTH, room - len(text) - 3)
        bar = f"[{'#' * (width * done // total):.<{width}}] " if width > 3 else ""
        self.write(f"{label} {bar}{text}")

    def write(self, text: str) -> None:
        """Replace the line by a text, unless another came just before; an empty text clears it."""
        now = time.perf_counter()
        if (
            not self._is_enabled
            or now - self._last_write < WRITE_INTERVAL_SECONDS * bool(text)
            or not (text or self._width)
        ):
            return
        text = as_line(text)[: (columns_of(sys.stderr) or 80) - 1]
        write_stderr("\r" + text.ljust(self._width) + ("" if text else "\r"), styled=True)
        self._last_write = now
        self._width = len(text)


@contextmanager
def compiling(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with a message and a bar while kernels are compiled inside, at a first run."""
    import logging

    class ReportHandler(logging.Handler):
        """Passes messages on to `report`."""

        def emit(self, record: logging.LogRecord) -> None:
            """Report a record's message, and a bar of the kernels that are done."""
            done, total = (vars(record)[name] for name in ("done", "total"))
            report(f"{record.getMessage()} [{'#' * done:.<{total}}]")

    logger = logging.getLogger("spd.kernels.native.build.compiling")
    handler = ReportHandler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def ticking(console: Console) -> Iterator[Ticker]:
    """Yield a ticker, which also shows how far kernels are compiled inside, at a first run."""
    with Ticker(console) as ticker, compiling(lambda message: ticker.write(f"{message} …")):
        yield ticker


@contextmanager
def loading(text: str, console: Console) -> Iterator[Callable[[LoadProgress], None]]:
    """Show a text on the terminal while the block runs.

    Yield the function that takes the progress.
    """
    with ticking(console) as ticker:
        ticker.write(f"{text} …")
        yield lambda progress: ticker.show_progress(
            PHASE_LABELS[progress.phase], progress.done, progress.total, format_size
        )


def format_clock(seconds: float) -> str:
    """Return seconds as `minutes:seconds`."""
    total = max(0, round(seconds))
    return f"{total // 60}:{total % 60:02d}"
