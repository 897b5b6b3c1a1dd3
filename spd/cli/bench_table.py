"""The text of `spd bench` and `spd compare`: a table of rows, what was measured, and what is best."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spd.cli.terminal.bars import NARROW, Bar, BarGlyphs, bar_lines
from spd.cli.terminal.plain_text import cells
from spd.cli.terminal.tables import fact_lines, table_lines
from spd.runtime.lab import models_of, verdict

SCHEMA = "spd.bench/1"
SLOWER = "▼"
Row = Mapping[str, Any]


def bench_text(result: Mapping[str, Any], glyphs: BarGlyphs | None = None) -> list[str]:
    """Return a table, bars of `glyphs` where there are some, and what stands below it."""
    rows = result["rows"]
    if not rows:
        return ["nothing was measured"]
    columns = shutil.get_terminal_size((120, 0)).columns
    bars = [] if glyphs is None else speed_bars(rows, columns, glyphs)
    # Bars say what a narrow table does, and are not broken.
    are_enough = bars and columns < NARROW and chief_rows(rows) == rows
    table = [] if are_enough else _fitting_table(rows, columns)
    return [*table, *bars, *fact_lines(_facts(result)), LEGEND]


def _fitting_table(rows: Sequence[Row], columns: int) -> list[str]:
    """Return a table with as many figures as fit beside each other, two at least."""
    over_first = OVER_FIRST if any(row["over_first_model"] for row in rows) else ()
    for figures in ((*FIGURES, *WIDE), FIGURES, FIGURES[:SPEEDS]):
        table = row_table(rows, (*figures, *over_first))
        if max(map(cells, table)) < columns:
            return table
    return row_table(rows, NARROW_FIGURES, always=("method",))


MOST_BARS = 40  # of more a table says more


def speed_bars(rows: Sequence[Row], columns: int, glyphs: BarGlyphs) -> list[str]:
    """Return bars of tokens a second with their intervals, for each work a heading and a bar a method."""
    groups: dict[str, list[Row]] = {}
    for row in chief_rows(rows):
        groups.setdefault(work_name(row), []).append(row)
    if sum(map(len, groups.values())) > MOST_BARS:
        return []
    labels = bar_labels(rows)
    lines = []
    for work, members in groups.items():
        bars = []
        for row in members:
            speed = row["tokens_per_second"]
            ratio = row["speed_up"]
            words = f"{speed['median']:.1f}" + (f" {ratio['median']:.2f}×" if ratio else "")
            bars.append(Bar(labels(row), speed["median"], words, speed["low"], speed["high"]))
        lines += ["", f"tok/s, {work}", *bar_lines(bars, columns, glyphs)]
    return [*lines, ""]


def work_name(row: Row) -> str:
    """Return what a row's requests were: `code, T 0`, with what else is not usual."""
    parts = ["all prompts" if row["category"] == "all" else row["category"]]
    parts.append(f"T {row['temperature']:g}")
    if row["prompt_tokens_asked"]:
        parts.append(f"{row['prompt_tokens_asked']} tokens")
    if row["concurrency"] > 1:
        parts.append(f"{row['concurrency']} together")
    if row["rate"] is not None:
        parts.append(f"{row['rate']:g}/s")
    return ", ".join(parts)


