"""One line on a terminal's standard error that says how far a measurement has come; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from spd.cli.text.output import Console, as_line, columns_of, is_terminal, write_stderr

if TYPE_CHECKING:
    from spd.runtime.lab.sweep import Progress

INTERVAL = 0.2


class Ticker:
    """Rewrites its line at most five times a second, and takes it away at the end."""

    def __init__(self, console: Console) -> None:
        self._shows = not console.quiet and is_terminal(sys.stderr)
        self._drawn, self._width = float("-inf"), 0

    def __enter__(self) -> Ticker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.write("")

    def show(self, progress: Progress) -> None:
        """How far it has come: `128 of 400 · 0:41 left · code`."""
        if progress.total:
            left = "" if progress.left is None else f" · {clock(progress.left)} left"
            self.write(f"{progress.done} of {progress.total}{left} · {progress.label}")
        else:
            self.write(progress.label)

    def write(self, text: str) -> None:
        """Put a text in the line's place; an empty one clears it."""
        now = time.perf_counter()
        if not self._shows or (text and now - self._drawn < INTERVAL):
            return
        text = as_line(text)[: (columns_of(sys.stderr) or 80) - 1]
        write_stderr("\r" + text.ljust(self._width) + ("" if text else "\r"), styled=True)
        self._drawn, self._width = now, len(text)


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
