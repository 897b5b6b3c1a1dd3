"""The thread count that follows the load of other processes, and texts that do not depend on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spd import Engine, EngineConfig, Request, SamplingParams, demo_folder
from spd.kernels.native.build import unavailable_reason
from spd.runtime.plan import plan
from spd.runtime.round import cpu_load
from spd.runtime.round.cpu_load import AdaptiveThreads, busy_seconds
from tests.helpers import get_local_queue

pytestmark = pytest.mark.usefixtures("every_trial")


def test_busy_seconds_are_summed_over_the_cpus(tmp_path: Path) -> None:
    """Only the requested CPUs count; low-priority time does not count, stolen time does."""
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu 9 9 9 9 9 9 9 9\ncpu0 100 50 20 999 9 1 2 7 0 0\ncpu1 10 0 0 5 0 0 0 0\nintr 5\n"
    )
    assert busy_seconds([0], stat) == pytest.approx(1.3)
    assert busy_seconds([0, 1], stat) == pytest.approx(1.4)
    assert busy_seconds([0], tmp_path / "none") == busy_seconds([0], tmp_path) == 0.0


@pytest.mark.parametrize(
    ("counts", "cpus", "loads", "expected"),
    [
        ((1, 2), 2, [0.0, 0.2, 0.9, 1.0, 0.6, 0.1], [2, 2, 1, 1, 1, 2]),
        ((1, 2), 2, [2.0, 6.0], [1, 1]),
        ((2,), 2, [1.0], [2]),
        ((4, 6, 7, 8), 8, [1.0, 1.5, 3.0, 8.0], [7, 6, 4, 4]),
        ((4, 6, 7, 8), 16, [1.0, 7.9, 9.0], [8, 8, 7]),
        # What others did in a pause, while no round ran, may be over; the load that follows counts again.
        ((1, 2), 2, [(5.0, 2.0), 2.0, (5.0, 0.0), 0.0], [2, 1, 1, 2]),
    ],
)
def test_threads_give_way(
    counts: tuple[int, ...],
    cpus: int,
    loads: list[Any],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After readings of these loads, a window or so many seconds apart."""
    now = busy = 0.0
    monkeypatch.setattr(
        cpu_load, "time", SimpleNamespace(perf_counter=lambda: now, process_time=lambda: 0.0)
    )
    monkeypatch.setattr(cpu_load, "busy_seconds", lambda _: busy)
    threads = AdaptiveThreads(counts, lambda _: None)
    thread_counts = []
    threads.cpus = tuple(range(cpus))
    for reading in loads:
        seconds, load = (
            reading if isinstance(reading, tuple) else (1.5 * cpu_load.MIN_READING_SECONDS, reading)
        )
        now = now + seconds
        busy = busy + seconds * load
        threads.adapt_thread_count()
        thread_counts.append(threads.count)
    assert thread_counts == expected


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, keep_threads: None) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(plan, "usable_cpus", lambda: (0, 1))


@pytest.mark.covers(count=1)
@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no C kernels: {unavailable_reason()}"
)
@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_a_changing_thread_count_changes_no_text(
    monkeypatch: pytest.MonkeyPatch, threads: None, spec: str
) -> None:
    """Another number of threads in every round, alone and eight together, greedy and sampled."""
    options: dict[str, Any] = {"slots": 8, "ctx": 256, "kernels": "native", "prefix_sharing": False}
    texts = []
    for changing in (False, True):
        turns = itertools.count()

        def adapt(self: AdaptiveThreads, turns: Iterator[int] = turns) -> None:
            self._set_threads(1 + next(turns) % 2)

        with monkeypatch.context() as patch:
            patch.setattr(
                AdaptiveThreads, "adapt_thread_count", adapt if changing else lambda self: None
            )
            engine = Engine(EngineConfig(model=demo_folder(), spec=spec, **options))
            assert get_local_queue(engine).threads._counts == (1, 2)
            params = [
                SamplingParams(max_tokens=16, temperature=0.9 * (i % 2), seed=i) for i in range(8)
            ]
            requests = [Request(f"{i}", tuple(range(300 + i, 340)), params[i]) for i in range(8)]
            texts.append(
                [r.token_ids for r in (*engine.generate(requests), *engine.generate(requests[:1]))]
            )
        assert not changing or next(turns) > 2
    assert texts[0] == texts[1]


@pytest.mark.parametrize("ctx", [16, 65])
def test_short_contexts_open(ctx: int) -> None:
    """The probe at load does not go beyond the end of the context."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine = Engine(EngineConfig(model=demo_folder(), ctx=ctx, spec="off"))
    assert engine.plan.threads_follow == (engine.plan.shape.kernels == "native")
    assert engine.plan.shape.ctx == ctx
    (done,) = engine.generate([Request("a", (5, 6, 7), params)])
    assert len(done.token_ids) == 3


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("options", [{"threads": 2}, {"kernels": "torch", "dtype": "float32"}])
def test_a_fixed_thread_count_does_not_change(threads: None, options: dict[str, Any]) -> None:
    """With `--threads` the load does not matter; in torch's form only the machine does."""
    engine = Engine(EngineConfig(model=demo_folder(), slots=1, ctx=256, spec="off", **options))
    assert get_local_queue(engine).threads._counts == (2,) and not engine.plan.threads_follow


@pytest.mark.parametrize(
    ("maximum", "counts"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (16, (8, 12, 15, 16))]
)
def test_thread_counts_go_down_to_half(maximum: int, counts: tuple[int, ...]) -> None:
    assert cpu_load.candidate_thread_counts(maximum) == counts
