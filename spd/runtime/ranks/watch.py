"""Signs of life between rank 0 and each other rank: what each side makes of them, and of their absence.

Rank 0 watches which rank has died, has failed, or keeps the others waiting; every other rank watches rank 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from spd.errors import EngineError
from spd.runtime.ranks.communicator import Pulse

TICK = 0.25
"""Seconds between two looks of rank 0, each of which is a sign of life to the others."""
HANG_SECONDS = 15
HANG_TICKS = round(HANG_SECONDS / TICK)
"""Looks without a step while others wait, or without a word, after which a rank is given up.

Counted in looks, not by the clock: while the terminal has stopped the program, there are no looks."""
BEAT_SECONDS = 0.5
HANG_BEATS = round(HANG_SECONDS / BEAT_SECONDS)
AWAKE_BEATS = 6
"""Beats that rank 0 has, once it has been woken, to end the run in its own words."""
COLLATERAL = 75
"""The exit status of a rank that ends because another one did."""
LEADERLESS = 76
"""The exit status of a rank that has given up rank 0."""
SILENCE = f"has not answered for {HANG_SECONDS} seconds"
LAST_WORDS_TICKS = 8
"""Looks for which a rank that ended because of another one waits for the news of that one."""
NOTICE_SECONDS = 4
"""In which rank 0 notices that a rank has failed; if it does not, it hangs itself."""


@dataclass(frozen=True)
class Failure:
    """Why a run ended: a rank's number, what happened in words, and its traceback where it had one."""

    rank: int
    words: str
    details: str = ""

    def error(self) -> EngineError:
        """What is said of it."""
        last = self.details.strip().splitlines()[-12:]
        return EngineError(f"rank {self.rank}: {self.words}", reason=last)


@dataclass
class _Member:
    """What is known of one rank."""

    line: Connection | None
    process: subprocess.Popen[bytes] | None
    steps: int = 0
    waiting: bool = False
    quiet: int = 0
    """Looks since its last word."""
    still: int = 0
    """Looks since its last step."""
    gone: int = 0
    """Looks since it ended because of another rank."""


class Watch:
    """A thread that looks at every rank; `failure` once one has failed, and then all are ended by `kill`.

    Each look is a sign of life for the others too, sent by `signs`. Where rank 0 does not notice a failure,
    because it hangs or has nothing to do, the thread ends with the EngineError that rank 0 would have raised:
    see `threading.excepthook`.
    """

    def __init__(
        self,
        lines: Mapping[int, Connection],
        signs: Mapping[int, Connection],
        processes: Mapping[int, subprocess.Popen[bytes]],
        pulse: Pulse,
        kill: Callable[[], None],
    ) -> None:
        self.failure: Failure | None = None
        self.failed = threading.Event()
        self._signs, self._pulse, self._kill = list(signs.values()), pulse, kill
        self._members = {rank: _Member(line, processes.get(rank)) for rank, line in lines.items()}
        self._own = _Member(None, None)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spd ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more: what ends from now on was meant to, and what has failed is known.

        Waits for the look under way: the lines may be closed then, and their descriptors used anew.
        """
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(4 * TICK)

    def _run(self) -> None:
        while not self._closing.is_set() and self.failure is None:
            give_signs(self._signs)
            with suppress(OSError):  # the lines were closed meanwhile
                self._hear(time.monotonic() + TICK)
            if self._closing.is_set():
                return
            failure = self.failure or self._dead() or self._stalled()
            if failure is not None:
                self.failure = failure
        if self.failure is not None:
            self._kill()
            self.failed.set()
            if not self._closing.wait(NOTICE_SECONDS):
                raise self.failure.error()

    def _hear(self, until: float) -> None:
        """Take in what the ranks say until then."""
        for member in (*self._members.values(), self._own):
            member.quiet += 1
            member.still += 1
        while (left := until - time.monotonic()) > 0:
            open_lines = {m.line: rank for rank, m in self._members.items() if m.line is not None}
            heard = wait(list(open_lines), left)
            if not open_lines:
                time.sleep(left)
            for line in heard:
                assert isinstance(line, Connection)
                self._take(open_lines[line], line)
        if self._pulse.steps != self._own.steps:
            self._own.steps, self._own.still = self._pulse.steps, 0
        self._own.waiting = self._pulse.waiting

    def _take(self, rank: int, line: Connection) -> None:
        member = self._members[rank]
        try:
            kind, *rest = line.recv()
        except (EOFError, OSError):
            member.line = None
            return
        member.quiet = 0
        if kind == "beat":
            if rest[0] != member.steps:
                member.steps, member.still = rest[0], 0
            member.waiting = rest[1]
        elif kind == "silent":
            self.failure = self.failure or Failure(0, SILENCE)
        elif kind == "error":
            self.failure = self.failure or Failure(*rest)

    def _dead(self) -> Failure | None:
        """A rank that ended by itself; one that ended because of another only if no other is found."""
        for rank, member in self._members.items():
            status = member.process.poll() if member.process is not None else None
            if status is None and member.line is not None:
                continue
            if status in (COLLATERAL, None) and member.gone < LAST_WORDS_TICKS:
                member.gone += 1  # its own status, or the news of another one, comes in a moment
                continue
            return Failure(rank, end_words(status))
        return None

    def _stalled(self) -> Failure | None:
        """A rank that has not said a word, or that has not moved while others wait for it."""
        for rank, member in self._members.items():
            if member.quiet > HANG_TICKS:
                return Failure(rank, SILENCE)
        everyone = {0: self._own, **self._members}
        waiting = [member for member in everyone.values() if member.waiting and member.still > HANG_TICKS]
        moving = any(member.still <= HANG_TICKS for member in everyone.values())
        if not waiting or moving:
            return None
        late = [rank for rank, member in everyone.items() if not member.waiting] or list(everyone)
        rank = min(late, key=lambda r: (everyone[r].steps, r))
        return Failure(rank, f"has kept the others waiting for {HANG_SECONDS} seconds")


def give_signs(signs: Iterable[Connection]) -> None:
    """Let other ranks know that this one runs; one that is gone is found by other means."""
    for line in signs:
        with suppress(OSError):
            line.send_bytes(b"")


def end_words(status: int | None) -> str:
    """How a rank has ended, by its exit status; None: not known."""
    if status is None or status == COLLATERAL:
        return "its connection was lost"
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return f"ended with status {status}"


# -- in the other ranks ----------------------------------------------------------------------


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

    Rank 0 may be silent because it was stopped. Where it is this process's parent, `leader`, it is
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
