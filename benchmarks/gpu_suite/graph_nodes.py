"""Probe: what one more kernel in a CUDA graph costs, and what a replay costs the host.

A round of an 8 B model has some 200 nodes, so a microsecond each is a twentieth of its time.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu_suite.kernels import add_one
from benchmarks.gpu_suite.measure import time_calls
from benchmarks.summaries import summarize

NODES = (50, 100, 200, 400, 800)


def slope(xs: tuple[float, ...], ys: tuple[float, ...]) -> tuple[float, float]:
    """Return slope and intercept of the least-squares line."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return rise, mean_y - rise * mean_x


def capture(nodes: int, counters: torch.Tensor, kind: str) -> torch.cuda.CUDAGraph:
    """Capture `nodes` dependent additions, through Triton or through torch."""
    add_one(counters, 1)
    counters.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            if kind == "triton":
                add_one(counters, 1)
            else:
                counters.add_(1)
    return graph


def measure(programs: int, kind: str) -> dict[str, Any]:
    """Replay graphs of every length and fit the cost of a node; each replay's counting is checked."""
    sizes: dict[str, Any] = {}
    for nodes in NODES:
        counters = torch.zeros(programs, dtype=torch.int32, device="cuda")
        graph = capture(nodes, counters, kind)
        counters.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not bool((counters == nodes).all()):
            raise AssertionError(f"a graph of {nodes} additions counted to {counters[0].item()}")
        times = time_calls([graph.replay], repeats=100)
        host = []
        for _ in range(50):
            began = time.perf_counter()
            graph.replay()
            host.append(1e6 * (time.perf_counter() - began))
            torch.cuda.synchronize()
        sizes[str(nodes)] = {"ms": times, "host_us": summarize(host).as_dict()}
    medians = tuple(1e3 * sizes[str(nodes)]["ms"]["median"] for nodes in NODES)
    per_node, fixed = slope(tuple(map(float, NODES)), medians)
    return {"us_per_node": per_node, "us_fixed": fixed, "graphs": sizes}


def run() -> dict[str, Any]:
    """Measure nodes of one program and of one a multiprocessor."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "triton_1_program": measure(1, "triton"),
        "triton_full_width": measure(multiprocessors, "triton"),
        "torch_add": measure(1, "torch"),
    }
