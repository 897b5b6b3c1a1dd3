# mypy: disable-error-code="no-untyped-call"
"""Probe: when each kernel of a plain round begins and ends, by the profiler.

A kernel that begins before the one in front of it has ended has a gap below zero: it waits then for
what that one writes. A gap above zero is time in which the device does nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_suite.end_to_end import attempt, config_of
from benchmarks.gpu_suite.round_times import GREEDY, random_prompt, start, stop, with_engine
from benchmarks.gpu_suite.shapes import QWEN3_06B, QWEN3_8B, Shape
from spd.runtime import Engine

TIMELINE_SHAPES = (QWEN3_8B, QWEN3_06B)
ROUNDS = 20
PROMPT = 1024
WARM_ROUNDS = 12
MOST_KERNELS = 24
"""Kernels of a shape in the report, those that take longest in all."""


@dataclass(frozen=True)
class Launch:
    """One kernel as it ran; microseconds."""

    name: str
    begin: float
    end: float


def profile_rounds(engine: Engine, rounds: int) -> list[Launch]:
    """Return the kernels of so many steps as they begin; of a CPU the operators."""
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    device_type = torch.profiler.DeviceType.CUDA if on_gpu else torch.profiler.DeviceType.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(rounds):
            engine.step()
        if on_gpu:
            torch.cuda.synchronize()
    launches = [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == device_type and event.cpu_parent is None
    ]
    return sorted(launches, key=lambda launch: launch.begin)


def summarize_launches(launches: Sequence[Launch], rounds: int) -> dict[str, Any]:
    """Return each kernel's launches a round, its mean time, and the mean gap in front of it.

    Kernels whose time in all is longest come first; microseconds.
    """
    times: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    for launch in launches:
        times.setdefault(launch.name, []).append(launch.end - launch.begin)
    for before, launch in pairwise(launches):
        gaps.setdefault(launch.name, []).append(launch.begin - before.end)
    longest = sorted(times, key=lambda name: -sum(times[name]))
    kernels = {
        name: {
            "launches": len(times[name]) / rounds,
            "us": mean(times[name]),
            "gap_us": mean(gaps[name]) if name in gaps else None,
        }
        for name in longest[:MOST_KERNELS]
    }
    idle = sum(gap for of_kernel in gaps.values() for gap in of_kernel if gap > 0)
    return {
        "launches": len(launches) / rounds,
        "busy_us": sum(map(sum, times.values())) / rounds,
        "idle_us": idle / rounds,
        "kernels": kernels,
    }


def trace_plain_rounds(engine: Engine, shape: Shape, prompt: int, rounds: int) -> dict[str, Any]:
    """Return the summary of plain rounds behind a prompt."""
    start(engine, [random_prompt(prompt, shape.vocab, 0)], GREEDY, WARM_ROUNDS)
    launches = profile_rounds(engine, rounds)
    stop(engine, 1)
    return summarize_launches(launches, rounds)


def run(
    shapes: Sequence[Shape] = TIMELINE_SHAPES,
    prompt: int = PROMPT,
    rounds: int = ROUNDS,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Trace plain rounds of every shape."""
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for shape in shapes:
            ctx = prompt + WARM_ROUNDS + rounds + 64
            config = config_of(Path(place), shape, ctx=ctx, **options)
            work = partial(trace_plain_rounds, shape=shape, prompt=prompt, rounds=rounds)
            models[shape.name] = attempt(partial(with_engine, config, work))
            yield {"models": models}
