"""`spd explain`: why speculation pays or does not, from a trace: a table, and a paragraph in words."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from spd.cli.options import JsonOptions, argument
from spd.cli.terminal.console import Session
from spd.cli.terminal.plain_text import WIDTH
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.tables import table_lines
from spd.errors import IncompatibleError
from spd.runtime.lab import Explanation, TraceHeader, explain_traces, paragraph, read_trace


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(JsonOptions):
    """Everything `spd explain` takes."""

    files: list[Path] = argument("TRACE …", "Files of --trace, all of one model.")


def explain(session: Session, options: ExplainOptions) -> None:
    """Say in words what a trace shows: costs, acceptance, the best K, and what to try next.

    Examples:
      spd generate -n 256 --trace run.jsonl "Write a poem"
      spd explain run.jsonl
    """
    sink = Sink.stdout()
    traces = [read_trace(path) for path in options.files]
    models = {trace.header.model for trace in traces}
    ways = {_way(trace.header) for trace in traces if any(record.k for record in trace.rounds)}
    if len(models) > 1 or len(ways) > 1:
        words = "the traces are of different models or different ways of drafting"
        fix = ["spd explain each by itself, with one of plain decoding beside it"]
        raise IncompatibleError(words, reason=sorted(models | ways), fix=fix)
    found = explain_traces(traces)
    sink.answer(options.json, found.as_dict(), explanation_lines(found))


def _way(header: TraceHeader) -> str:
    """What decides acceptance besides k."""
    plan = header.plan
    words = [plan.get("spec"), f"--verify {plan.get('verify')}", f"T {header.temperature:g}"]
    return ", ".join(
        str(word) for word in (*words, plan.get("draft_model"), plan.get("mtp_head")) if word
    )


def explanation_lines(found: Explanation) -> list[str]:
    """The table of prospects, acceptance by position, and the paragraph."""
    rows = [
        [
            f"{found.method} k={p.k}" if p.k else "plain",
            f"{p.round_ms:.2f}",
            f"{p.length:.2f}",
            f"{p.round_ms / found.plain.round_ms:.2f}",
            f"{p.tokens_per_second:.1f}",
            f"{p.speed_up:.2f}",
            " ".join(
                mark for mark, way in (("← now", found.now), ("← best", found.best)) if way is p
            ),
        ]
        for p in found.prospects
        if p.k in (*range(5), 6, 8, 12, 16, len(found.prospects) - 1, found.k, found.best.k)
    ]
    header = ["", "ms/round", "tok/round", "pays from", "tok/s", "× plain", ""]
    lines = table_lines(header, rows)
    if found.survival:
        lines.append(
            f"accepted by position: {' '.join(f'{share:.0%}' for share in found.survival)}"
        )
    return [*lines, *textwrap.wrap(paragraph(found), WIDTH)]
