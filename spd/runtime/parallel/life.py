"""Signs of life between rank 0 and each other rank, and what a rank does when rank 0 gives none."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

TICK = 0.25
"""Seconds between two looks of rank 0, each of which is a sign of life to the others."""
HANG_SECONDS = 15
HANG_TICKS = round(HANG_SECONDS / TICK)
"""Looks without a step while others wait, or without a word, after which a rank is given up.

Counted in looks, not by the clock: while the terminal has stopped the program, nobody looks."""
BEAT_SECONDS = 0.5
HANG_BEATS = round(HANG_SECONDS / BEAT_SECONDS)
AWAKE_BEATS = 6
"""Beats that rank 0 has, once it has been woken, to end the run in its own words."""
COLLATERAL = 75
"""The exit status of a rank that ends because another one did."""
LEADERLESS = 76
"""The exit status of a rank that has given up rank 0."""
SILENCE = f"has not answered for {HANG_SECONDS} seconds"


class Line:
    """The line to rank 0, which two threads write to."""

    def __init__(self, connection: Any) -> None:
        self.connection, self._lock = connection, threading.Lock()

    def send(self, *message: Any) -> None:
        """Say something to rank 0. Raises OSError where it is gone."""
        with self._lock:
            self.connection.send(message)


def keep_beating(
    line: Line, signs: Any, pulse: Any, leader: int | None, leave: Callable[[int], None]
) -> None:
    """Tell rank 0 how far this rank is, and listen to its own signs of life; `leave` ends this process.

    Rank 0 may be silent because somebody has stopped it. Where it is this process's parent, `leader`, it is
    woken and told, so that it can end the run itself.
    """
    stop, parent, quiet = threading.Event(), os.getppid(), 0
    while not stop.wait(BEAT_SECONDS):
        if os.getppid() != parent:
            leave(COLLATERAL)
        try:
            quiet = 0 if _heard(signs) else quiet + 1
            if quiet == HANG_BEATS:
                line.send("silent")
            line.send("beat", pulse.steps, pulse.waiting)
        except (EOFError, OSError):
            leave(COLLATERAL)
        if quiet == HANG_BEATS and leader == parent:
            with suppress(OSError):
                os.kill(parent, signal.SIGCONT)
        if quiet >= HANG_BEATS + AWAKE_BEATS:
            leave(LEADERLESS)


def _heard(signs: Any) -> bool:
    """Whether rank 0 has given a sign since the last look. Raises EOFError where it is gone."""
    heard = False
    while signs.poll():
        signs.recv_bytes()
        heard = True
    return heard
