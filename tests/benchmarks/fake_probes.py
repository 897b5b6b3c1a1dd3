"""Probes that do what probes must not, for the test of their isolation."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def work() -> dict[str, Any]:
    """Answer."""
    return {"answer": 42}


def fail() -> dict[str, Any]:
    """Raise."""
    raise ValueError("on purpose")


def die() -> dict[str, Any]:
    """End as a segmentation fault or an out-of-memory kill would."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hang() -> dict[str, Any]:
    """Never answer."""
    print("said before hanging", flush=True)
    time.sleep(600)
    return {}
