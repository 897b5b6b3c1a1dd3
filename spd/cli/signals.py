"""Handling of signals, and of an EngineError that ends a thread.

The first SIGINT or SIGTERM prints `stopping…` and unwinds, the second ends the process at once. The
process ends by the signal itself, so that a shell loop around `spd` stops too (an exit status of 130
alone would not stop it). Ctrl-Z suspends the process; the pause counts in no measured speed.
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

from spd.errors import EngineError
from spd.runtime.engine.clock import exclude_seconds

Handler = Callable[[int, FrameType | None], object] | int | None
"""A signal's handler as `signal.getsignal` returns it."""
TerminalMode = list[int | list[bytes | int]]
"""Attributes of a terminal as `termios.tcgetattr` returns them."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINAL_RESET = "\x1b[?2004l\x1b[?25h\x1b[0m\r\n"
"""Resets a terminal: bracketed paste off, cursor shown, no style, a new row."""


class Interrupted(BaseException):
    """A signal has stopped the program.

    Not an Exception, so that no handler catches it by accident.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class SignalGuard:
    """Raises `Interrupted` on the first SIGINT or SIGTERM, but not while output is written."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The number of the signal that has come."""
        self._defer_depth = 0
        self._previous_handlers: dict[int, Handler] = {}
        self._previous_thread_hook = threading.excepthook
        self._previous_unraisable_hook = sys.unraisablehook
        self._terminal_mode = terminal_mode()

    def install(self) -> None:
        """Install handlers of SIGINT, SIGTERM and SIGTSTP, and a hook for unraisable exceptions.

        A signal that the parent process ignores stays ignored.
        """
        sys.unraisablehook = self._ignore_restore_races
        for signum in STOP_SIGNALS:
            with suppress(ValueError):  # not in the main thread: the caller keeps its own handlers
                if signal.getsignal(signum) != signal.SIG_IGN:
                    self._previous_handlers[signum] = signal.signal(signum, self._on_stop_signal)
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                self._previous_handlers[signal.SIGTSTP] = signal.signal(
                    signal.SIGTSTP, self._suspend
                )

    def uninstall(self) -> None:
        """Restore the previous handlers, and the previous hooks of exceptions."""
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers.clear()
        threading.excepthook = self._previous_thread_hook
        sys.unraisablehook = self._previous_unraisable_hook

    def _ignore_restore_races(self, fault: sys.UnraisableHookArgs) -> None:
        """Report an unraisable exception, but no signal during the restoring of its handler."""
        if not (isinstance(fault.exc_value, OSError) and "race condition" in str(fault.exc_value)):
            self._previous_unraisable_hook(fault)

    def _on_stop_signal(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal, print that spd stops, and raise Interrupted.

        Inside `defer_signals` its end raises it. The next signal ends the process.
        """
        for watched in self._previous_handlers.keys() & set(STOP_SIGNALS):
            signal.signal(watched, signal.SIG_DFL)
        self.received = signum
        with suppress(OSError):
            os.write(
                2, "stopping…\n".encode(getattr(sys.stderr, "encoding", None) or "utf-8", "replace")
            )
        if not self._defer_depth:
            raise Interrupted(signum)

    def _suspend(self, signum: int, frame: FrameType | None) -> None:
        """Suspend the process on Ctrl-Z; when it continues, restore the terminal's mode.

        The pause is left out of all measured times.
        """
        if not _has_job_control():
            return
        mode = terminal_mode()
        if self._terminal_mode is not None and mode != self._terminal_mode:
            termios.tcsetattr(0, termios.TCSANOW, self._terminal_mode)
        suspend_start = time.perf_counter()
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when the process is continued
        exclude_seconds(time.perf_counter() - suspend_start)
        if mode is not None and terminal_mode() not in (None, mode):
            termios.tcsetattr(0, termios.TCSANOW, mode)

    @contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Run the block to its end; then raise Interrupted if a signal has come meanwhile."""
        self._defer_depth += 1
        try:
            yield
        finally:
            self._defer_depth -= 1
        self.raise_if_received()

    @contextmanager
    def intercept_sigint(self, action: Callable[[], None]) -> Iterator[None]:
        """Make the first SIGINT inside only call `action`.

        A second one, and SIGTERM, unwind as usual.
        """
        if signal.SIGINT not in self._previous_handlers:
            yield
            return

        def handle(signum: int, frame: FrameType | None) -> None:
            """Call the action, and let the next SIGINT unwind."""
            signal.signal(signal.SIGINT, self._on_stop_signal)
            action()

        previous_handler = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            if self.received is None:
                signal.signal(signal.SIGINT, previous_handler)

    def raise_if_received(self) -> None:
        """Raise Interrupted if a signal has come, even if a callback swallowed its exception.

        Inside `defer_signals` nothing is raised.
        """
        if self.received is not None and not self._defer_depth:
            raise Interrupted(self.received)


def raise_interrupt() -> None:
    """Raise KeyboardInterrupt, which ends the current command of a chat but not the program."""
    raise KeyboardInterrupt


def exit_by_signal(signum: int) -> int:
    """End this process by the signal itself; return the shell's status if that is impossible."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    return 128 + signum


def _has_job_control() -> bool:
    """True if a shell of this session could continue the process group; else Ctrl-Z is ignored."""
    group = os.getpgrp()
    parent = os.getppid()
    with suppress(OSError, ValueError, IndexError):  # the leader of the group may have ended
        status = Path(f"/proc/{group}/stat").read_bytes()
        parent = int(status.rpartition(b")")[2].split()[1])
    with suppress(OSError):
        return os.getsid(parent) == os.getsid(0) and os.getpgid(parent) != group
    return False


def terminal_mode() -> TerminalMode | None:
    """Return the attributes of the terminal at standard input.

    None unless spd is in its foreground.
    """
    with suppress(OSError, ValueError, termios.error):
        if os.tcgetpgrp(0) == os.getpgrp():
            return termios.tcgetattr(0)
    return None


def exit_on_engine_error(report: Callable[[Exception], object]) -> None:
    """Install a hook that reports an EngineError which ends a thread, and exits with its status.

    The main thread may hang by then, so the process exits at once. The terminal's mode is restored.
    """
    previous_hook = threading.excepthook
    terminal = None
    with suppress(OSError, ValueError, termios.error):  # also of a terminal without job control
        terminal = termios.tcgetattr(0)

    def handle_thread_exception(thread: threading.ExceptHookArgs) -> None:
        """Report an EngineError and exit; pass other exceptions on."""
        error = thread.exc_value
        if not isinstance(error, EngineError):
            previous_hook(thread)
            return
        with suppress(BaseException):
            if terminal is not None and termios.tcgetattr(0) != terminal:
                termios.tcsetattr(0, termios.TCSANOW, terminal)
                os.write(2, TERMINAL_RESET.encode())
            report(error)
        os._exit(error.exit_code)

    threading.excepthook = handle_thread_exception
