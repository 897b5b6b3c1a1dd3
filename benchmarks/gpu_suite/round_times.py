"""Steady rounds of an engine: timed by the wall clock over many, and by the device's own clock in
each.

The device's times come from the rounds' first and last kernels, so the gap between two rounds is
what neither the kernels nor the graph account for: the host's share, if it stands in the way.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import mean, median
from typing import Any, TypeVar

import torch

from benchmarks.gpu_suite.graph_timer import free_memory
from spd.kernels.round.window import BEGAN, COMMITTED, ENDED
from spd.runtime import Engine, EngineConfig, Request, SamplingParams
from spd.runtime.lab.rows import percentile
from spd.runtime.round.local_queue import Fetched, LocalPendingRound, LocalRoundQueue
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingSteps

Result = TypeVar("Result")
GREEDY = SamplingParams(ignore_eos=True)
FILL = 1.25
"""Rounds a slot, at most, that run until all decode: a prompt's last rows are a pass of their
own."""
SYNC_WARNING = "synchronizing CUDA operation"


def with_engine(config: EngineConfig, work: Callable[[Engine], Result]) -> Result:
    """Run `work` on a fresh engine and give its memory back; `work` must not keep the engine."""
    free_memory()
    engine = Engine(config)
    try:
        return work(engine)
    finally:
        engine.close()
        del engine
        free_memory()


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_prompt(length: int, vocab: int, seed: int) -> tuple[int, ...]:
    """Return random token ids: with random weights text has no meaning."""
    generator = random.Random(seed)
    return tuple(generator.randrange(vocab) for _ in range(length))


@dataclass(frozen=True)
class RoundTimes:
    """One round of k drafts by the device's clock, nanoseconds, and how long the host waited to
    read it."""

    k: int
    began: int
    committed: int
    ended: int
    waited: int


@dataclass
class Recorder:
    """Notes the times of every round that an engine reads, in order, by standing before its
    queue."""

    rounds: list[RoundTimes] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine) -> Recorder:
        """Start noting; for the engine's whole life."""
        recorder = cls()
        queue = engine.round_queue
        assert isinstance(queue, LocalRoundQueue)
        launch = queue.launch

        def recorded_launch(
            k: int,
            views: Sequence[SlotView],
            needs: SamplingSteps,
            num_logprobs: int | None,
            next_k: int,
            chained: int = 0,
        ) -> LocalPendingRound:
            ticket = launch(k, views, needs, num_logprobs, next_k, chained)
            return ticket._replace(fetch=recorder._recording_fetch(ticket))

        vars(queue)["launch"] = recorded_launch  # is found before the method of the class
        return recorder

    def _recording_fetch(self, ticket: LocalPendingRound) -> Callable[[], Fetched]:
        """Return a ticket's `fetch`, which also notes the times of the round."""

        def fetched() -> Fetched:
            before = time.perf_counter_ns()
            result = ticket.fetch()
            waited = time.perf_counter_ns() - before
            times: list[int] = result[1].tolist()
            self.rounds.append(
                RoundTimes(ticket.k, times[BEGAN], times[COMMITTED], times[ENDED], waited)
            )
            return result

        return fetched


@dataclass(frozen=True)
class Span:
    """Some rounds in a row: wall time from an idle device to an idle device, and what they
    committed."""

    rounds: int
    seconds: float
    tokens: int
    records: list[RoundTimes]


def run_span(
    engine: Engine, recorder: Recorder, *, rounds: int | None = None, tokens: int | None = None
) -> Span:
    """Run so many rounds, or as many as it takes to commit so many tokens."""
    synchronize()
    first = len(recorder.rounds)
    steps = 0
    committed = 0
    began = time.perf_counter()
    while (rounds is None or steps < rounds) and (tokens is None or committed < tokens):
        if not engine.has_work:
            raise RuntimeError("the requests ended before the measurement did")
        committed += sum(len(event.token_ids) for event in engine.step())
        steps += 1
    synchronize()
    return Span(steps, time.perf_counter() - began, committed, recorder.rounds[first:])


