"""The engine's record of one request, from the waiting line to its end. No torch here."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from spd.runtime.detokenizer import Detokenizer
from spd.runtime.draft_length import Acceptance
from spd.runtime.grammar import Grammar
from spd.runtime.metrics import RequestMetrics
from spd.runtime.request import Request
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.spans import Run

NO_SLOT = -1


@dataclass(eq=False)
class Sequence:
    """One request. The host knows committed tokens late, so it keeps an upper bound.

    `in_flight` holds the widths (k + 1) of rounds enqueued and not yet read.
    """

    request: Request
    length_limit: int
    stop_ids: tuple[int, ...]
    detokenizer: Detokenizer
    needs: SamplerClass
    grammar: Grammar | None = None
    """Keeps it out of the rounds between one it took part in and the arrival of its next masks."""
    caught_up: int = 0
    """How often the drafter's cache had been brought up when it was last silenced for its masks."""
    runs: list[Run] = field(default_factory=list)
    """Which program writes the prompt's positions; what follows is written by tiles."""
    slot: int = NO_SLOT
    epoch: int = 0
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Of the full pages that a prefill will have written."""
    prefilled: int = 0
    """Positions whose cache is there; all but the last token's before it may decode."""
    placed: bool = False
    """Whether the device knows of its stay in the slot."""
    active: bool = False
    """Whether it takes part in rounds: prefilled, and waiting for nothing."""
    generated: list[int] = field(default_factory=list)
    in_flight: deque[int] = field(default_factory=deque)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    arrived_at: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    rounds_read: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafted_for: bool = False
    """Whether the round read next could have held drafts: not the first after a prefill."""
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """Committed tokens the host knows of, the prompt included."""
        return len(self.request.prompt_ids) + len(self.generated)

    @property
    def bound(self) -> int:
        """At most this many tokens are committed once every enqueued round has run."""
        return min(self.length + sum(self.in_flight), self.length_limit)

    def draft_cap(self, most: int) -> int:
        """How many drafts a round it wants, of `most`."""
        wanted = self.request.draft_max
        return most if wanted is None else min(wanted, most)

    @property
    def prefill_end(self) -> int:
        """Positions that a prefill writes: all but the last token's, which a round feeds."""
        return self.length - 1

    def tokens(self) -> list[int]:
        """Prompt and generated ids, in order."""
        return [*self.request.prompt_ids, *self.generated]
