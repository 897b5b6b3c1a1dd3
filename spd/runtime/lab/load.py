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
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from spd.runtime.engine.driver import drive
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.engine.request import Request, RequestOutput

if TYPE_CHECKING:
    from spd.runtime.engine.engine import Engine


@dataclass
class Timeline(RequestOutput):
    """When a request arrived, in the seconds of `chunks`, and what came of it."""

    request: Request = field(kw_only=True)
    arrived: float = field(kw_only=True)


@dataclass
class Pass:
    """Everything that one run of some requests gave."""

    timelines: list[Timeline]
    records: list[RoundRecord]
    seconds: float


def run_pass(
    engine: Engine,
    requests: Sequence[Request],
    *,
    concurrency: int = 1,
    arrivals: Sequence[float] | None = None,
    watch: Callable[[int], object] = lambda ended: None,
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
                admitted = admitted + 1
                running = running + 1
            if engine.has_work:
                return True
            time.sleep(max(0.0, due - now))
        return False

    try:
        for events in drive(engine.step, add_due):
            for event in events:
                lines[event.request_id].add(event)
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

    def arrivals(self, count: int, seed: int) -> list[float] | None:
        """Seconds at which `count` requests come, independent of each other; None where a slot calls them."""
        if self.rate is None:
            return None
        draws = random.Random(seed)
        return list(accumulate(draws.expovariate(self.rate) for _ in range(count)))


@dataclass(frozen=True, kw_only=True)
class Workload(Load):
    """What is asked of every engine alike; `prompt_tokens_asked` None: prompts of their own length."""

    category: str
    temperature: float
    prompt_tokens_asked: int | None = None


@dataclass
class Sample:
    """Counts and times of one pass by the engine of configuration `config`.

    Rounds that follow a prompt hold no drafts and are no steps of decoding: they are not among `rounds`.
    """

    config: int
    work: Workload
    repetition: int
    prompts: list[str]
    tokens: int
    seconds: float
    speed: tuple[float, float]
    """Tokens, or requests where they come at a rate, and the seconds that they took."""
    tokens_after_first: int  # those of every chunk but a request's first
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    rounds: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]


def take_sample(
    ran: Pass, config: int, work: Workload, repetition: int, prompts: Sequence[str]
) -> Sample:
    """Count one pass."""
    lines = [line for line in ran.timelines if line.chunks]
    spans = [
        line.chunks[-1][0] - line.chunks[0][0] for line in lines
    ]  # from the first chunk to the last
    later = [sum(count for _, count in line.chunks[1:]) for line in lines]
    tpot_ms = [1000 * span / count for span, count in zip(spans, later, strict=True) if count]
    tokens = sum(len(line.token_ids) for line in lines)
    speed: tuple[float, float] = sum(later), sum(spans)
    if work.rate is not None:
        speed = len(tpot_ms), sum(tpot_ms) / 1000
    elif work.concurrency > 1:
        speed = tokens, ran.seconds
    rounds = [record for record in ran.records if record.round > 0]
    drafted, accepted = per_position(rounds)
    return Sample(
        config=config,
        work=work,
        repetition=repetition,
        prompts=list(prompts),
        tokens=tokens,
        seconds=ran.seconds,
        speed=speed,
        tokens_after_first=sum(later),
        ttft_ms=[1000 * (line.chunks[0][0] - line.arrived) for line in lines],
        tpot_ms=tpot_ms,
        itl_ms=[
            round(1000 * (b - a), 3) for line in lines for (a, _), (b, _) in pairwise(line.chunks)
        ],
        rounds=len(rounds),
        drafted_per_position=drafted,
        accepted_per_position=accepted,
    )


def per_position(records: Sequence[RoundRecord]) -> tuple[list[int], list[int]]:
    """How often a draft stood at each position, and how often it was accepted."""
    positions = range(max((len(record.draft) for record in records), default=0))
    drafted = [sum(len(record.draft) > at for record in records) for at in positions]
    return drafted, [sum(record.accepted > at for record in records) for at in positions]


def compare_texts(
    names: Sequence[str], expected: Pass, found: Pass
) -> tuple[int, list[dict[str, Any]]]:
    """How many tokens two passes gave for prompts of these names, and where their texts part.

    There stand the token that was expected and the one that came, or for an end its reason.
    """
    tokens = 0
    differences = []
    for name, a, b in zip(names, expected.timelines, found.timelines, strict=True):
        tokens += max(len(a.token_ids), len(b.token_ids))
        pairs = zip([*a.token_ids, a.finish_reason], [*b.token_ids, b.finish_reason], strict=False)
        if apart := next(
            ((at, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1]), None
        ):
            params = a.request.params
            asked = {"prompt": name, "temperature": params.temperature, "seed": params.seed}
            parts = dict(zip(("position", "expected", "found"), apart, strict=True))
            differences.append({**asked, **parts})
    return tokens, differences
