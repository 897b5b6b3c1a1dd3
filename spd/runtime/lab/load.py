"""Requests driven through an engine by a clock, and what a pass gave in numbers. No torch here.

One request at a time, a fixed number at a time, or as they come. Definitions are those of vLLM's
`bench serve`: TTFT runs from a request's arrival, waiting included; TPOT is the time after the first chunk
over the tokens after it; ITL is the gap between two chunks, which with speculation hold several tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING

from spd.runtime.engine.driver import drive
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.engine.request import Gathered, Request

if TYPE_CHECKING:
    from spd.runtime.engine.engine import Engine


@dataclass
class Timeline(Gathered):
    """When a request arrived, in the seconds of `chunks`, and what came of it."""

    request: Request = field(kw_only=True)
    arrived: float = field(kw_only=True)

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token, which has come."""
        return self.chunks[0][0] - self.arrived

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

    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [after - before for (before, _), (after, _) in pairwise(self.chunks)]


@dataclass
class Pass:
    """Everything that one run of some requests gave."""

    timelines: list[Timeline]
    records: list[RoundRecord]
    seconds: float


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second on average, independent of each other."""
    draws = random.Random(seed)
    return list(accumulate(draws.expovariate(rate) for _ in range(count)))


def run_pass(
    engine: Engine,
    requests: Sequence[Request],
    *,
    concurrency: int = 1,
    arrivals: Sequence[float] | None = None,
    watch: Callable[[int], None] = lambda ended: None,
) -> Pass:
    """Run requests, `concurrency` at a time or at their `arrivals`; `watch` hears how many have ended."""
    timelines = [Timeline(request=request, arrived=0.0) for request in requests]
    lines = {line.request.id: line for line in timelines}
    records: list[RoundRecord] = []
    engine.trace = records.append
    admitted = running = 0
    most = concurrency if arrivals is None else len(timelines)
    began = time.perf_counter()

    def add_due() -> bool:
        nonlocal admitted, running
        while admitted < len(timelines) or engine.has_work:
            now = time.perf_counter() - began
            while admitted < len(timelines) and running < most:
                due = now if arrivals is None else arrivals[admitted]
                if due > now:
                    break
                timelines[admitted].arrived = began + due
                engine.add(timelines[admitted].request)
                admitted, running = admitted + 1, running + 1
            if engine.has_work:
                return True
            time.sleep(max(0.0, due - now))
        return False

    try:
        for events in drive(engine.step, add_due):
            for event in events:
                lines[event.request_id].take(event)
                running -= event.finish_reason is not None
            watch(admitted - running)
    finally:
        engine.trace = None
    return Pass(timelines, records, time.perf_counter() - began)


@dataclass(frozen=True)
class Load:
    """How requests come: so many at a time, or at a rate (requests a second) into that many slots."""

    concurrency: int = 1
    rate: float | None = None


@dataclass(frozen=True)
class Work:
    """What is asked of every engine alike."""

    category: str
    temperature: float
    prompt_tokens: int | None
    load: Load


@dataclass
class Sample:
    """Counts and times of one pass by the engine of configuration `config`; seconds and milliseconds.

    Rounds that follow a prompt hold no drafts and are no steps of decoding: they are not among `rounds`.
    """

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
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    part_ms: dict[str, float]
    """Of all rounds together: draft, verify and rest by the device's clock; host, where one request runs, is
    the wall time that the device did not account for."""

    @property
    def speed(self) -> tuple[float, float]:
        """Tokens, or requests where they come at a rate, and the seconds that they took."""
        load = self.work.load
        if load.rate is not None:
            return float(len(self.tpot_ms)), sum(self.tpot_ms) / 1000
        if load.concurrency > 1:
            return float(self.tokens), self.seconds
        return float(self.tokens_after_first), self.decode_seconds


def take_sample(ran: Pass, config: int, work: Work, repetition: int, prompts: Sequence[str]) -> Sample:
    """Count one pass."""
    lines = ran.timelines
    later = [record for record in ran.records if record.round > 0]
    drafted, _, accepted = per_position(later)
    parts = {part: sum(record.ms[part] for record in later) for part in ("draft", "verify", "rest")}
    decode = sum(line.decode_seconds for line in lines)
    alone = work.load == Load()
    parts["host"] = max(0.0, 1000 * decode - sum(parts.values())) if alone and later else 0.0
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
        drafted_per_position=drafted,
        accepted_per_position=accepted,
        part_ms=parts,
    )


def per_position(records: Sequence[RoundRecord]) -> tuple[list[int], list[int], list[int]]:
    """How often a draft stood at each position, was tried (all before it accepted), and was accepted."""
    longest = max((len(record.draft) for record in records), default=0)
    drafted, tried, accepted = [], [], []
    for at in range(longest):
        counts = [record.accepted for record in records if len(record.draft) > at]
        drafted.append(len(counts))
        tried.append(sum(count >= at for count in counts))
        accepted.append(sum(count > at for count in counts))
    return drafted, tried, accepted


def parting(a: Sequence[int], b: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """Where two texts part, and the tokens there, None behind an end; None where they are the same."""
    pairs = enumerate(zip_longest(a, b))
    return next(((at, *pair) for at, pair in pairs if pair[0] != pair[1]), None)
