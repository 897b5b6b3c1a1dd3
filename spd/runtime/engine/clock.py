"""The clock that speeds are measured by: seconds in which this process could run."""

from __future__ import annotations

import time

_stopped = 0.0  # seconds in which the process was stopped


def now() -> float:
    """Return seconds since an arbitrary moment, less those in which the process was stopped."""
    return time.perf_counter() - _stopped


def exclude(seconds: float) -> None:
    """Exclude seconds in which the process was stopped, as by Ctrl-Z."""
    global _stopped
    _stopped += seconds
