"""Program runs: which program writes which cache positions, prompt chunks or tiles of a few rows.

The bits of a cache entry are a function of tokens and spans alone, so hits, misses and replays
agree. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

ProgramKind = Literal["chunk", "tile"]


class ProgramRun(NamedTuple):
    """Positions start to end (exclusive) written by one kind of program."""

    start: int
    end: int
    kind: ProgramKind


def _append_run(runs: list[ProgramRun], start: int, end: int, kind: ProgramKind) -> None:
    """Append a run to `runs` in place; a tile run after a tile run is merged with it."""
    if kind == "tile" and runs and runs[-1].kind == "tile":
        start = runs.pop().start
    runs.append(ProgramRun(start, end, kind))


def program_runs(spans: Iterable[tuple[str, int]], chunk: int) -> list[ProgramRun]:
    """Return the program runs of spans (origin "prompt" or "generated", length in tokens).

    A prompt span's full chunks, counted from the span's start, are chunk runs of exactly `chunk`
    positions; its tail and every generated span are tile runs. The tail has at least the span's
    last token, which the first round feeds.
    """
    runs: list[ProgramRun] = []
    position = 0
    for origin, length in spans:
        end = position + length
        while origin == "prompt" and position + chunk < end:
            runs.append(ProgramRun(position, position + chunk, "chunk"))
            position += chunk
        if position < end:
            _append_run(runs, position, end, "tile")
            position = end
    return runs


def runs_below(runs: Sequence[ProgramRun], end: int) -> list[ProgramRun]:
    """Return the runs of all positions below `end`; tiles write what lies behind the last run.

    The runs begin at 0 and leave no gap. A chunk run that `end` cuts becomes a tile run, since no
    program runs a part of a chunk.
    """
    clipped: list[ProgramRun] = []
    for run in (*runs, ProgramRun(runs[-1].end if runs else 0, end, "tile")):
        if run.start < end:
            _append_run(
                clipped, run.start, min(run.end, end), run.kind if run.end <= end else "tile"
            )
    return clipped


def reusable_prefix(runs: Sequence[ProgramRun], cached: int) -> int:
    """Return how many of the first `cached` positions can be reused without cutting a chunk run."""
    for run in runs:
        if run.kind == "chunk" and run.start < cached < run.end:
            return run.start
    return cached


def kinds_in(
    runs: Sequence[ProgramRun], start: int, end: int
) -> tuple[tuple[int, int, ProgramKind], ...]:
    """Return the runs within a window: (offset of the run's start, end in the window, kind).

    The offset of a chunk run's start is negative where it lies before the window: the chunk that a
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
