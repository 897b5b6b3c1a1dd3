"""The engine's record of one request, from the waiting line to its end. No torch here."""

from __future__ import annotations

import time
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

from spd.runtime.engine.detokenizer import Detokenizer
from spd.runtime.engine.draft_length import Acceptance
from spd.runtime.engine.grammar import Grammar
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.engine.request import Request
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.spans import Run

NO_SLOT = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. The host knows committed tokens late, so it keeps an upper bound.

    `in_flight` sums up the widths (k + 1) of rounds enqueued and not yet read. With slots, for its fields
    are read and written in every round.
    """

    request: Request
    length_limit: int
    stop_ids: tuple[int, ...]
    detokenizer: Detokenizer
    needs: SamplerClass
    grammar: Grammar | None = None
    """Keeps it out of the rounds between one it took part in and the arrival of its next masks."""
    runs: list[Run] = field(default_factory=list)
    """Which program writes the prompt's positions; what follows is written by tiles."""
    slot: int = NO_SLOT
    epoch: int = 0
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Of the full pages that a prefill will have written."""
    prefilled: int = 0
    """Positions whose cache is there; all but the last token's before it may decode."""
    checkpoint: int | None = None
    """The place of the states as of `prefilled` that it begins with, where its model keeps some."""
    stops: tuple[int, ...] = ()
    """Positions at which its prefill pauses, for a checkpoint."""
    placed: bool = False
    """Whether the device knows of its stay in the slot."""
    active: bool = False
    """Whether it takes part in rounds: prefilled, and waiting for nothing."""
    generated: list[int] = field(default_factory=list)
    name: str = field(init=False)
    plain: bool = field(init=False)
    """Whether its text ends by ids and length alone: nothing else looks at its tokens."""
    length: int = field(init=False)
    """Committed tokens the host knows of, the prompt included."""
    in_flight: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    arrived_at: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    first_token_at: float | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafted_for: bool = False
    """Whether the round read next could have held drafts: not the first after a prefill."""
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.name = self.request.id
        self.length = len(self.request.prompt_ids)
        self.plain = self.grammar is None and not self.request.params.stop

    def commit(self, tokens: Listed[int], drafts: int, accepted: int, now: float) -> None:
        """Add a round's tokens, read at `now` in seconds; so many of its drafts are among them."""
        metrics, count = self.metrics, len(tokens)
        metrics.outcomes[drafts, accepted] += 1
        if not count:
            return
        self.generated += tokens
        self.length += count
        metrics.completion_tokens += count
        metrics.emissions += 1
        if self.first_token_at is None:
            self.first_token_at = now
            metrics.first_tokens = count
            metrics.first_token_ms = 1000 * (now - self.arrived_at)
        metrics.predicted_ms = 1000 * (now - self.first_token_at)

    @property
    def bound(self) -> int:
        """At most this many tokens are committed once every enqueued round has run."""
        return min(self.length + self.in_flight, self.length_limit)

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
