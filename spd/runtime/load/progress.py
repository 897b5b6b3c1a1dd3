"""The progress of loading, for a progress bar. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["read", "pack", "download"]


@dataclass(frozen=True)
class LoadProgress:
    """A report of a phase: `done` of `total`, in bytes."""

    phase: Phase
    done: int
    total: int


Progress = Callable[[LoadProgress], None]


class LoadMeter:
    """Counts the bytes of weights that several models load together, and reports them.

    report: called in the thread that builds the engine. total: the bytes of all of them.
    """

    def __init__(self, report: Progress | None = None, total: int = 0) -> None:
        self.report = report
        self.total = total
        self._done: dict[Phase, int] = {"read": 0, "pack": 0}

    def advance(self, nbytes: int, phase: Phase = "read") -> None:
        """Count and report more bytes of weights that finished a phase."""
        self._done[phase] += nbytes
        if self.report is not None:
            self.report(LoadProgress(phase, self._done[phase], self.total))
