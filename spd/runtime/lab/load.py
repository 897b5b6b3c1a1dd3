"""Requests driven through an engine by a clock: one at a time, a fixed number at a time, or as they come.

Definitions are those of vLLM's `bench serve`: TTFT runs from a request's arrival, waiting included;
TPOT is the time after the first chunk over the tokens after it; ITL is the gap between two chunks, and
with speculation a chunk holds several tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spd.runtime.engine.driver import Gathered, drive
from spd.runtime.engine.metrics import RequestMetrics, RoundRecord
from spd.runtime.engine.request import Event, Request


class Decoder(Protocol):
    """As much of an engine as a load needs."""

    trace: Callable[[RoundRecord], None] | None

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[Event]:
        """Go on by one round."""
        ...

    def metrics(self, request_id: str) -> RequestMetrics:
        """Counters of a request."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        ...


@dataclass
class Timeline(Gathered):
    """When a request arrived, in the seconds of `chunks`, and what came of it."""

    request: Request = field(kw_only=True)
    arrived: float = field(kw_only=True)

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token; from arrival to nothing is NaN."""
        return self.chunks[0][0] - self.arrived if self.chunks else float("nan")

    @property
    def decode_seconds(self) -> float:
        """From the first chunk to the last."""
        return self.chunks[-1][0] - self.chunks[0][0] if self.chunks else 0.0

    @property
    def tokens_after_first(self) -> int:
        """Tokens of every chunk but the first."""
        return sum(count for _, count in self.chunks[1:])

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first chunk; None when there was none."""
        return self.decode_seconds / self.tokens_after_first if self.tokens_after_first else None

    def gaps(self) -> Iterator[float]:
        """Seconds between consecutive chunks."""
        for (before, _), (after, _) in zip(self.chunks, self.chunks[1:], strict=False):
            yield after - before


@dataclass
class Pass:
    """Everything that one run of some requests gave."""

    timelines: list[Timeline]
    records: list[RoundRecord]
    metrics: list[RequestMetrics]
    seconds: float


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second on average, independent of each other."""
    draws = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(count):
        now += draws.expovariate(rate)
        arrivals.append(now)
    return arrivals


def run_pass(
    engine: Decoder,
    requests: Sequence[Request],
    *,
    concurrency: int = 1,
    arrivals: Sequence[float] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Pass:
    """Run requests to their end: `concurrency` at a time, or each at its second in `arrivals`.

    check: called between steps; whatever it raises ends the pass.
    """
    timelines = {request.id: Timeline(request=request, arrived=0.0) for request in requests}
    metrics: dict[str, RequestMetrics] = {}
    records: list[RoundRecord] = []
    engine.trace = records.append
    waiting, running = list(requests), 0
    began = time.perf_counter()

    def add_due() -> bool:
        nonlocal running
        while waiting or engine.has_work:
            now = time.perf_counter()
            while waiting and _is_due(
                len(requests) - len(waiting), now - began, running, concurrency, arrivals
            ):
                request = waiting.pop(0)
                due = arrivals[len(requests) - len(waiting) - 1] if arrivals is not None else now - began
                timelines[request.id].arrived = began + due
                engine.add(request)
                running += 1
            if engine.has_work:
                return True
            assert arrivals is not None
            time.sleep(max(0.0, began + arrivals[len(requests) - len(waiting)] - now))
        return False

    try:
        for events in drive(engine.step, add_due):
            for event in events:
                timelines[event.request_id].take(event)
                if event.finish_reason is not None:
                    running -= 1
                    metrics[event.request_id] = engine.metrics(event.request_id)
            check()
    finally:
        engine.trace = None
    seconds = time.perf_counter() - began
    return Pass(list(timelines.values()), records, [metrics[r.id] for r in requests], seconds)


def _is_due(
    index: int, elapsed: float, running: int, concurrency: int, arrivals: Sequence[float] | None
) -> bool:
    return arrivals[index] <= elapsed if arrivals is not None else running < concurrency
