# mypy: disable-error-code="no-untyped-call"
"""Times on a GPU: warmed up, by device events, every repeat kept, taken twice to show the noise."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.summaries import Summary, summarize


def time_calls(calls: Sequence[Callable[[], object]], repeats: int = 30) -> dict[str, Any]:
    """Time the calls in rotation (give several so that none finds its data in the cache);
    milliseconds.

    Two passes of `repeats` are taken; `again_over_first` is the ratio of their medians: differences
    between versions smaller than its distance from 1 are noise.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    passes = [_one_pass(calls, repeats) for _ in range(2)]
    summary = summarize([value for one_pass in passes for value in one_pass.values])
    return {**summary.as_dict(), "again_over_first": passes[1].median / passes[0].median}


def _one_pass(calls: Sequence[Callable[[], object]], repeats: int) -> Summary:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for index in range(repeats):
        events[2 * index].record()
        calls[index % len(calls)]()
        events[2 * index + 1].record()
    torch.cuda.synchronize()
    return summarize([events[2 * i].elapsed_time(events[2 * i + 1]) for i in range(repeats)])


def describe_gpu() -> dict[str, Any]:
    """Return the first GPU's properties, with the versions of driver, torch and triton."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=nvidia_driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.splitlines()[0].strip() if run.stdout.strip() else None
