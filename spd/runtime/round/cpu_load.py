"""The load of other programs on this machine's CPUs, and a thread count that follows it.

A loop that threads share ends when the last thread does. Where another program keeps a CPU busy,
one thread waits for that CPU, and all the others wait for the thread. One thread fewer is then much
faster. No torch here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PROC_STAT_PATH = Path("/proc/stat")
MIN_READING_SECONDS = 0.1
"""Seconds between two readings, at least: the system counts in hundredths."""
NEGLIGIBLE_LOAD = 0.3
"""Load in CPUs that is ignored: the system's own work, and the error of a reading."""


def usable_cpus() -> tuple[int, ...]:
    """Return the numbers of the CPUs that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def busy_seconds(cpus: Sequence[int], source: Path = PROC_STAT_PATH) -> float:
    """Return the seconds since boot in which these CPUs, given by number, worked or the machine's
    host took them.

    source: a file like /proc/stat. 0 if it cannot be read.
    """
    ticks = 0
    names = {f"cpu{number}" for number in cpus}
    try:
        for line in source.read_text().splitlines():
            name, *fields = line.split()
            if name in names:
                ticks += sum(int(fields[column]) for column in (0, 2, 5, 6, 7))
            elif not name.startswith("cpu"):
                break
    except (OSError, ValueError, IndexError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


class OtherProcessLoad:
    """Measures how many of the usable CPUs other processes keep busy, from one reading to the
    next.
    """

    def __init__(self) -> None:
        self.cpus = usable_cpus()
        self.last_reading = self._measure_other_seconds()
        """The clock, and the CPU seconds of other processes, at the reading before."""

    def _measure_other_seconds(self) -> tuple[float, float]:
        """Return the clock in seconds, and the CPU seconds that other processes have worked by
        then.
        """
        return time.perf_counter(), busy_seconds(self.cpus) - time.process_time()

    def read_load(self) -> float:
        """Return the other processes' load in CPUs since the last reading, and begin a new reading.

        It lies between 0 and the number of usable CPUs.
        """
        last_time, last_seconds = self.last_reading
        now, seconds = self._measure_other_seconds()
        self.last_reading = (now, seconds)
        load = (seconds - last_seconds) / max(now - last_time, 1e-3)
        return min(max(0.0, load), float(len(self.cpus)))


def candidate_thread_counts(maximum: int) -> tuple[int, ...]:
    """Return the thread counts to choose from, ascending, from half of `maximum` to all."""
    counts = {max(1, maximum // 2), max(1, maximum * 3 // 4), max(1, maximum - 1), maximum}
    return tuple(sorted(counts))


class AdaptiveThreads(OtherProcessLoad):
    """Leaves other processes the CPUs that they use, up to half of the threads."""

    def __init__(self, counts: Sequence[int], set_threads: Callable[[int], None]) -> None:
        """counts: numbers of threads to choose from, ascending; the last is in use at first.

        set_threads: sets the number of threads that the kernels use.
        """
        super().__init__()
        self._counts = counts
        self._set_threads = set_threads
        self.count = self._counts[-1]

    def adapt_thread_count(self) -> None:
        """Set the number of threads to that of the free CPUs, at most every `MIN_READING_SECONDS`.

        Reads the load of other processes. Leaves the number where no round ran for a while.
        """
        age = time.perf_counter() - self.last_reading[0]
        if age < MIN_READING_SECONDS:
            return
        load = self.read_load()
        if age > 3 * MIN_READING_SECONDS:  # no rounds ran meanwhile: the load may be over
            return
        free = len(self.cpus) - math.ceil(load - NEGLIGIBLE_LOAD)
        count = max((count for count in self._counts if count <= free), default=self._counts[0])
        if count != self.count:
            self.count = count
            self._set_threads(count)
