"""Probes that do what probes must not, for the test of their isolation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any


def die() -> dict[str, Any]:
    """End as a segmentation fault or an out-of-memory kill would."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def grow_and_fail() -> Iterator[dict[str, Any]]:
    """Find something, then raise."""
    yield {"found": [1]}
    raise ValueError("on purpose")


def grow_forever() -> Iterator[dict[str, Any]]:
    """Find ever more."""
    numbers: list[float] = []
    while True:
        numbers.append(1 / 3)
        time.sleep(0.05)
        yield {"found": numbers}


def say(word: str) -> dict[str, Any]:
    """Answer what the reference binds."""
    return {"word": word}
