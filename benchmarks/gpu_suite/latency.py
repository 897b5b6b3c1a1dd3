"""What one request waits for: its first token, cold and warm, and the gaps between those that
follow."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.round_times import GREEDY, random_prompt
from spd.runtime import Engine, Request
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.lab.rows import percentile

WARM_UP_TOKENS = 8
"""Tokens of a request that captures what the next one runs."""


def run_alone(
    engine: Engine, prompt: tuple[int, ...], tokens: int
) -> tuple[RequestMetrics, list[float]]:
    """Run one request to its end; its counters, and when its tokens came, in seconds."""
    engine.add(Request("alone", prompt, replace(GREEDY, max_tokens=tokens)))
    came = []
    while engine.has_work:
        if any(event.token_ids for event in engine.step()):
            came.append(time.perf_counter())
    return engine.metrics("alone"), came


def compiled_kernels() -> int:
    """Count the kernels in Triton's cache on disk; 0 without one."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def first_tokens(engine: Engine, prompt: int, vocab: int) -> dict[str, Any]:
    """Measure milliseconds to the first token of a new engine's first request, and of a later one.

    Cold is what follows loading: capture, and compiling what no cache on disk holds, of which there
    is a number. No prompt is like another.
    """
    before = compiled_kernels()
    cold, _ = run_alone(engine, random_prompt(prompt, vocab, 101), 2)
    compiled = compiled_kernels() - before
    warm, _ = run_alone(engine, random_prompt(prompt, vocab, 102), 2)
    return {
        "prompt": prompt,
        "load_ms": cold.load_ms,
        "cold_ms": cold.first_token_ms,
        "warm_ms": warm.first_token_ms,
        "kernels_compiled": compiled,
    }


def token_gaps(engine: Engine, prompt: int, tokens: int, vocab: int) -> dict[str, Any]:
    """Measure one request's acceptance and ms between its emissions, after graphs are captured."""
    run_alone(engine, random_prompt(prompt, vocab, 103), WARM_UP_TOKENS)
    metrics, came = run_alone(engine, random_prompt(prompt, vocab, 104), tokens)
    gaps = [1e3 * (after - before) for before, after in pairwise(came)]
    return {
        "lag": engine.plan.lag,
        "rounds": metrics.rounds,
        "acceptance_rate": metrics.draft_acceptance_rate,
        "acceptance_length": metrics.mean_acceptance_length,
        "itl_ms": [percentile(gaps, share) for share in (0.5, 0.99)],
        "tpot_ms": metrics.time_per_output_token_ms,
    }
