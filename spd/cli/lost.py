"""Ends the program when its engine is lost while the main thread hangs or waits and cannot be told."""

from __future__ import annotations

import os
import termios
import threading
from collections.abc import Callable
from contextlib import suppress

from spd.errors import EngineError

CALM = "\x1b[?2004l\x1b[?25h\x1b[0m\r\n"
"""Pastes unmarked, the cursor shown, no colour, a row of its own: for a terminal that was being drawn on."""


def end_when_lost(show: Callable[[Exception], object]) -> None:
    """From now on an EngineError that ends a thread ends the program: shown, with the terminal put back."""
    usual, terminal = threading.excepthook, None
    with suppress(OSError, ValueError, termios.error):
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
