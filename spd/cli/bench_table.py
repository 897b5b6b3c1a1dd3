"""The text of `spd bench` and `spd compare`: tables, bars and a summary of results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from spd.cli.terminal.bars import NARROW_COLUMNS, Bar, BarGlyphs, bar_lines
from spd.cli.terminal.plain_text import LABEL_COLUMNS, cell_width
from spd.cli.terminal.tables import table_lines
from spd.runtime.lab import models_of, verdict

BENCH_SCHEMA = "spd.bench/1"
SLOWER_MARK = "▼"
"""Stands behind a ratio that is slower by more than noise."""
Row = Mapping[str, Any]
"""A row of `make_rows` in `spd/runtime/lab/rows.py`."""


class Equality(TypedDict):
    """The comparison of texts with plain decoding: tokens compared, and each first difference."""

    tokens: int
    differences: Sequence[Mapping[str, Any]]


class BenchResult(TypedDict):
    """The object of `spd bench --json`, whose schema is in `spd/runtime/lab/schemas`."""

    schema: str
    model: str
    versions: Mapping[str, str]
    machine: Mapping[str, object]
    settings: Mapping[str, object]
    prompts: Mapping[str, str]
    plans: Sequence[Mapping[str, object]]
    rows: Sequence[Row]
    same_tokens: bool
    equality: Equality
    samples: Sequence[Mapping[str, object]]
    interrupted: bool


def bench_lines(result: BenchResult, glyphs: BarGlyphs | None = None) -> list[str]:
    """Return the lines of a table, of bars if there are `glyphs`, and of the summary below.

    The width is that of this terminal. On a narrow one, bars that show as much replace the table.
    """
    rows = with_short_models(result["rows"])
    if not rows:
        return ["nothing was measured"]
    columns = shutil.get_terminal_size((120, 0)).columns
    bars = [] if glyphs is None else speed_bars(rows, columns, glyphs)
    # On a narrow terminal bars show as much as the table, and are not wrapped.
    are_enough = bars and columns < NARROW_COLUMNS and summary_rows(rows) == rows
    table = [] if are_enough else _table_for_width(rows, columns)
    facts = _summary_facts(result, rows)
    width = max(LABEL_COLUMNS, *map(len, facts))
    summary = [f"{title:<{width}}  {text}" for title, text in facts.items() if text]
    return [*table, *bars, *summary, TABLE_LEGEND]


def with_short_models(rows: Sequence[Row]) -> list[Row]:
    """Return rows with models named by the last parts of their paths, unless two would be equal."""
    names = {str(row.get("model", "")) for row in rows}
    short_names = {name: name.rstrip("/").rpartition("/")[2] for name in names}
    if len(set(short_names.values())) < len(names):
        return list(rows)
    return [{**row, "model": short_names[str(row.get("model", ""))]} for row in rows]


def _table_for_width(rows: Sequence[Row], columns: int) -> list[str]:
    """Return the lines of the table with the most figures that fit the width, at least two."""
    over_first = OVER_FIRST_COLUMNS if any(row["over_first_model"] for row in rows) else ()
    for figure_columns in (
        (*FIGURE_COLUMNS, *WIDE_COLUMNS),
        FIGURE_COLUMNS,
        FIGURE_COLUMNS[:NUM_SPEED_COLUMNS],
    ):
        table = row_table(rows, (*figure_columns, *over_first))
        if max(map(cell_width, table)) < columns:
            return table
    return row_table(rows, NARROW_FIGURE_COLUMNS, always_shown=("method",))


MAX_BARS = 40  # beyond which the table alone is shown


def speed_bars(rows: Sequence[Row], columns: int, glyphs: BarGlyphs) -> list[str]:
    """Return lines of bars of tokens a second with intervals; empty for more than `MAX_BARS`.

    Each workload has a heading, and a bar for each method.
    """
    groups: dict[str, list[Row]] = {}
    for row in summary_rows(rows):
        groups.setdefault(workload_name(row), []).append(row)
    if sum(map(len, groups.values())) > MAX_BARS:
        return []
    label_of = bar_labels(rows)
    lines = []
    for workload, workload_rows in groups.items():
        bars = []
        for row in workload_rows:
            speed = row["tokens_per_second"]
            ratio = row["speed_up"]
            text = f"{speed['median']:.1f}" + (f" {ratio['median']:.2f}×" if ratio else "")
            bars.append(
                Bar(
                    label=label_of(row),
                    value=speed["median"],
                    text=text,
                    low=speed["low"],
                    high=speed["high"],
                )
            )
        lines += ["", f"tok/s, {workload}", *bar_lines(bars, columns, glyphs)]
    return [*lines, ""]


def workload_name(row: Row) -> str:
    """Return the workload of a row: `code, T 0`, with settings that are not the default."""
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
    """Return the function that labels a row by its method and the key columns that vary."""
    candidates = ("model", "lag", "graphs", "tp", "draft-tp")
    varying_columns = [
        (name, cell)
        for name, cell in KEY_COLUMNS
        if name in candidates and len(set(map(cell, rows))) > 1
    ]

    def label(row: Row) -> str:
        """Return a row's method, with the keys in which rows differ."""
        parts = [
            cell(row) if name == "model" else f"{name} {cell(row)}"
            for name, cell in varying_columns
        ]
        return " ".join([*parts[:1], method_name(row), *parts[1:]] if parts else [method_name(row)])

    return label


