"""Loads and their clocks, with an engine that only counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.engine.request import Event, Request
from spd.runtime.lab.load import Timeline, poisson_arrivals, run_pass
from spd.runtime.round.sampling_params import SamplingParams


class CountingEngine:
    """Three steps a request of `seconds` each, two tokens in each; remembers how many it held at once."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.trace: Callable[[RoundRecord], None] | None = None
        self.seconds = seconds
        self.left: dict[str, int] = {}
        self.most = 0

    def add(self, request: Request) -> None:
        self.left[request.id] = 3
        self.most = max(self.most, len(self.left))

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Event]:
        time.sleep(self.seconds)
        self.left = {name: steps - 1 for name, steps in self.left.items()}
        events = [Event(name, (1, 2), "", None if steps else "length") for name, steps in self.left.items()]
        self.left = {name: steps for name, steps in self.left.items() if steps}
        return events


def requests(count: int) -> list[Request]:
    return [Request(str(i), (1,), SamplingParams()) for i in range(count)]


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_a_closed_loop_keeps_so_many_and_no_more(concurrency: int) -> None:
    engine, ended = CountingEngine(), list[int]()
    ran = run_pass(engine, requests(7), concurrency=concurrency, watch=ended.append)
    assert engine.most == min(concurrency, 7)
    assert [line.token_ids for line in ran.timelines] == [[1, 2] * 3] * 7
    assert all(line.finish_reason == "length" for line in ran.timelines)
    assert engine.trace is None and ended == sorted(ended) and ended[-1] == 7


def test_an_open_loop_admits_by_the_clock() -> None:
    engine, arrivals = CountingEngine(), [0.0, 0.03, 0.06]
    ran = run_pass(engine, requests(3), arrivals=arrivals)
    assert engine.most == 1, "each ended before the next one came"
    starts = [line.arrived - ran.timelines[0].arrived for line in ran.timelines]
    assert starts == pytest.approx(arrivals, abs=1e-6)
    assert all(line.ttft >= 0 for line in ran.timelines) and ran.seconds >= 0.06


def test_waiting_counts_as_time_to_first_token() -> None:
    """A request that is due while the engine is busy has arrived when it was due."""
    ran = run_pass(CountingEngine(0.02), requests(2), arrivals=[0.0, 0.001])
    first, second = ran.timelines
    assert second.arrived - first.arrived == pytest.approx(0.001, abs=1e-6)
    assert second.ttft > 0.019


def test_arrivals_are_poisson() -> None:
    """The mean gap of 10,000 is within 4 standard errors: a chance of 6e-5 to fail, at a fixed seed."""
    arrivals = poisson_arrivals(10_000, 5.0, seed=1)
    assert arrivals == sorted(arrivals) and arrivals == poisson_arrivals(10_000, 5.0, seed=1)
    assert arrivals[-1] / 10_000 == pytest.approx(0.2, rel=0.04)


def test_what_watching_raises_ends_the_pass() -> None:
    engine = CountingEngine()

    def stop(ended: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pass(engine, requests(2), watch=stop)
    assert engine.trace is None


def test_times_by_their_definitions() -> None:
    line = Timeline(
        chunks=[(10.5, 1), (11.0, 3), (12.0, 2)], request=Request("x", (1,), SamplingParams()), arrived=10.0
    )
    assert line.ttft == 0.5 and line.decode_seconds == 1.5 and line.tokens_after_first == 5
    assert line.tpot == pytest.approx(0.3) and list(line.gaps()) == [0.5, 1.0]
    assert Timeline(request=Request("x", (1,), SamplingParams()), arrived=0.0).tpot is None
