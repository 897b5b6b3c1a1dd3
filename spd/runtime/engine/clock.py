"""The clock that speeds are measured by: seconds in which this process could run."""

from __future__ import annotations

import time

_stopped_seconds = 0.0  # seconds in which the process was stopped


def now() -> float:
    """Return seconds since an arbitrary moment, less those in which the process was stopped."""
    return time.perf_counter() - _stopped_seconds


def exclude_seconds(seconds: float) -> None:
    """Subtract seconds in which the process was stopped, as by Ctrl-Z, from all later times of
    `now`.
    """
    global _stopped_seconds
    _stopped_seconds += seconds
