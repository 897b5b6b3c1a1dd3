"""The device side of rank 0: each call is made on the other ranks too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from spd.errors import EngineError
from spd.runtime.engine.assembly import assemble
from spd.runtime.load.progress import LoadProgress, Progress
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.ranks.crew import Crew
from spd.runtime.ranks.rendezvous import Rendezvous
from spd.runtime.round.round_queue import Fetched, RoundQueue, Ticket

CLEARING = ("retire", "clear", "restart")
"""What is done after an end: no longer worth an error where everything has ended."""
ORDERS = (
    *("place", "show_pages", "write", "save", "flush", "allow", "set_active", "launch", "capture"),
    *CLEARING,
)


class LeadingQueue:
    """A `RoundQueue` whose orders are sent to all before they are carried out here, in one order for all."""

    def __init__(self, queue: RoundQueue, crew: Crew) -> None:
        self._queue, self.crew = queue, crew

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._queue, name)
        if name not in ORDERS:
            return found

        def ordered(*args: Any) -> Any:
            if self.crew.broken and name in CLEARING:
                return None
            done = self.crew.lead(name, args, lambda: found(*args))
            return done._replace(fetch=self._waiting(done.fetch)) if isinstance(done, Ticket) else done

        return ordered

    def _waiting(self, fetch: Callable[[], Fetched]) -> Callable[[], Fetched]:
        """Fetch what a round emitted. On a GPU this is where a rank that hangs is felt."""

        def fetched() -> Fetched:
            if self.crew.broken:
                raise EngineError("the ranks lost each other")
            self.crew.pulse.waiting = True
            try:
                return self.crew.guard(fetch)
            finally:
                self.crew.pulse.waiting = False

        return fetched

    def close(self) -> None:
        """End the other ranks."""
        self.crew.close()


def lead(plan: EnginePlan, usable_vocab: int, progress: Progress | None) -> Any:
    """Start the ranks that a plan names, or meet them, and load this one's part; returns a `LeadingQueue`."""
    place = plan.wishes.rendezvous
    crew = Crew(plan, None if place is None else Rendezvous.parse(place))

    def heard(news: LoadProgress) -> None:
        crew.pulse.beat()
        crew.check()
        if progress is not None:
            progress(news)

    try:
        ranks = crew.open(usable_vocab)
        own = crew.guard(lambda: assemble(plan, usable_vocab, heard, ranks))
    except BaseException:
        crew.close()
        raise
    queue = LeadingQueue(own, crew)
    weakref.finalize(queue, crew.close)
    return queue
