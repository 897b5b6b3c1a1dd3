"""Requests driven through an engine by a clock, and the numbers of a pass. No torch here.

One request at a time, a fixed number at a time, or as they arrive. Definitions are those of vLLM's
`bench serve`: TTFT runs from a request's arrival, waiting included; TPOT is the time after the
first chunk over the tokens after it; ITL is the gap between two chunks, which with speculation hold
several tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypedDict

from spd.runtime.engine.driver import drive
from spd.runtime.engine.request import Request, RequestOutput
from spd.runtime.engine.trace import RoundRecord

if TYPE_CHECKING:
    from spd.runtime.engine.engine import Engine


@dataclass
class Timeline(RequestOutput):
    """A request's arrival, in the seconds of `chunks`, and its output."""

    request: Request = field(kw_only=True)
    arrived: float = field(kw_only=True)


@dataclass
class Pass:
    """The output of one run of some requests."""

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
    """Run requests to their end, `concurrency` at a time or at their `arrivals` in seconds.

    Returns their outputs, the records of rounds, and the seconds. Sets the engine's `trace`
    meanwhile. watch: called each step with the number of requests that have ended.
    """
    timelines = [Timeline(request=request, arrived=0.0) for request in requests]
    timelines_by_id = {timeline.request.id: timeline for timeline in timelines}
    records: list[RoundRecord] = []
    engine.trace = records.append
    admitted = running = 0
    limit = concurrency if arrivals is None else len(timelines)
    start = time.perf_counter()

    def add_due_requests() -> bool:
        """Add the requests that are due; return False once all have ended."""
        nonlocal admitted, running
        while admitted < len(timelines) or engine.has_work:
            now = time.perf_counter() - start
            while admitted < len(timelines) and running < limit:
                due = now if arrivals is None else arrivals[admitted]
                if due > now:
                    break
                timelines[admitted].arrived = start + due
                engine.add(timelines[admitted].request)
                admitted += 1
                running += 1
            if engine.has_work:
                return True
            time.sleep(max(0.0, due - now))
        return False

    try:
        for events in drive(engine.step, add_due_requests):
            for event in events:
                timelines_by_id[event.request_id].add(event)
                running -= event.finish_reason is not None
            watch(admitted - running)
    finally:
        engine.trace = None
    return Pass(timelines, records, time.perf_counter() - start)


@dataclass(frozen=True)
class Load:
    """The arrival of requests: so many at a time, or a rate (a second) into as many slots."""

    concurrency: int = 1
    rate: float | None = None

    def arrivals(self, count: int, seed: int) -> list[float] | None:
        """Return the seconds at which `count` requests arrive; None: as soon as a slot is free."""
        if self.rate is None:
            return None
        draws = random.Random(seed)
        return list(accumulate(draws.expovariate(self.rate) for _ in range(count)))


@dataclass(frozen=True, kw_only=True)
class Workload(Load):
    """The work of every engine alike; `prompt_tokens_asked` None: prompts of their own length."""

    category: str
    temperature: float
    prompt_tokens_asked: int | None = None


@dataclass
class Sample:
    """Counts and times of one pass by the engine of configuration `config`.

    Rounds that follow a prompt hold no drafts and are no steps of decoding: they are not in
    `rounds`.
    """

    config: int
    work: Workload
    repetition: int
    prompts: list[str]
    tokens: int
    seconds: float
    speed: tuple[float, float]
    """Tokens, or requests where they arrive at a rate, and the seconds that they took."""
    tokens_after_first: int  # those of every chunk but a request's first
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    rounds: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]


def take_sample(
    measured_pass: Pass, config: int, work: Workload, repetition: int, prompts: Sequence[str]
) -> Sample:
    """Count the tokens, times and drafts of one pass."""
    answered = [timeline for timeline in measured_pass.timelines if timeline.chunks]
    # Seconds from the first chunk to the last.
    spans = [timeline.chunks[-1][0] - timeline.chunks[0][0] for timeline in answered]
    later_tokens = [sum(count for _, count in timeline.chunks[1:]) for timeline in answered]
    tpot_ms = [
        1000 * span / count for span, count in zip(spans, later_tokens, strict=True) if count
    ]
    tokens = sum(len(timeline.token_ids) for timeline in answered)
    speed: tuple[float, float] = sum(later_tokens), sum(spans)
    if work.rate is not None:
        speed = len(tpot_ms), sum(tpot_ms) / 1000
    elif work.concurrency > 1:
        speed = tokens, measured_pass.seconds
    rounds = [record for record in measured_pass.records if record.round > 0]
    drafted, accepted = per_position(rounds)
    return Sample(
        config=config,
        work=work,
        repetition=repetition,
        prompts=list(prompts),
        tokens=tokens,
        seconds=measured_pass.seconds,
        speed=speed,
        tokens_after_first=sum(later_tokens),
        ttft_ms=[1000 * (timeline.chunks[0][0] - timeline.arrived) for timeline in answered],
        tpot_ms=tpot_ms,
        itl_ms=[
            round(1000 * (b - a), 3)
            for timeline in answered
            for (a, _), (b, _) in pairwise(timeline.chunks)
        ],
        rounds=len(rounds),
        drafted_per_position=drafted,
        accepted_per_position=accepted,
    )


def per_position(records: Sequence[RoundRecord]) -> tuple[list[int], list[int]]:
    """Return the number of drafts at each position, and the number of accepted ones."""
    positions = range(max((len(record.draft) for record in records), default=0))
    drafted = [sum(len(record.draft) > at for record in records) for at in positions]
    return drafted, [sum(record.accepted > at for record in records) for at in positions]


class Difference(TypedDict):
    """The first token, or for an end its reason, in which two texts differ, and their request."""

    prompt: str
    temperature: float
    seed: int | None
    position: int
    expected: int | str | None
    found: int | str | None


def compare_texts(
    names: Sequence[str], expected: Pass, candidate: Pass
) -> tuple[int, list[Difference]]:
    """Return the tokens of two passes for prompts of these names, and their differences."""
    tokens = 0
    differences: list[Difference] = []
    for name, a, b in zip(names, expected.timelines, candidate.timelines, strict=True):
        tokens += max(len(a.token_ids), len(b.token_ids))
        pairs = zip([*a.token_ids, a.finish_reason], [*b.token_ids, b.finish_reason], strict=False)
        for position, (expected_token, candidate_token) in enumerate(pairs):
            if expected_token != candidate_token:
                params = a.request.params
                differences.append(
                    {
                        "prompt": name,
                        "temperature": params.temperature,
                        "seed": params.seed,
                        "position": position,
                        "expected": expected_token,
                        "found": candidate_token,
                    }
                )
                break
    return tokens, differences
