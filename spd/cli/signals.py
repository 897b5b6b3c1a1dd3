"""How the program ends before its time: by a signal, or by an engine that is lost.

The first SIGINT or SIGTERM says `stopping…` and unwinds, the second ends the process at once. It ends by
the signal itself, so that a shell loop around `spd` stops too (a status of 130 alone does not tell it).
Ctrl-Z stops it for a while, which counts in no speed.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from spd.errors import EngineError
from spd.runtime.engine.clock import exclude

WATCHED = (signal.SIGINT, signal.SIGTERM)
CALM = "\x1b[?2004l\x1b[?25h\x1b[0m\r\n"
"""Pastes unmarked, the cursor shown, no colour, a row of its own: for a terminal that was being drawn on."""


class Interrupted(BaseException):
    """A signal asked the program to stop; not an Exception, so that nothing swallows it by accident."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class SignalGuard:
    """Turns the first SIGINT or SIGTERM into `Interrupted`, except while output is being written."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._held = 0
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._hook = threading.excepthook
        self._unraisable = sys.unraisablehook
        self._terminal = terminal_mode()

    def install(self) -> None:
        """Take the signals over; one that the parent process ignores stays ignored."""
        sys.unraisablehook = self._pass_over_races
        for signum in WATCHED:
            with suppress(ValueError):  # not in the main thread: the caller keeps its own handlers
                if signal.getsignal(signum) != signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._handle)
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._sleep)

    def uninstall(self) -> None:
        """Give back the handlers that were there before; that of lost threads too."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
        threading.excepthook = self._hook
        sys.unraisablehook = self._unraisable

    def _pass_over_races(self, fault: sys.UnraisableHookArgs) -> None:
        """Show what no one can handle, but for a signal that came while its handler was given back."""
        if not (isinstance(fault.exc_value, OSError) and "race condition" in str(fault.exc_value)):
            self._unraisable(fault)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        for watched in self._previous.keys() & set(WATCHED):
            signal.signal(watched, signal.SIG_DFL)
        self.received = signum
        with suppress(OSError):
            os.write(
                2, "stopping…\n".encode(getattr(sys.stderr, "encoding", None) or "utf-8", "replace")
            )
        if not self._held:
            raise Interrupted(signum)

    def _sleep(self, signum: int, frame: FrameType | None) -> None:
        """Stop as Ctrl-Z asks, and go on later with the terminal as it was, by clocks that stood still."""
        if not _can_be_continued():
            return
        mode = terminal_mode()
        if self._terminal is not None and mode != self._terminal:
            termios.tcsetattr(0, termios.TCSANOW, self._terminal)
        began = time.perf_counter()
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when the process is continued
        exclude(time.perf_counter() - began)
        if mode is not None and terminal_mode() not in (None, mode):
            termios.tcsetattr(0, termios.TCSANOW, mode)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Finish what is inside before a signal may unwind."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        self.check()

    @contextmanager
    def soften(self, act: Callable[[], None]) -> Iterator[None]:
        """Let the first SIGINT inside only call `act`; a second one, and SIGTERM, unwind as ever."""
        if signal.SIGINT not in self._previous:
            yield
            return

        def handle(signum: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, self._handle)
            act()

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            if self.received is None:
                signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raise Interrupted if a signal has come, also one whose exception was lost in a callback."""
        if self.received is not None and not self._held:
            raise Interrupted(self.received)


def raise_interrupt() -> None:
    """Give up what runs now, not the program."""
    raise KeyboardInterrupt


def die_by(signum: int) -> int:
    """End this process by the signal itself; returns the shell's status where that is impossible."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    return 128 + signum


def _can_be_continued() -> bool:
    """True if a shell of this session could continue the process group: else Ctrl-Z stops nothing."""
    group = os.getpgrp()
    parent = os.getppid()
    with suppress(OSError, ValueError, IndexError):  # the leader of the group may have ended
        status = Path(f"/proc/{group}/stat").read_bytes()
        parent = int(status.rpartition(b")")[2].split()[1])
    with suppress(OSError):
        return os.getsid(parent) == os.getsid(0) and os.getpgid(parent) != group
    return False


def terminal_mode() -> list[Any] | None:
    """Return how the terminal at standard input is set; None where there is none in the foreground."""
    with suppress(OSError, ValueError, termios.error):
        if os.tcgetpgrp(0) == os.getpgrp():
            return termios.tcgetattr(0)
    return None


def end_when_lost(show: Callable[[Exception], object]) -> None:
    """Let an EngineError that ends a thread be shown and end the program: the main thread may hang."""
    usual = threading.excepthook
    terminal = None
    with suppress(OSError, ValueError, termios.error):  # also of a terminal without job control
        terminal = termios.tcgetattr(0)

    def end(thread: threading.ExceptHookArgs) -> None:
        error = thread.exc_value
        if not isinstance(error, EngineError):
            usual(thread)
            return
        with suppress(BaseException):
            if terminal is not None and termios.tcgetattr(0) != terminal:
                termios.tcsetattr(0, termios.TCSANOW, terminal)
                os.write(2, CALM.encode())
            show(error)
        os._exit(error.exit_code)

    threading.excepthook = end
