"""Which program writes which cache positions: whole chunks by prefill, the rest by verify tiles.

The bits of a cache entry are a function of tokens and spans alone, so hits, misses and replays agree.
No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["chunk", "tile"]


class Run(NamedTuple):
    """Positions start to end (exclusive) written by one kind of program."""

    start: int
    end: int
    kind: Kind


def _append(runs: list[Run], start: int, end: int, kind: Kind) -> None:
    """Append a run; neighbouring tile runs are joined."""
    if kind == "tile" and runs and runs[-1].kind == "tile":
        start = runs.pop().start
    runs.append(Run(start, end, kind))


def program_runs(spans: Iterable[tuple[str, int]], chunk: int) -> list[Run]:
    """Cut spans ("prompt" or "generated", length) into runs.

    A prompt span's full chunks, counted from the span's start, are chunk runs of exactly `chunk`
    positions; its tail and every generated span are tile runs. The tail holds at least the span's
    last token, which the first round feeds.
    """
    runs: list[Run] = []
    position = 0
    for origin, length in spans:
        end = position + length
        while origin == "prompt" and position + chunk < end:
            runs.append(Run(position, position + chunk, "chunk"))
            position += chunk
        if position < end:
            _append(runs, position, end, "tile")
            position = end
    return runs


def runs_below(runs: Sequence[Run], end: int) -> list[Run]:
    """Runs of all positions below `end`: what is cut, or no run describes, is written by tiles.

    A chunk that would be cut becomes a tile run: a program never runs half a chunk.
    """
    found: list[Run] = []
    for run in (*runs, Run(runs[-1].end if runs else 0, end, "tile")):
        if run.start < end:
            _append(found, run.start, min(run.end, end), run.kind if run.end <= end else "tile")
    return found


def reusable_prefix(runs: Sequence[Run], cached: int) -> int:
    """How many of `cached` leading positions can be kept without cutting a chunk run."""
    for run in runs:
        if run.kind == "chunk" and run.start < cached < run.end:
            return run.start
    return cached


def kinds_in(runs: Sequence[Run], start: int, end: int) -> tuple[tuple[int, int, Kind], ...]:
    """Runs seen through a window, as (offset of the run's start, end in the window, kind).

    A chunk run's start is given relative to the window even where it lies before it: which chunk a
    position belongs to is part of how it was computed.
    """
    return tuple(
        (
            run.start - start if run.kind == "chunk" else max(run.start, start) - start,
            min(run.end, end) - start,
            run.kind,
        )
        for run in runs
        if run.start < end and run.end > start
    )
