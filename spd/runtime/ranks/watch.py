"""The monitor of the other ranks' heartbeats, on rank 0.

It finds a rank that has died, has failed, or keeps the others waiting.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from spd.errors import EngineError
from spd.runtime.ranks.communicator import Heartbeat
from spd.runtime.ranks.follower import (
    EXIT_OTHER_RANK_ENDED,
    HANG_SECONDS,
    NO_ANSWER_TEXT,
    RankConnection,
)

TICK_SECONDS = 0.25
"""Seconds between two checks of rank 0, each of which sends a heartbeat to the others."""
HANG_TICKS = round(HANG_SECONDS / TICK_SECONDS)
"""Checks without a step while others wait, or without a message, after which a rank is given up.

Counted in checks, not by the clock: while the terminal has stopped the program, there are none."""
LAST_WORDS_TICKS = 8
"""Checks for which a rank that ended because of another one waits for the news of that one."""
KEPT_WAITING_TEXT = f"has kept the others waiting for {HANG_SECONDS} seconds"
NOTICE_SECONDS = 4
"""Seconds in which rank 0 notices that a rank has failed; if it does not, it hangs itself."""


def rank_error(rank: int, message: str, details: str = "") -> EngineError:
    """Return the error that ends a run: the rank, its message, and the end of its traceback."""
    return EngineError(f"rank {rank}: {message}", reason=details.strip().splitlines()[-12:])


@dataclass
class _RankStatus:
    """The latest known state of one rank."""

    connection: RankConnection | None = None
    process: subprocess.Popen[bytes] | None = None
    steps: int = 0
    is_waiting: bool = False
    silent_ticks: int = 0  # checks since its last message
    idle_ticks: int = 0  # checks since its last step
    ended_ticks: int = 0  # checks since it ended because of another rank

    def record_heartbeat(self, steps: int, is_waiting: bool) -> None:
        """Record the rank's steps so far, and True if it waits for other ranks."""
        self.idle_ticks = 0 if steps != self.steps else self.idle_ticks
        self.steps = steps
        self.is_waiting = is_waiting


class RankMonitor:
    """A thread that checks every rank; once one has failed it sets `failure` and calls `kill`.

    Each check sends the others a heartbeat. Where rank 0 does not notice a failure, because it
    hangs or has nothing to do, the thread ends with the EngineError that rank 0 would have raised:
    see `threading.excepthook`.
    """

    def __init__(
        self,
        connections: Mapping[int, RankConnection],
        processes: Mapping[int, subprocess.Popen[bytes]],
        heartbeat: Heartbeat,
        kill: Callable[[], None],
    ) -> None:
        self.failure: EngineError | None = None
        self.failed = threading.Event()
        """Set once a rank has failed, all others are ended and `failure` says how."""
        self._connections = list(connections.values())
        self._heartbeat = heartbeat
        self._kill = kill
        self._followers = {
            rank: _RankStatus(connection, processes.get(rank))
            for rank, connection in connections.items()
        }
        self._all = {0: _RankStatus(), **self._followers}
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._check_until_failure, name="spd ranks", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop checking: ranks that end from now on do so on purpose, and failures are known.

        Waits for the check under way: connections may be closed then, and their descriptors reused.
        """
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(4 * TICK_SECONDS)

    def _check_until_failure(self) -> None:
        """Check all ranks until one has failed or `close` is called; end the others on a failure.

        Raises the error where rank 0 takes no notice of it.
        """
        while not self._closing.is_set() and self.failure is None:
            for connection in self._connections:
                connection.send_heartbeat()
            with suppress(OSError):  # the connections were closed meanwhile
                self._receive_reports(time.monotonic() + TICK_SECONDS)
            if self._closing.is_set():
                return
            self.failure = self.failure or self._find_dead_rank() or self._find_stalled_rank()
        if self.failure is not None:
            self._kill()
            self.failed.set()
            if not self._closing.wait(NOTICE_SECONDS):
                raise self.failure

    def _receive_reports(self, deadline: float) -> None:
        """Receive and record the messages of all ranks until the deadline of the monotonic
        clock.
        """
        for status in self._all.values():
            status.silent_ticks += 1
            status.idle_ticks += 1
        while (remaining := deadline - time.monotonic()) > 0:
            senders = {
                status.connection: status
                for status in self._followers.values()
                if status.connection is not None
            }
            if not senders:
                time.sleep(remaining)
            for connection in wait(list(senders), remaining):
                assert isinstance(connection, RankConnection)
                self._receive_message(connection, senders[connection])
        self._all[0].record_heartbeat(self._heartbeat.steps, self._heartbeat.is_waiting)

    def _receive_message(self, connection: RankConnection, status: _RankStatus) -> None:
        """Receive one message of a rank and record it: its heartbeat in `status`, or its error."""
        try:
            kind, *payload = connection.recv()
        except (EOFError, OSError):
            status.connection = None
            return
        status.silent_ticks = 0
        if kind == "beat":
            steps, is_waiting = payload
            status.record_heartbeat(steps, is_waiting)
        elif self.failure is None:
            rank, message, details = payload
            self.failure = rank_error(rank, message, details)

    def _find_dead_rank(self) -> EngineError | None:
        """Return the error of a rank that is silent or has ended.

        A rank that ended because of another one counts only if no other is found.
        """
        for rank, status in self._followers.items():
            exit_status = status.process.poll() if status.process is not None else None
            if exit_status is None and status.connection is not None:
                if status.silent_ticks > HANG_TICKS:
                    return rank_error(rank, NO_ANSWER_TEXT)
                continue
            is_consequence = exit_status in (EXIT_OTHER_RANK_ENDED, None)
            if is_consequence and status.ended_ticks < LAST_WORDS_TICKS:
                # Its exit status, or the news of another rank, comes in a moment.
                status.ended_ticks += 1
                continue
            return rank_error(rank, exit_text(exit_status))
        return None

    def _find_stalled_rank(self) -> EngineError | None:
        """Return the error of a rank that has made no step while others wait for it."""
        is_stalled = all(status.idle_ticks > HANG_TICKS for status in self._all.values())
        all_steps = {rank: status.steps for rank, status in self._all.items()}
        late_ranks = [rank for rank, status in self._all.items() if not status.is_waiting]
        if not is_stalled or len(late_ranks) == len(self._all):
            return None
        slowest = min(late_ranks or all_steps, key=lambda rank: (all_steps[rank], rank))
        return rank_error(slowest, KEPT_WAITING_TEXT)


def exit_text(status: int | None) -> str:
    """Return how a rank has ended, by its exit status; None: not known."""
    if status is None or status == EXIT_OTHER_RANK_ENDED:
        return "its connection was lost"
    if status < 0:
        names = (number.name for number in signal.Signals if number == -status)
        return f"was ended by {next(names, -status)}"
    return f"ended with status {status}"