def bar_labels(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what names a row among rows of the same work: its method, and what else differs in `rows`."""
    among = ("model", "lag", "graphs", "tp", "draft-tp")
    differing = [
        (name, cell) for name, cell in NAMES if name in among and len(set(map(cell, rows))) > 1
    ]

    def label(row: Row) -> str:
        words = [
            cell(row) if name == "model" else f"{name} {cell(row)}" for name, cell in differing
        ]
        return " ".join([*words[:1], method_name(row), *words[1:]] if words else [method_name(row)])

    return label


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what was measured with what, whether texts are equal, and what was fastest."""
    plan, versions, rows, equality = (result[n] for n in ("plans", "versions", "rows", "equality"))
    plan = plan[0]
    differences = equality["differences"]
    machine = (
        f"CPU x{plan['threads']}" if plan["device"] == "cpu" else result["machine"].get("gpu", "?")
    )
    asked = {(each["config"], json.dumps(each["work"])) for each in result["samples"]}
    lost = len(asked) - sum(row["category"] != "all" for row in rows)
    texts = (
        f"equal to plain decoding ({equality['tokens']:,} tokens compared)"
        if equality["tokens"]
        else ""
    )
    if any(row["acceptance"] == "imposed" for row in rows):
        texts = "without meaning: acceptance is imposed, and drafts are taken unread"
    if differences:
        first = "prompt {prompt}, T {temperature:g}, token {position}".format(**differences[0])
        texts = f"{len(differences)} DIFFER from plain decoding; the first: {first}"
    models = models_of(result)
    tokens = "the models cut text into other tokens: their tok/s do not count the same"
    return {
        "model": _models(result),
        "tokens": "" if result["same_tokens"] else tokens,
        "run": f"{machine} · torch {versions.get('torch', '?')} · spd {versions['spd']} · "
        f"repetitions {rows[0]['repetitions']} · -n {result['settings']['max_tokens']}",
        "texts": texts,
        "rows left out": f"{lost}, where replies ended at the first token" if lost else "",
        "interrupted": "whole repetitions count, and of a first one what was done"
        * result["interrupted"],
        **{
            "best" if len(models) == 1 else f"best of {model}": _best(
                [row for row in rows if row["model"] == model]
            )
            for model in models
        },
        f"over {models[0]}": "; ".join(_over_first(model, rows) for model in models[1:]),
    }


def _models(result: Mapping[str, Any]) -> str:
    """Return the models with the type of their weights."""
    forms = dict.fromkeys(
        (plan["model"], plan["dtype"], plan["load"] == "dummy") for plan in result["plans"]
    )
    return ", ".join(
        f"{name} {dtype}" + ", random weights" * is_dummy
        for name, (_, dtype, is_dummy) in zip(models_of(result), forms, strict=False)
    )


def _best(rows: Sequence[Row]) -> str:
    """Return the row that speculation makes fastest; plain decoding where none is faster beyond noise."""
    paired = [row for row in rows if row["speed_up"]]
    if not paired:
        return ""
    faster = [row for row in paired if verdict(row["speed_up"]) == "faster"]
    row = max(faster or paired, key=lambda row: row["speed_up"]["median"])
    ratio = f"{row['speed_up']['median']:.2f} × plain"
    name = f"{method_name(row)} ({row['category']}, T {row['temperature']:g})"
    if row["speed_up"]["low"] is None:
        return f"one repetition does not say: {name}, {ratio} in it; -r 3 or more"
    if not faster:
        return f"plain decoding: no drafter is faster; {name}, {ratio}, {verdict(row['speed_up'])}"
    return f"{name}, {ratio}, faster"


def _over_first(model: str, rows: Sequence[Row]) -> str:
    """Return how fast a model decodes plainly over the first one, with the intervals of the ratios."""
    shown = [row for row in chief_rows(rows) if row["model"] == model and row["method"] == "plain"]
    words = []
    for row in shown:
        ratio = row["over_first_model"]
        if ratio is not None:
            span = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
            words.append(f"{ratio['median']:.2f} ×{span} at T {row['temperature']:g}")
    return f"{model}, plain decoding, {', '.join(words)}" if words else ""


def chief_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows over all categories, or all rows where there is one category."""
    return [row for row in rows if row["category"] == "all"] or list(rows)


def method_name(row: Row) -> str:
    """Return `draft k≤4`, with the rule of verification if it is not the usual one."""
    if row["method"] == "plain":
        return "plain"
    rule = "" if row["verify"] == "coupled" else f" {row['verify']}"
    return f"{row['method']} k{'≤' if row['adaptive'] else '='}{row['draft_max']}{rule}"


Columns = Sequence[tuple[str, Callable[[Row], str]]]
NAMES: Columns = (
    ("model", lambda row: str(row.get("model", ""))),
    ("category", lambda row: str(row["category"])),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("tokens", lambda row: str(row["prompt_tokens_asked"] or "own")),
    ("together", lambda row: str(row["concurrency"])),
    ("rate", lambda row: "" if row["rate"] is None else f"{row['rate']:g}/s"),
    ("method", method_name),
    ("lag", lambda row: str(row["lag"])),
    ("graphs", lambda row: "on" if row["graphs"] else "off"),
    ("tp", lambda row: str(row["tp"])),
    ("draft-tp", lambda row: str(row["draft_tp"])),
)
"""What tells rows apart."""
ALWAYS = ("category", "T", "method")
SPEEDS = 4  # of `FIGURES`, the first ones
LEGEND = "±: 95 % interval for a second run's median · len: tokens a round · TTFT, TPOT, ITL: ms"


def row_table(rows: Sequence[Row], figures: Columns, always: Sequence[str] = ALWAYS) -> list[str]:
    """What tells rows apart, but for what is the same everywhere, and figures of each."""
    named = [
        (name, cell) for name, cell in NAMES if name in always or len(set(map(cell, rows))) > 1
    ]
    columns = (*named, *figures)
    return table_lines(
        [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows]
    )


def _median(name: str, form: str = ".1f") -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else format(row[name]["median"], form)


def _share(name: str) -> Callable[[Row], str]:
    """Half of an interval as a share of its median; a single repetition has none."""

    def shown(row: Row) -> str:
        share = (row[name] or {}).get("half_width")
        return "" if share is None else ">99%" if share >= 0.995 else f"{share:.1%}"

    return shown


def _ratio(name: str) -> Callable[[Row], str]:
    """Return the cell of a ratio, marked where the row is slower beyond noise."""
    return lambda row: _median(name, ".2f")(row) + SLOWER * (verdict(row[name]) == "slower")


NARROW_FIGURES: Columns = (
    ("tok/s", _median("tokens_per_second")),
    ("×plain", _ratio("speed_up")),
)
"""Figures for narrow terminals."""
OVER_FIRST: Columns = (("×first", _ratio("over_first_model")), ("±", _share("over_first_model")))
"""Figures where several models are compared."""
FIGURES: Columns = (
    ("tok/s", _median("tokens_per_second")),
    ("±", _share("tokens_per_second")),
    ("×plain", _ratio("speed_up")),
    ("±", _share("speed_up")),
    ("len", lambda row: f"{row['acceptance_length']:.2f}"),
    ("acc", lambda row: "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}"),
    ("TTFT", _median("ttft_ms")),
    ("TPOT", _median("tpot_ms")),
)


def _positions(row: Row) -> str:
    """Per cent of the first, second, … drafts that were accepted, of four at most."""
    pairs = zip(row["accepted_per_position"], row["drafted_per_position"], strict=True)
    return "/".join(
        f"{100 * accepted / drafted:.0f}" for accepted, drafted in list(pairs)[:4] if drafted
    )


WIDE: Columns = (("ITL", _median("itl_ms")), ("by position", _positions))
"""Figures for wide terminals, and for files."""
