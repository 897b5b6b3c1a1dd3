"""The engine's record of one running request. No torch here."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from spd.runtime.detokenizer import Detokenizer
from spd.runtime.metrics import RequestMetrics
from spd.runtime.request import Request
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.spans import Run


@dataclass
class Sequence:
    """One request in a slot. The host knows committed tokens late, so it keeps an upper bound.

    `in_flight` holds the widths (k + 1) of rounds enqueued and not yet read.
    """

    request: Request
    slot: int
    epoch: int
    length_limit: int
    detokenizer: Detokenizer
    needs: SamplerClass
    pages: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    in_flight: deque[int] = field(default_factory=deque)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    accepted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    rounds_read: int = 0
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """Committed tokens the host knows of, the prompt included."""
        return len(self.request.prompt_ids) + len(self.generated)

    @property
    def bound(self) -> int:
        """At most this many tokens are committed once every enqueued round has run."""
        return min(self.length + sum(self.in_flight), self.length_limit)

    def tokens(self) -> list[int]:
        """Prompt and generated ids, in order."""
        return [*self.request.prompt_ids, *self.generated]
