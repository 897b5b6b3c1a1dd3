# mypy: disable-error-code="no-untyped-call"
"""Times of one operation as a round pays for it: in a CUDA graph of many launches, cold in the
cache.

`Once` has the same face and runs every call a single time: it compiles the kernels beforehand, and
lets the cases run where there is no GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch

ROTATED_BYTES = 256 << 20
"""Operands in rotation, several times the last level cache of any GPU at hand."""
MAX_COPIES = 128
REPLAYS = 5
MIN_LAUNCHES = 16
MIN_SECONDS = 1e-3
Call = Callable[[], object]


class Timer(Protocol):
    """How an operation is timed, and how many copies of its operands that takes."""

    device: str

    def copies(self, nbytes: int) -> int:
        """Return the number of operands of `nbytes` bytes to rotate."""
        ...

    def microseconds(self, calls: Sequence[Call]) -> float:
        """Time of one call, taken in turn."""
        ...


class Once:
    """Runs every call once and measures nothing."""

    def __init__(self, device: str) -> None:
        self.device = device

    def copies(self, nbytes: int) -> int:
        """Return 1."""
        return 1

    def microseconds(self, calls: Sequence[Call]) -> float:
        """Run the calls; 0."""
        for call in calls:
            call()
        if self.device != "cpu":
            torch.cuda.synchronize()
        return 0.0


class GraphTimer:
    """Captures the calls in turn until the graph is long enough, replays it, takes the median."""

    def __init__(self, device: str = "cuda", replays: int = REPLAYS) -> None:
        self.device = device
        self.replays = replays
        self.stream = torch.cuda.Stream()

    def copies(self, nbytes: int) -> int:
        """Return enough operands to exceed the cache, MAX_COPIES at most."""
        return min(MAX_COPIES, max(1, -(-ROTATED_BYTES // max(1, nbytes))))

    def microseconds(self, calls: Sequence[Call]) -> float:
        """Return the median over replays; every launch in the graph waits for the one before."""
        stream = self.stream
        torch.cuda.synchronize()  # the operands may still be being made
        with torch.cuda.stream(stream):
            # Twice: compiled and loaded by the first, the second tells how long the graph should
            # be.
            calls[0]()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[-1]()
            end.record()
            stream.synchronize()
            guess = max(1e-6, 1e-3 * begin.elapsed_time(end))
            launches = max(len(calls), MIN_LAUNCHES if guess < MIN_SECONDS else 2)
            graph = capture(lambda: [calls[index % len(calls)]() for index in range(launches)])
            graph.replay()
            times: list[float] = []
            for _ in range(self.replays):
                begin.record()
                graph.replay()
                end.record()
                stream.synchronize()
                times.append(1e3 * begin.elapsed_time(end) / launches)
        del graph
        return median(times)


def capture(program: Call) -> torch.cuda.CUDAGraph:
    """Record what the program enqueues on the current stream, which must not be the default one.

    Without the collection of garbage that `torch.cuda.graph` begins with: it takes longer than most
    measurements here.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_stream().synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        program()
    finally:
        graph.capture_end()
    return graph


def free_memory() -> None:
    """Give back what nothing refers to any more, so that the next engine finds its room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
