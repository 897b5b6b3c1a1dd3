"""Who runs next: first come, first served, into free slots. No torch here."""

from __future__ import annotations

from collections import deque

from spd.errors import UsageError
from spd.runtime.request import Request
from spd.runtime.sequence import Sequence


class Scheduler:
    """Owns the waiting line and the slots."""

    def __init__(self, slots: int) -> None:
        self.waiting: deque[Request] = deque()
        self.slots: list[Sequence | None] = [None] * slots
        self._epoch = 0

    def add(self, request: Request) -> None:
        """Queue a request; ids are unique among waiting and running ones."""
        if any(request.id == other for other in self.ids()):
            raise UsageError(f"request id {request.id!r} is already running")
        self.waiting.append(request)

    def ids(self) -> list[str]:
        """Ids of waiting and running requests."""
        return [r.id for r in self.waiting] + [s.request.id for s in self.running()]

    def running(self) -> list[Sequence]:
        """Sequences in slots, in slot order."""
        return [sequence for sequence in self.slots if sequence is not None]

    def free_slot(self) -> int | None:
        """The lowest free slot, if a request waits for one."""
        return next((i for i, s in enumerate(self.slots) if s is None), None) if self.waiting else None

    def next_epoch(self) -> int:
        """A number that no earlier occupant of any slot had."""
        self._epoch += 1
        return self._epoch

    def withdraw(self, request_id: str) -> bool:
        """Take a waiting request out of the line; False when it is not waiting."""
        kept = deque(r for r in self.waiting if r.id != request_id)
        found = len(kept) < len(self.waiting)
        self.waiting = kept
        return found
