"""The clock of speeds: seconds in which this process could run."""

from __future__ import annotations

import time

_stopped = 0.0


def now() -> float:
    """Return seconds since some moment, without those in which the process was stopped."""
    return time.perf_counter() - _stopped


def exclude(seconds: float) -> None:
    """Leave out a time in which the process was stopped, as by Ctrl-Z."""
    global _stopped
    _stopped += seconds