def _summary_facts(result: BenchResult, rows: Sequence[Row]) -> dict[str, str]:
    """Return the summary by title: models, run, equality of texts, and the best rows.

    rows: those of the result, with the names of models that are shown.
    """
    plan = result["plans"][0]
    versions = result["versions"]
    compared_tokens = result["equality"]["tokens"]
    differences = result["equality"]["differences"]
    machine = (
        f"{result['machine'].get('cpu') or 'CPU'} · threads {plan['threads']}"
        if plan["device"] == "cpu"
        else result["machine"].get("gpu", "?")
    )
    measured_works = {
        (sample["config"], json.dumps(sample["work"])) for sample in result["samples"]
    }
    num_left_out = len(measured_works) - sum(row["category"] != "all" for row in rows)
    equality_text = ""
    if compared_tokens:
        equality_text = f"equal to plain decoding ({compared_tokens:,} tokens compared)"
    if any(row["acceptance"] == "imposed" for row in rows):
        equality_text = "without meaning: acceptance is imposed, and drafts are taken unread"
    if differences:
        first_difference = "prompt {prompt}, T {temperature:g}, token {position}".format(
            **differences[0]
        )
        equality_text = (
            f"{len(differences)} DIFFER from plain decoding; the first: {first_difference}"
        )
    models = list(dict.fromkeys(row["model"] for row in rows))
    token_warning = "the models cut text into other tokens: their tok/s do not count the same"
    best_rows = {}
    for model in models:
        title = "best" if len(models) == 1 else f"best of {model}"
        best_rows[title] = _best_row_text([row for row in rows if row["model"] == model])
    left_out = f"{num_left_out}, where replies ended at the first token" if num_left_out else ""
    interrupted = "whole repetitions count, and of a first one what was done"
    return {
        "model": _models_text(result),
        "tokens": "" if result["same_tokens"] else token_warning,
        "run": f"{machine} · torch {versions.get('torch', '?')} · spd {versions['spd']} · "
        f"repetitions {rows[0]['repetitions']} · -n {result['settings']['max_tokens']}",
        "texts": equality_text,
        "rows left out": left_out,
        "interrupted": interrupted if result["interrupted"] else "",
        **best_rows,
        f"over {models[0]}": "; ".join(_over_first_text(model, rows) for model in models[1:]),
    }


def _models_text(result: BenchResult) -> str:
    """Return the names of the models, the types of their weights, and which weights are random."""
    models = dict.fromkeys(
        (plan["model"], plan["dtype"], plan["load"] == "dummy") for plan in result["plans"]
    )
    return ", ".join(
        f"{name} {dtype}" + ", random weights" * is_dummy
        for name, (_, dtype, is_dummy) in zip(models_of(result), models, strict=False)
    )


def _best_row_text(rows: Sequence[Row]) -> str:
    """Return the text of the row with the largest speed-up.

    The text says plain decoding if no row is faster beyond noise.
    """
    compared_rows = [row for row in rows if row["speed_up"]]
    if not compared_rows:
        return ""
    faster = [row for row in compared_rows if verdict(row["speed_up"]) == "faster"]
    row = max(faster or compared_rows, key=lambda row: row["speed_up"]["median"])
    ratio = f"{row['speed_up']['median']:.2f} × plain"
    name = f"{method_name(row)} ({row['category']}, T {row['temperature']:g})"
    if row["speed_up"]["low"] is None:
        return f"one repetition does not say: {name}, {ratio} in it; -r 3 or more"
    if not faster:
        slower = ", slower" if verdict(row["speed_up"]) == "slower" else ""
        return f"plain decoding: no drafter is faster beyond noise; {name}, {ratio}{slower}"
    return f"{name}, {ratio}, faster"


