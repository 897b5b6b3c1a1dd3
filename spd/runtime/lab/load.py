"""Requests driven through an engine by a clock, and what a pass gave in numbers. No torch here.

One request at a time, a fixed number at a time, or as they come. Definitions are those of vLLM's
`bench serve`: TTFT runs from a request's arrival, waiting included; TPOT is the time after the first chunk
over the tokens after it; ITL is the gap between two chunks, which with speculation hold several tokens.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from spd.runtime.engine.driver import Gathered, drive
from spd.runtime.engine.metrics import RequestMetrics, RoundRecord
from spd.runtime.engine.request import Event, Request

if TYPE_CHECKING:
    from spd.runtime.engine.metrics import RoundRecord
    from spd.runtime.lab.sweep import Work


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


@dataclass
class Sample:
    """Counts and times of one pass by the engine of configuration `config`; seconds and milliseconds."""

    config: int
    work: Work
    repetition: int
    prompts: list[str]
    prompt_tokens: int
    tokens: int
    seconds: float
    tokens_after_first: int
    decode_seconds: float
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    rounds: int
    drafted: int
    accepted: int
    drafted_per_position: list[int]
    tried_per_position: list[int]
    """Drafts whose predecessors in the round were all accepted."""
    accepted_per_position: list[int]
    histogram: list[int]
    draft_ms: float
    verify_ms: float
    rest_ms: float
    host_ms: float
    """A round's share of the wall time that the device did not account for, where one request runs."""
    finish: dict[str, int] = field(default_factory=dict)

    @property
    def speed(self) -> tuple[float, float]:
        """Tokens, and the seconds they took, as the load counts them: see `rows.speed_words`."""
        load = self.work.load
        if load.rate is not None:
            return float(len(self.tpot_ms)), sum(self.tpot_ms) / 1000
        if load.concurrency > 1:
            return float(self.tokens), self.seconds
        return float(self.tokens_after_first), self.decode_seconds


def take_sample(
    ran: Pass,
    config: int,
    work: Work,
    repetition: int,
    prompts: Sequence[str],
) -> Sample:
    """Count one pass. Rounds that follow a prompt hold no drafts and are no steps of decoding."""
    lines = ran.timelines
    later = [record for record in ran.records if record.round > 0]
    drafted, tried, accepted = per_position(later)
    times = {part: _mean(record.ms[part] for record in later) for part in ("draft", "verify", "rest")}
    decode = sum(line.decode_seconds for line in lines)
    host = 0.0
    if work.load.concurrency == 1 and work.load.rate is None and later:
        host = max(0.0, 1000 * decode / len(later) - sum(times.values()))
    return Sample(
        config=config,
        work=work,
        repetition=repetition,
        prompts=list(prompts),
        prompt_tokens=sum(len(line.request.prompt_ids) for line in lines),
        tokens=sum(len(line.token_ids) for line in lines),
        seconds=ran.seconds,
        tokens_after_first=sum(line.tokens_after_first for line in lines),
        decode_seconds=decode,
        ttft_ms=[1000 * line.ttft for line in lines if line.chunks],
        tpot_ms=[1000 * line.tpot for line in lines if line.tpot is not None],
        itl_ms=[round(1000 * gap, 3) for line in lines for gap in line.gaps()],
        rounds=len(later),
        drafted=sum(drafted),
        accepted=sum(metric.draft_n_accepted for metric in ran.metrics),
        drafted_per_position=drafted,
        tried_per_position=tried,
        accepted_per_position=accepted,
        histogram=_histogram(later),
        draft_ms=times["draft"],
        verify_ms=times["verify"],
        rest_ms=times["rest"],
        host_ms=host,
        finish=dict(Counter(str(line.finish_reason) for line in lines)),
    )


def per_position(records: Sequence[RoundRecord]) -> tuple[list[int], list[int], list[int]]:
    """How often a draft stood at each position, was tried (all before it accepted), and was accepted."""
    longest = max((len(record.draft) for record in records), default=0)
    drafted, tried, accepted = ([0] * longest for _ in range(3))
    for record in records:
        for position in range(len(record.draft)):
            drafted[position] += 1
            tried[position] += record.accepted >= position
            accepted[position] += record.accepted > position
    return drafted, tried, accepted


def _histogram(records: Sequence[RoundRecord]) -> list[int]:
    counts = [0] * (1 + max((record.accepted for record in records), default=0))
    for record in records:
        counts[record.accepted] += 1
    return counts


def _mean(values: Any) -> float:
    listed = list(values)
    return fmean(listed) if listed else 0.0
