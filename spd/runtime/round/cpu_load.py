"""The load that other programs put on this machine's CPUs, and the number of threads that follows it.

A loop shared among threads ends when the last thread does. Where another program keeps a CPU busy, one thread
waits for it, and all the others wait for that thread. One thread fewer is then much faster. No torch here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

STAT = Path("/proc/stat")
WINDOW = 0.1  # seconds between two looks: the system counts in hundredths
SLIGHT = 0.3
"""CPUs' worth of load that changes nothing: the system's own work, and what a look may be wrong by."""


def usable_cpus() -> tuple[int, ...]:
    """The numbers of the CPUs that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def busy_seconds(cpus: Sequence[int], source: Path = STAT) -> float:
    """Seconds that these CPUs have worked or were taken by the machine's host; 0 where nothing tells."""
    ticks = 0
    wanted = {f"cpu{number}" for number in cpus}
    try:
        for line in source.read_text().splitlines():
            name, *fields = line.split()
            if name in wanted:
                ticks += sum(int(fields[column]) for column in (0, 2, 5, 6, 7))
            elif not name.startswith("cpu"):
                break
    except (OSError, ValueError, IndexError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


class OtherProcessLoad:
    """How many CPUs other programs kept busy since the last reading, or since it was made."""

    def __init__(self) -> None:
        self.cpus = usable_cpus()
        self.last = self._look()

    def _look(self) -> tuple[float, float]:
        """The time, and how long others have worked until then, in seconds."""
        return time.perf_counter(), busy_seconds(self.cpus) - time.process_time()

    def read(self) -> float:
        """CPUs, from 0 to all that this process may use."""
        began, before = self.last
        at, others = self._look()
        self.last = at, others
        return min(max(0.0, (others - before) / max(at - began, 1e-3)), float(len(self.cpus)))


def thread_counts(most: int) -> tuple[int, ...]:
    """Numbers of threads to choose from, ascending: half of `most` at the least."""
    return tuple(sorted({max(1, most // 2), max(1, most * 3 // 4), max(1, most - 1), most}))


class AdaptiveThreads(OtherProcessLoad):
    """Leaves other programs the CPUs that they use, as far as half of the threads."""

    def __init__(self, counts: Sequence[int], use: Callable[[int], None]) -> None:
        """counts: numbers of threads that give the same bits, ascending; the last is the usual one."""
        super().__init__()
        self._counts = counts
        self._use = use
        self.count = self._counts[-1]

    def follow(self) -> None:
        """Look at the load if it is time to, and use the threads that have a CPU of their own."""
        age = time.perf_counter() - self.last[0]
        if age < WINDOW:
            return
        load = self.read()
        if age > 3 * WINDOW:  # no rounds ran meanwhile: what others did then may be over
            return
        free = len(self.cpus) - math.ceil(load - SLIGHT)
        count = max((count for count in self._counts if count <= free), default=self._counts[0])
        if count != self.count:
            self.count = count
            self._use(count)
