"""`spd explain`: why speculation pays or does not, from a trace: a table, and a paragraph in words."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from spd.cli.options import JsonOptions, argument, printed
from spd.cli.plot import PLOT_HELP, check_plot, plot_explanation
from spd.cli.terminal.bars import NARROW, Bar, BarGlyphs, bar_lines
from spd.cli.terminal.console import Session
from spd.cli.terminal.plain_text import WIDTH
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.streams import columns_of
from spd.cli.terminal.tables import table_lines
from spd.errors import IncompatibleError
from spd.runtime.lab import (
    Estimate,
    Explanation,
    TraceHeader,
    explain_traces,
    read_trace,
    summarize,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(JsonOptions):
    """Everything `spd explain` takes."""

    files: list[Path] = argument("TRACE …", "Files of --trace, all of one model.")
    plot: Path | None = printed(None, "FILE", PLOT_HELP)


def explain(session: Session, options: ExplainOptions) -> None:
    """Say in words what a trace shows: costs, acceptance, the best K, and what to try next.

    Examples:
      spd generate -n 256 --trace run.jsonl "Write a poem"
      spd explain run.jsonl
    """
    check_plot(options.plot)
    sink = Sink.stdout()
    traces = [read_trace(path) for path in options.files]
    models = {trace.header.model for trace in traces}
    ways = {_way(trace.header) for trace in traces if any(record.k for record in trace.rounds)}
    if len(models) > 1 or len(ways) > 1:
        words = "the traces are of different models or different ways of drafting"
        fix = ["spd explain each by itself, with one of plain decoding beside it"]
        raise IncompatibleError(words, reason=sorted(models | ways), fix=fix)
    found = explain_traces(traces)
    columns = columns_of(sys.stdout) or WIDTH
    lines = explanation_lines(found, columns, sink.glyphs())
    sink.answer(options.json, found.as_dict(), lines)
    if options.plot is not None:
        plot_explanation(found, options.plot)


def _way(header: TraceHeader) -> str:
    """What decides acceptance besides k."""
    plan = header.plan
    words = [plan.get("spec"), f"--verify {plan.get('verify')}", f"T {header.temperature:g}"]
    return ", ".join(
        str(word) for word in (*words, plan.get("draft_model"), plan.get("mtp_head")) if word
    )


def _prospect_cells(name: str, prospect: Estimate, found: Explanation, mark: str) -> list[str]:
    """Return a row of the table."""
    return [
        name,
        f"{prospect.round_ms:.2f}",
        f"{prospect.length:.2f}",
        f"{prospect.round_ms / found.plain.round_ms:.2f}",
        f"{prospect.tokens_per_second:.1f}",
        f"{prospect.speed_up:.2f}",
        mark,
    ]


def explanation_lines(found: Explanation, columns: int, glyphs: BarGlyphs | None) -> list[str]:
    """Return the table of the run and of prospects, acceptance by position, and the paragraph.

    glyphs: those of bars, on a terminal of so many columns.
    """
    rows = [_prospect_cells("this run", found.now, found, "← now")]
    for prospect in found.prospects:
        if prospect.k in (*range(5), 6, 8, 12, 16, len(found.prospects) - 1, found.k, found.best.k):
            name = f"{found.method} k={prospect.k}" if prospect.k else "plain"
            mark = "← best" if prospect is found.best else ""
            rows.append(_prospect_cells(name, prospect, found, mark))
    header = ["", "ms/round", "tok/round", "pays from", "tok/s", "× plain", ""]
    if columns < NARROW:
        header, *rows = ([cells[0], *cells[4:]] for cells in (header, *rows))
    lines = table_lines(header, rows)
    shares = [f"{share:.0%}" for share in found.survival]
    if shares and glyphs is None:
        lines.append(f"accepted by position: {' '.join(shares)}")
    elif shares and glyphs is not None:
        bars = [
            Bar(f"draft {position}", share, words)
            for position, (share, words) in enumerate(zip(found.survival, shares, strict=True), 1)
        ]
        lines += ["", "accepted by position", *bar_lines(bars, columns, glyphs, axis=1.0), ""]
    return [
        *lines,
        *textwrap.wrap(summarize(found), min(WIDTH, columns - 1), break_on_hyphens=False),
    ]
