"""Several requests together, at a number or a rate: every worker in turn, by the same clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.environment import ForeignLoad
from benchmarks.peers.agreement import figures, total
from benchmarks.peers.options import Options
from benchmarks.peers.pairs import PAIRS, REFERENCE
from benchmarks.peers.prompts import prompts
from benchmarks.peers.worker import Worker, WorkerError
from spd.runtime.lab.load import Load
from spd.runtime.lab.rows import Interval, repeat_interval

LEAST_REQUESTS = 16
TIMEOUT = 1200.0


@dataclass
class LoadTally:
    """The passes of one worker under one load."""

    tokens_per_second: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    foreign_cpus: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    speculation: list[Mapping[str, Any] | None] = field(default_factory=list)

    def add(self, value: Mapping[str, Any], foreign_cpus: float) -> None:
        """Add a worker's answer: output tokens over the wall time, latencies of its requests."""
        requests = value["requests"]
        self.tokens_per_second.append(
            sum(len(request["token_ids"]) for request in requests) / value["seconds"]
        )
        self.foreign_cpus.append(foreign_cpus)
        self.speculation.append(value["speculation"])
        for request in requests:
            chunks = request["chunks"]
            later = sum(chunk["tokens"] for chunk in chunks[1:])
            self.texts.append(request["token_ids"])
            self.ttft_ms.append(1000 * chunks[0]["seconds"])
            if later:
                self.tpot_ms.append(1000 * (chunks[-1]["seconds"] - chunks[0]["seconds"]) / later)


def load_name(load: Load) -> str:
    """Return a report's name of a load."""
    return f"{load.concurrency} together" if load.rate is None else f"{load.rate:g} a second"


def measure_loads(
    options: Options,
    workers: dict[str, Worker],
    failures: dict[str, str],
    vocab: int,
    say: Callable[[str], None],
) -> dict[str, dict[str, LoadTally]]:
    """Measure every load in turn, all workers interleaved; one that fails is left out from then."""
    tallies_by_load: dict[str, dict[str, LoadTally]] = {}
    for load in options.loads:
        tallies = tallies_by_load[load_name(load)] = {}
        count = max(LEAST_REQUESTS, load.concurrency)
        for number in range(-1, options.load_rounds):  # the first warms up, at the load's own size
            load_prompts = prompts(options, count, vocab, seed=1 + number)
            arrivals = load.arrivals(count, seed=1 + number)
            for name, worker in list(workers.items()):
                if not worker.entry.together:
                    continue
                try:
                    value, foreign = _pass(
                        worker=worker,
                        prompts=load_prompts,
                        options=options,
                        concurrency=load.concurrency,
                        arrivals=arrivals,
                    )
                except WorkerError as error:
                    failures[name] = str(error)
                    del workers[name]
                    say(f"left out: {error}")
                    continue
                if number >= 0:
                    tally = tallies.setdefault(name, LoadTally())
                    tally.add(value, foreign)
                    say(f"{load_name(load)} {name}: {tally.tokens_per_second[-1]:.1f} tokens/s")
    return tallies_by_load


def _pass(
    worker: Worker,
    prompts: Sequence[Sequence[int]],
    options: Options,
    concurrency: int,
    arrivals: list[float] | None,
) -> tuple[dict[str, Any], float]:
    worker.resume()
    try:
        time.sleep(options.pause)
        load = ForeignLoad(worker.group)
        value = worker.run(prompts, options.load_tokens, concurrency, arrivals, TIMEOUT)
        return value, load.read()[0]
    finally:
        worker.pause()


def report_loads(tallies_by_load: Mapping[str, Mapping[str, LoadTally]]) -> dict[str, Any]:
    """Return the figures of every load: medians, ratios with intervals, equal texts."""
    return {name: _report(tallies) for name, tallies in tallies_by_load.items()}


def _report(tallies: Mapping[str, LoadTally]) -> dict[str, Any]:
    reference = tallies.get(REFERENCE)
    entries = {}
    speeds = {name: tally.tokens_per_second for name, tally in tallies.items()}
    for name, tally in tallies.items():
        counted = total(tally.speculation)
        entries[name] = {
            "output_tokens_per_second": repeat_interval(tally.tokens_per_second),
            "ttft_ms": median(tally.ttft_ms),
            "tpot_ms": median(tally.tpot_ms) if tally.tpot_ms else None,
            "foreign_cpus": median(tally.foreign_cpus),
            "acceptance": None if counted is None else figures(counted),
            "requests": len(tally.texts),
            "equal_to_spd_plain": _equal(tally, reference),
        }
    ratios = {
        f"{over} / {under}": _ratio(speeds[over], speeds[under])
        for over, under in PAIRS
        if over in speeds and under in speeds and len(speeds[over]) == len(speeds[under])
    }
    return {"entries": entries, "ratios": ratios}


def _equal(tally: LoadTally, reference: LoadTally | None) -> int | None:
    if reference is None:
        return None
    return sum(
        text == reference_text
        for text, reference_text in zip(tally.texts, reference.texts, strict=False)
    )


def _ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    return repeat_interval([a / b for a, b in zip(over, under, strict=True)])
