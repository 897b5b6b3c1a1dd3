"""`spd explain`: why speculation pays or does not, from a trace: a table, and a paragraph in words."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from typing import TYPE_CHECKING

from spd.cli.output import Sink, columns_of, printable, to_json
from spd.cli.table import WIDTH, render_table
from spd.cli.wrap import fit_lines
from spd.errors import IncompatibleError

if TYPE_CHECKING:
    from spd.cli.bench_options import ExplainOptions
    from spd.cli.options import Session
    from spd.runtime import Engine, Request, RoundRecord
    from spd.runtime.lab.explain import Explanation
    from spd.runtime.lab.trace_file import Trace, TraceHeader

PLAIN_ROUNDS = 12
"""Plain rounds after a reply that had none."""


def explain(session: Session, options: ExplainOptions) -> int:
    """Say in words what a trace shows: costs, acceptance, the best K, and what to try next."""
    from spd.runtime.lab.explain import explain as explain_traces
    from spd.runtime.lab.trace_file import read_traces

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
    from spd.runtime.lab.explain_words import paragraph

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
    from spd.runtime.lab.trace_file import TraceHeader

    return TraceHeader(model, temperature, engine.plan.as_dict(), prompt_ids)


def complete(trace: Trace, engine: Engine, request: Request) -> None:
    """Run a few plain rounds where a reply had none: what speculation is held against is measured."""
    from spd.runtime import Request

    if not trace.rounds or any(record.k == 0 for record in trace.rounds):
        return
    if engine.has_work:
        return  # the reply was given up, and the engine may be anywhere

    def keep(record: RoundRecord) -> None:
        if record.round and not record.k:
            trace.rounds.append(record)

    before, engine.trace = engine.trace, keep
    params = dataclasses.replace(request.params, max_tokens=PLAIN_ROUNDS, ignore_eos=True, min_tokens=0)
    plain = Request(f"{request.id}.plain", request.prompt_ids, params, request.spans)
    engine.hold_draft_length(0)
    try:
        engine.generate([plain])
    finally:
        engine.hold_draft_length(None)
        engine.trace = before


def live_explanation(trace: Trace) -> str:
    """The paragraph after a reply, for standard error; a sentence where there was too little to see."""
    from spd.runtime.lab.explain import explain as explain_traces

    if not trace.rounds:
        return "explain: the reply was too short, nothing was speculated\n"
    return explanation_text(explain_traces([trace]), columns_of(sys.stderr))