def _over_first_text(model: str, rows: Sequence[Row]) -> str:
    """Return a model's plain decoding speed over the first model's, with intervals."""
    plain_rows = [
        row for row in summary_rows(rows) if row["model"] == model and row["method"] == "plain"
    ]
    parts = []
    for row in plain_rows:
        ratio = row["over_first_model"]
        if ratio is not None:
            span = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
            parts.append(f"{ratio['median']:.2f} ×{span} at T {row['temperature']:g}")
    return f"{model}, plain decoding, {', '.join(parts)}" if parts else ""


def summary_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows over all categories, or all rows if there is one category."""
    return [row for row in rows if row["category"] == "all"] or list(rows)


def method_name(row: Row) -> str:
    """Return for example `draft k≤4`, with the rule of verification unless it is `coupled`."""
    if row["method"] == "plain":
        return "plain"
    rule = "" if row["verify"] == "coupled" else f" {row['verify']}"
    return f"{row['method']} k{'≤' if row['adaptive'] else '='}{row['draft_max']}{rule}"


Columns = Sequence[tuple[str, Callable[[Row], str]]]
"""The title of each column, and the function that returns a row's cell."""
KEY_COLUMNS: Columns = (
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
"""The columns that identify a row."""
ALWAYS_SHOWN_COLUMNS = ("category", "T", "method")
"""Key columns that are shown even if all rows agree in them."""
NUM_SPEED_COLUMNS = 4
"""The first columns of `FIGURE_COLUMNS`: those of speeds."""
TABLE_LEGEND = (
    "±: 95 % interval for a second run's median · len: tokens a round · TTFT, TPOT, ITL: ms"
)
"""A line below the table that explains its columns."""


def row_table(
    rows: Sequence[Row], figure_columns: Columns, always_shown: Sequence[str] = ALWAYS_SHOWN_COLUMNS
) -> list[str]:
    """Return the lines of a table: key columns that vary or are in `always_shown`, then figures."""
    key_columns = [
        (name, cell)
        for name, cell in KEY_COLUMNS
        if name in always_shown or len(set(map(cell, rows))) > 1
    ]
    columns = (*key_columns, *figure_columns)
    return table_lines(
        [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows]
    )


def _median_cell(name: str, format_spec: str = ".1f") -> Callable[[Row], str]:
    """Return a function that formats the median of a row's field `name`, "" where there is none."""
    return lambda row: "" if row[name] is None else format(row[name]["median"], format_spec)


def _interval_cell(name: str) -> Callable[[Row], str]:
    """Return a function that formats half an interval as a share of its median.

    It is empty for a single repetition.
    """

    def format_cell(row: Row) -> str:
        """Return half an interval of a row in per cent."""
        share = (row[name] or {}).get("half_width")
        return "" if share is None else ">99%" if share >= 0.995 else f"{share:.1%}"

    return format_cell


def _ratio_cell(name: str) -> Callable[[Row], str]:
    """Return a function that formats a row's median ratio, marked if it is slower beyond noise."""
    return lambda row: (
        _median_cell(name, ".2f")(row) + SLOWER_MARK * (verdict(row[name]) == "slower")
    )


NARROW_FIGURE_COLUMNS: Columns = (
    ("tok/s", _median_cell("tokens_per_second")),
    ("×plain", _ratio_cell("speed_up")),
)
"""Figures for narrow terminals."""
OVER_FIRST_COLUMNS: Columns = (
    ("×first", _ratio_cell("over_first_model")),
    ("±", _interval_cell("over_first_model")),
)
"""Figures where several models are compared."""
FIGURE_COLUMNS: Columns = (
    ("tok/s", _median_cell("tokens_per_second")),
    ("±", _interval_cell("tokens_per_second")),
    ("×plain", _ratio_cell("speed_up")),
    ("±", _interval_cell("speed_up")),
    ("len", lambda row: f"{row['acceptance_length']:.2f}"),
    ("acc", lambda row: "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}"),
    ("TTFT", _median_cell("ttft_ms")),
    ("TPOT", _median_cell("tpot_ms")),
)
"""Figures where one model is measured: titles, and the functions that return a row's cell."""


def _position_acceptance_cell(row: Row) -> str:
    """Return the acceptance of the first, second, … draft in per cent, four at most."""
    pairs = zip(row["accepted_per_position"], row["drafted_per_position"], strict=True)
    return "/".join(
        f"{100 * accepted / drafted:.0f}" for accepted, drafted in list(pairs)[:4] if drafted
    )


WIDE_COLUMNS: Columns = (
    ("ITL", _median_cell("itl_ms")),
    ("by position", _position_acceptance_cell),
)
"""Figures for wide terminals, and for files."""
