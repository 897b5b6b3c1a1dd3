"""`spd explain`: explains from a trace why speculation pays or not, in a table and a paragraph."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from spd.cli.options import JsonOptions, argument, output_option
from spd.cli.plot import PLOT_HELP, check_plot, plot_explanation
from spd.cli.terminal.bars import NARROW_COLUMNS, Bar, BarGlyphs, bar_lines
from spd.cli.terminal.console import Session
from spd.cli.terminal.plain_text import PARAGRAPH_COLUMNS
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
    """The options of `spd explain`."""

    files: list[Path] = argument("TRACE …", "Files of --trace, all of one model.")
    plot: Path | None = output_option(None, "FILE", PLOT_HELP)


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
    drafting_methods = {
        _drafting_settings_text(trace.header)
        for trace in traces
        if any(record.k for record in trace.rounds)
    }
    if len(models) > 1 or len(drafting_methods) > 1:
        message = "the traces are of different models or different ways of drafting"
        fix = ["spd explain each by itself, with one of plain decoding beside it"]
        raise IncompatibleError(message, reason=sorted(models | drafting_methods), fix=fix)
    explanation = explain_traces(traces)
    columns = columns_of(sys.stdout) or PARAGRAPH_COLUMNS
    lines = explanation_lines(explanation, columns, sink.glyphs())
    sink.write_result(options.json, explanation.as_dict(), lines)
    if options.plot is not None:
        plot_explanation(explanation, options.plot)


def _drafting_settings_text(header: TraceHeader) -> str:
    """Return the settings that decide acceptance besides k, as text."""
    plan = header.plan
    parts = [plan.get("spec"), f"--verify {plan.get('verify')}", f"T {header.temperature:g}"]
    return ", ".join(
        str(part) for part in (*parts, plan.get("draft_model"), plan.get("mtp_head")) if part
    )


def _estimate_cells(
    name: str, estimate: Estimate, explanation: Explanation, mark: str
) -> list[str]:
    """Return the cells of a row of the table of predictions; `mark` is the last one."""
    return [
        name,
        f"{estimate.round_ms:.2f}",
        f"{estimate.length:.2f}",
        f"{estimate.round_ms / explanation.plain.round_ms:.2f}",
        f"{estimate.tokens_per_second:.1f}",
        f"{estimate.speed_up:.2f}",
        mark,
    ]


def explanation_lines(
    explanation: Explanation, columns: int, glyphs: BarGlyphs | None
) -> list[str]:
    """Return lines: a table of the run and predictions, acceptance by position, and a paragraph.

    columns: the width in cells. glyphs: characters of bars; None lists acceptance without bars.
    """
    shown_counts = {0, 1, 2, 3, 4, 6, 8, 12, 16, len(explanation.prospects) - 1}
    shown_counts |= {explanation.k, explanation.best.k}
    rows = [_estimate_cells("this run", explanation.now, explanation, "← now")]
    for estimate in explanation.prospects:
        if estimate.k in shown_counts:
            name = f"{explanation.method} k={estimate.k}" if estimate.k else "plain"
            mark = "← best" if estimate is explanation.best else ""
            rows.append(_estimate_cells(name, estimate, explanation, mark))
    header = ["", "ms/round", "tok/round", "pays from", "tok/s", "× plain", ""]
    if columns < NARROW_COLUMNS:
        header = [header[0], *header[4:]]
        rows = [[cells[0], *cells[4:]] for cells in rows]
    lines = table_lines(header, rows)
    shares = [f"{share:.0%}" for share in explanation.acceptance]
    if shares and glyphs is None:
        lines.append(f"accepted by position: {' '.join(shares)}")
    elif shares and glyphs is not None:
        bars = [
            Bar(f"draft {position}", share, share_text, *interval)
            for position, (share, share_text, interval) in enumerate(
                zip(explanation.acceptance, shares, explanation.acceptance_intervals, strict=True),
                1,
            )
        ]
        title = "accepted by position, 95 % interval"
        lines += ["", title, *bar_lines(bars, columns, glyphs, axis=1.0), ""]
    return [
        *lines,
        *textwrap.wrap(
            summarize(explanation), min(PARAGRAPH_COLUMNS, columns - 1), break_on_hyphens=False
        ),
    ]
