"""Signs of life of the other ranks: what rank 0 makes of them, and of their absence.

Rank 0 watches which rank has died, has failed, or keeps the others waiting.
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
    NO_ANSWER,
    RankConnection,
)

TICK = 0.25  # seconds between two looks of rank 0, each of which is a sign of life to the others
HANG_TICKS = round(HANG_SECONDS / TICK)
"""Looks without a step while others wait, or without a word, after which a rank is given up.

Counted in looks, not by the clock: while the terminal has stopped the program, there are no looks."""
LAST_WORDS_TICKS = 8
"""Looks for which a rank that ended because of another one waits for the news of that one."""
KEPT_WAITING = f"has kept the others waiting for {HANG_SECONDS} seconds"
NOTICE_SECONDS = (
    4  # in which rank 0 notices that a rank has failed; if it does not, it hangs itself
)


def rank_error(rank: int, words: str, details: str = "") -> EngineError:
    """Why a run ended: a rank's number, what happened, and the end of its traceback where it had one."""
    return EngineError(f"rank {rank}: {words}", reason=details.strip().splitlines()[-12:])


@dataclass
class _RankStatus:
    """What is known of one rank."""

    line: RankConnection | None = None
    process: subprocess.Popen[bytes] | None = None
    steps: int = 0
    waiting: bool = False
    quiet: int = 0  # looks since its last word
    still: int = 0  # looks since its last step
    gone: int = 0  # looks since it ended because of another rank

    def beat(self, steps: int, waiting: bool) -> None:
        """Take in how far it is."""
        self.still = 0 if steps != self.steps else self.still
        self.steps = steps
        self.waiting = waiting


class RankMonitor:
    """A thread that looks at every rank; `failure` once one has failed, and then all are ended by `kill`.

    Each look is a sign of life for the others too. Where rank 0 does not notice a failure, because it hangs
    or has nothing to do, the thread ends with the EngineError that rank 0 would have raised: see
    `threading.excepthook`.
    """

    def __init__(
        self,
        lines: Mapping[int, RankConnection],
        processes: Mapping[int, subprocess.Popen[bytes]],
        pulse: Heartbeat,
        kill: Callable[[], None],
    ) -> None:
        self.failure: EngineError | None = None
        self.failed = threading.Event()
        self._lines = list(lines.values())
        self._pulse = pulse
        self._kill = kill
        others = {rank: _RankStatus(line, processes.get(rank)) for rank, line in lines.items()}
        self._others = others
        self._all = {0: _RankStatus(), **others}
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
            for line in self._lines:
                line.send_heartbeat()
            with suppress(OSError):  # the lines were closed meanwhile
                self._hear(time.monotonic() + TICK)
            if self._closing.is_set():
                return
            self.failure = self.failure or self._dead() or self._stalled()
        if self.failure is not None:
            self._kill()
            self.failed.set()
            if not self._closing.wait(NOTICE_SECONDS):
                raise self.failure

    def _hear(self, until: float) -> None:
        """Take in what the ranks say until then."""
        for member in self._all.values():
            member.quiet += 1
            member.still += 1
        while (left := until - time.monotonic()) > 0:
            talking = {m.line: m for m in self._others.values() if m.line is not None}
            if not talking:
                time.sleep(left)
            for line in wait(list(talking), left):
                self._take(talking[line])  # type: ignore[index]
        self._all[0].beat(self._pulse.steps, self._pulse.waiting)

    def _take(self, member: _RankStatus) -> None:
        assert member.line is not None
        try:
            kind, *rest = member.line.recv()
        except (EOFError, OSError):
            member.line = None
            return
        member.quiet = 0
        if kind == "beat":
            member.beat(*rest)
        else:
            self.failure = self.failure or rank_error(*rest)

    def _dead(self) -> EngineError | None:
        """A rank that is silent, or ended; one that ended because of another only if no other is found."""
        for rank, member in self._others.items():
            status = member.process.poll() if member.process is not None else None
            if status is None and member.line is not None:
                if member.quiet > HANG_TICKS:
                    return rank_error(rank, NO_ANSWER)
                continue
            if status in (EXIT_OTHER_RANK_ENDED, None) and member.gone < LAST_WORDS_TICKS:
                member.gone += 1  # its own status, or the news of another one, comes in a moment
                continue
            return rank_error(rank, exit_text(status))
        return None

    def _stalled(self) -> EngineError | None:
        """A rank that has not moved while others wait for it."""
        still = all(member.still > HANG_TICKS for member in self._all.values())
        late = {rank: member.steps for rank, member in self._all.items() if not member.waiting}
        if not still or len(late) == len(self._all):
            return None
        late = late or {rank: member.steps for rank, member in self._all.items()}
        return rank_error(min(late, key=lambda rank: (late[rank], rank)), KEPT_WAITING)


def exit_text(status: int | None) -> str:
    """How a rank has ended, by its exit status; None: not known."""
    if status is None or status == EXIT_OTHER_RANK_ENDED:
        return "its connection was lost"
    if status < 0:
        return f"was ended by {next((each.name for each in signal.Signals if each == -status), -status)}"
    return f"ended with status {status}"
