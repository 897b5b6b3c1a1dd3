"""What a terminal shows while a model loads: a line at once, a bar when it takes longer, nothing after.

Only on a terminal's standard error, never with --quiet. A terminal that cannot move its cursor keeps
the line; rich knows that from the environment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spd.cli.text.output import Console, as_line, columns_of, is_terminal, raw_stderr, write_stderr

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from spd.runtime import LoadProgress
    from spd.runtime.lab import SweepProgress


DELAY = 0.5
"""Seconds before the line becomes a bar."""
INTERVAL = 0.1
WORDS = {
    "read": "reading weights",
    "pack": "packing weights",
    "download": "downloading",
}


@contextmanager
def loading(text: str, console: Console) -> Iterator[LoadDisplay | None]:
    """Say on a terminal what takes its time, and take it back when it is done.

    Yields what is to be told of the progress; None where nothing is shown.
    """
    if console.quiet or not is_terminal(sys.stderr):
        yield None
        return
    display = LoadDisplay(as_line(text), console.color)
    try:
        yield display
    finally:
        display.close()


class LoadDisplay:
    """A line of text, then a bar. Call it with each LoadProgress, from one thread."""

    def __init__(self, text: str, color: bool) -> None:
        self._text, self._color = text, color
        self._began = self._drawn = time.perf_counter()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._plain = True
        write_stderr(f"{text} …")

    def __call__(self, progress: LoadProgress) -> None:
        """Show how far it has come, at most ten times a second."""
        now = time.perf_counter()
        if now - self._began < DELAY or (now - self._drawn < INTERVAL and progress.phase == self._phase):
            return
        self._drawn = now
        with suppress(OSError, ValueError):  # a terminal that has gone is no reason to stop
            if self._bar is None and not self._open():
                return
            self._draw(progress)

    def close(self) -> None:
        """Leave the terminal as it was."""
        with suppress(OSError, ValueError):
            if self._bar is not None:
                self._bar.stop()
        if self._plain:
            self._erase()

    def _erase(self) -> None:
        write_stderr("\r" + " " * (len(self._text) + 2) + "\r", styled=True)
        self._plain = False

    def _open(self) -> bool:
        """Put the bar in the line's place; False on a terminal that has no place."""
        console = _console(self._color)
        if console.is_dumb_terminal or not console.is_terminal:
            self._began = float("inf")
            return False
        from rich.progress import BarColumn, Progress, TextColumn

        self._erase()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            console=console,
            auto_refresh=False,  # no thread: a second signal must find nothing to wait for
            transient=True,
            redirect_stdout=False,
        )
        self._bar.start()
        return True

    def _draw(self, progress: LoadProgress) -> None:
        assert self._bar is not None
        if progress.phase != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(WORDS[progress.phase], total=progress.total, amount="")
            self._phase = progress.phase
        assert self._task is not None
        self._bar.update(self._task, completed=progress.done, amount=_amount(progress))
        self._bar.refresh()


def _amount(progress: LoadProgress) -> str:
    from spd.runtime.plan.memory import show_size

    return f"{show_size(progress.done)} of {show_size(progress.total)}"


def _console(color: bool) -> Any:
    """A rich console on standard error that leaves the cursor visible and survives a closed terminal."""
    from rich.console import Console as RichConsole

    class Visible(RichConsole):
        """The second signal ends the process at once: a hidden cursor would stay hidden."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

        def on_broken_pipe(self) -> None:
            """Nothing: the answer goes elsewhere."""

    return Visible(file=raw_stderr(), no_color=not color, highlight=False)


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

    def show(self, progress: SweepProgress) -> None:
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