def start(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, warm: int
) -> int:
    """Admit the prompts, step until all decode, then run `warm` rounds; return the committed
    tokens.

    The rounds capture what they need. Prompts are written between rounds of those who came before,
    a few steps each: see `FILL`. Raises RuntimeError where one has ended before the last begins.
    """
    for index, prompt in enumerate(prompts):
        engine.add(Request(f"request-{index}", tuple(prompt), params))
    committed = 0
    while len(engine.scheduler.decoding()) < len(prompts):
        if not engine.has_work:
            raise RuntimeError("requests ended before all of them had begun")
        committed += sum(len(event.token_ids) for event in engine.step())
    return committed + sum(len(event.token_ids) for _ in range(warm) for event in engine.step())


def stop(engine: Engine, count: int) -> None:
    """Abort the requests that `start` admitted, and finish the rounds that were launched."""
    for index in range(count):
        engine.abort(f"request-{index}")
    while engine.has_work:
        engine.step()


def spread(values: Sequence[float]) -> list[float]:
    """Return [median, 90th percentile]."""
    return [median(values), percentile(values, 0.9)]


def describe_span(span: Span, slots: int, lag: int) -> dict[str, Any]:
    """Return microseconds, [median, 90th percentile] or the wall clock's mean; tokens a slot and
    round.

    period: from a round's beginning to the next one's; idle: from a round's end to the next one's
    beginning; device: from beginning to end; verify ends at the commit, draft is what follows it.
    """
    # Rounds that were on their way when the clock started, and the first after it, did not run
    # steadily.
    steady = span.records[lag + 1 :]
    pairs = list(pairwise(steady))
    return {
        "rounds": span.rounds,
        "wall_us": 1e6 * span.seconds / span.rounds,
        "period_us": spread([1e-3 * (b.began - a.began) for a, b in pairs]),
        "idle_us": spread([1e-3 * (b.began - a.ended) for a, b in pairs]),
        "device_us": spread([1e-3 * (record.ended - record.began) for record in steady]),
        "verify_us": spread([1e-3 * (record.committed - record.began) for record in steady]),
        "draft_us": spread([1e-3 * (record.ended - record.committed) for record in steady]),
        "host_waits_us": mean(1e-3 * record.waited for record in steady),
        "drafts_a_round": mean(record.k for record in steady),
        "tokens_a_round": span.tokens / span.rounds / slots,
    }


def count_syncs(engine: Engine, rounds: int) -> dict[str, Any]:
    """Count the synchronizing CUDA calls that torch sees in so many rounds, and list their lines.

    Reading a round that ran before is an event's wait, which is none of these.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(rounds):
                engine.step()
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{warning.filename.rpartition('/')[2]}:{warning.lineno}"
        for warning in caught
        if SYNC_WARNING in str(warning.message)
    )
    return {"rounds": rounds, "syncs": sum(lines.values()), "lines": dict(lines.most_common(3))}


@dataclass(frozen=True)
class Load:
    """What an engine is given to do: slots that all run, and how long they are watched."""

    slots: int = 1
    prompt: int = 1024
    warm: int = 12
    rounds: int = 100
    params: SamplingParams = GREEDY

    def context(self, k: int) -> int:
        """Return the positions that a slot can reach, with space for the window after them."""
        return self.prompt + (self.warm + self.rounds + ceil(FILL * self.slots) + 8) * (k + 1) + 64


def measure_load(engine: Engine, recorder: Recorder, load: Load, vocab: int) -> dict[str, Any]:
    """Run the load to the end of its watched rounds and describe them, with the mean context of a
    slot."""
    prompts = [random_prompt(load.prompt, vocab, seed) for seed in range(load.slots)]
    before = start(engine, prompts, load.params, load.warm)
    span = run_span(engine, recorder, rounds=load.rounds)
    stop(engine, load.slots)
    result = describe_span(span, load.slots, engine.plan.lag)
    return {**result, "context": round(load.prompt + (before + span.tokens / 2) / load.slots)}
