"""`spd explain`: why speculation pays or does not, from a trace: a table, and a paragraph in words."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.options import CommonOptions, Session, argument, printed
from spd.cli.text.output import Sink, printable, to_json
from spd.cli.text.table import WIDTH, render_table
from spd.cli.text.wrap import fit_lines
from spd.errors import IncompatibleError

if TYPE_CHECKING:
    from spd.runtime import Engine
    from spd.runtime.lab import Explanation, Trace, TraceHeader


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(CommonOptions):
    """Everything `spd explain` takes."""

    files: list[Path] = argument("TRACE …", "Files of --trace, all of one model.")
    json: bool = printed(False, None, "One JSON object.")


def explain(session: Session, options: ExplainOptions) -> int:
    """Say in words what a trace shows: costs, acceptance, the best K, and what to try next."""
    from spd.runtime.lab import explain_traces, read_traces

    sink = Sink.stdout()
    traces = read_traces(options.files)
    models = {trace.header.model for trace in traces if trace.header is not None}
    if len(models) > 1:
        raise IncompatibleError(
            "the traces are of different models", reason=sorted(models), fix=["spd explain one at a time"]
        )
    ways = {_way(trace) for trace in traces if any(record.k for record in trace.rounds)}
    if len(ways) > 1:
        raise IncompatibleError(
            "the traces are of different ways of drafting",
            reason=sorted(ways),
            fix=["spd explain each by itself, with one of plain decoding beside it"],
        )
    found = explain_traces(traces)
    text = to_json(found.as_dict()) + "\n" if options.json else explanation_text(found, sink.columns)
    sink.write(printable(text))
    return 0


def _way(trace: Trace) -> str:
    """What decides acceptance besides k."""
    if trace.header is None:
        return "of an unknown drafter"
    plan = trace.header.plan
    words = [f"{plan.get('spec')}", f"--verify {plan.get('verify')}", f"T {trace.header.temperature:g}"]
    words += [str(plan[name]) for name in ("draft_model", "mtp") if plan.get(name)]
    imposed = plan.get("synthetic_acceptance")
    return ", ".join(words) + ("" if imposed is None else f", imposed length {imposed:g}")


def explanation_text(found: Explanation, columns: int | None) -> str:
    """The table of prospects, acceptance by position, and the paragraph, for a terminal or for none."""
    from spd.runtime.lab import paragraph

    chosen = [p for p in (found.plain, *found.own, *found.ngram) if _is_shown(p.k, p.method, found)]
    best = found.best
    rows = [
        [
            f"{p.method} k={p.k}" if p.k else "plain",
            f"{p.round_ms:.2f}",
            f"{p.length:.2f}",
            f"{p.round_ms / found.plain.round_ms:.2f}",
            f"{p.tokens_per_second:.1f}",
            f"{p.speed_up:.2f}",
            ("← now" if (p.method, p.k) == (found.now.method, found.now.k) else "")
            + (" ← best" if (p.method, p.k) == (best.method, best.k) else ""),
        ]
        for p in chosen
    ]
    header = ["", "ms/round", "tok/round", "pays from", "tok/s", "× plain", ""]
    text = render_table(header, rows, columns=columns)
    measured = " ".join(f"{n}:{ms:.2f}" for n, ms in found.costs.verify.items())
    text += f"verify ms by rows, measured: {measured}\n"
    if found.acceptance.conditional:
        rates = " ".join(f"{rate:.0%}" for rate in found.acceptance.conditional)
        text += f"accepted by position, if all before were: {rates}\n"
    words = textwrap.fill(paragraph(found), min(columns or WIDTH, WIDTH))
    return f"{fit_lines(text, columns)}\n{words}\n"


def _is_shown(k: int, method: str, found: Explanation) -> bool:
    """Short ones, the one that ran, the best, the furthest, and one of each method's long ones."""
    return (
        k <= 4
        or k in (6, 8, 12, 16, len(found.own))
        or (method, k)
        in (
            (found.now.method, found.now.k),
            (found.best.method, found.best.k),
        )
    )


def trace_header(engine: Engine, model: str, temperature: float, prompt_ids: tuple[int, ...]) -> TraceHeader:
    """The first line of a trace file."""
    from spd.runtime.lab import TraceHeader

    return TraceHeader(model, temperature, engine.plan.as_dict(), prompt_ids)
