"""A Chrome trace of some requests with ranges named draft, verify, sample, commit and copy, and a summary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from spd.runtime.engine.engine import Engine
from spd.runtime.engine.request import Request
from spd.runtime.lab.load import run_pass

RANGES = ("draft", "verify", "sample", "commit", "copy")
ROWS = 15
"""Operations in a summary."""


def profile_requests(
    engine: Engine, requests: Sequence[Request], folder: Path, name: str, check: Callable[[], None]
) -> tuple[Path, Path]:
    """Run the requests under torch's profiler; returns the paths of the trace and of its summary."""
    with profiled(engine, folder, name) as paths:
        run_pass(engine, requests, concurrency=engine.plan.shape.slots, check=check)
    return paths


@contextmanager
def profiled(engine: Engine, folder: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Profile what this thread has the engine do; yields the paths of the trace and of its summary to come.

    A range costs time of its own, so speeds under it mean nothing. Captured rounds are replayed whole: their
    ranges hold what the host does. What has been seen is written however this ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.trace.json", folder / f"{name}.txt"
    activities = [ProfilerActivity.CPU]
    if engine.plan.device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    try:
        with profiler, named_ranges(engine):
            yield paths
    finally:
        _write(profiler, paths, on_cpu=engine.plan.device == "cpu")


def _write(profiler: profile, paths: tuple[Path, Path], *, on_cpu: bool) -> None:
    """The Chrome trace, and the time of each range with the operations that took most."""
    trace, summary = paths
    profiler.export_chrome_trace(str(trace))
    averages = profiler.key_averages()
    lines = [f"{'range':<10}{'times':>8}{'total ms':>12}{'ms each':>10}"]
    for event in sorted(averages, key=lambda event: -event.cpu_time_total):
        if event.key in RANGES:
            total = event.cpu_time_total / 1000
            lines.append(f"{event.key:<10}{event.count:>8}{total:>12.2f}{total / event.count:>10.3f}")
    order = "self_cpu_time_total" if on_cpu else "self_cuda_time_total"
    table = averages.table(sort_by=order, row_limit=ROWS)
    summary.write_text("\n".join(lines) + "\n\n" + table + "\n", encoding="utf-8")


@contextmanager
def named_ranges(engine: Engine) -> Iterator[None]:
    """Name what a round does for as long as this lasts; the program itself is not changed."""
    parts = engine._parts
    round_ = parts.queue.round
    places: list[tuple[Any, str, str]] = [
        (round_.runner, "forward", "verify"),
        (round_, "_sample", "sample"),
        (round_, "_commit", "commit"),
    ]
    if round_.proposer is not None:
        places.append((round_.proposer, "draft", "draft"))
    if parts.queue.copies is not None:
        places.append((parts.queue.copies, "start", "copy"))
    for owner, method, label in places:
        setattr(owner, method, _named(getattr(owner, method), label))
    try:
        yield
    finally:
        for owner, method, _ in places:
            delattr(owner, method)  # the class's own is there again


def _named(method: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def ranged(*arguments: Any, **options: Any) -> Any:
        with record_function(label):
            return method(*arguments, **options)

    return ranged
