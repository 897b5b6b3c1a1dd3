"""The device side of rank 0: each call is made on the other ranks too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from spd.errors import EngineError
from spd.runtime.engine.assembly import Assembly, assemble
from spd.runtime.engine.device_side import DeviceSide
from spd.runtime.load.progress import LoadProgress, Progress
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.ranks.crew import Crew
from spd.runtime.ranks.rendezvous import Rendezvous
from spd.runtime.round.round_queue import RoundResult, Ticket

CLEARING = ("retire", "clear", "restart")
"""What is done after an end: no longer worth an error where everything has ended."""
ORDERS = (
    *("place", "show_pages", "write", "save", "flush", "allow", "set_active", "launch", "capture"),
    *CLEARING,
)


class LeadingDevice(DeviceSide):
    """Sends every order before it is carried out here, in one order for all."""

    def __init__(self, parts: Assembly, plan: EnginePlan, crew: Crew) -> None:
        super().__init__(parts, plan)
        self.crew = crew
        for name in ORDERS:
            setattr(self, name, self._leading(name, getattr(self, name)))

    def _leading(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def ordered(*args: Any) -> Any:
            if self.crew.broken and name in CLEARING:
                return None
            return self.crew.lead(name, args, lambda: act(*args))

        return ordered

    def read(self, ticket: Ticket) -> RoundResult:
        """See `DeviceSide`. On a GPU this is where a rank that hangs is felt."""
        if self.crew.broken:
            raise EngineError("the ranks lost each other")
        self.crew.pulse.waiting = True
        try:
            return self.crew.guard(ticket.read)
        finally:
            self.crew.pulse.waiting = False

    def close(self) -> None:
        """End the other ranks."""
        self.crew.close()


def lead(
    plan: EnginePlan,
    usable_vocab: int,
    progress: Progress | None,
    rendezvous: str | None = None,
) -> LeadingDevice:
    """Start the ranks that a plan names, or meet them, and load this one's part beside them."""
    crew = Crew(plan, None if rendezvous is None else Rendezvous.parse(rendezvous))

    def heard(news: LoadProgress) -> None:
        crew.pulse.beat()
        crew.check()
        if progress is not None:
            progress(news)

    try:
        ranks = crew.open(usable_vocab)
        parts = crew.guard(lambda: assemble(plan, usable_vocab, heard, ranks))
    except BaseException:
        crew.close()
        raise
    device = LeadingDevice(parts, plan, crew)
    weakref.finalize(device, crew.close)
    return device
