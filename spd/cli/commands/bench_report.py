"""A benchmark's result in words: a table, and the sentences around it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spd.cli.text.output import shortened
from spd.cli.text.wrap import WIDTH, table_lines

SLOWER = "▼"
Row = Mapping[str, Any]


def bench_text(result: Mapping[str, Any]) -> list[str]:
    """Lines about a result."""
    if not result["rows"]:
        return ["nothing was measured"]
    figures = FIGURES if shutil.get_terminal_size((120, 0)).columns < 100 else (*FIGURES, *WIDE)
    return [_headline(result), *row_table(result["rows"], figures), *_summary(result), LEGEND]


def _headline(result: Mapping[str, Any]) -> str:
    """What was measured with what."""
    plan, versions, row = result["plans"][0], result["versions"], result["rows"][0]
    parts = [
        f"{shortened(result['model'].rstrip('/').rpartition('/')[2], WIDTH // 2)} {plan['dtype']}",
        result["machine"].get("gpu", "CPU") if plan["device"] != "cpu" else f"CPU x{plan['threads']}",
        f"torch {versions.get('torch', '?')}",
        f"spd {versions['spd']}",
        f"r={row['repetitions']} n={result['settings']['max_tokens']}",
        *(["dummy weights: speed only"] if plan["load"] == "dummy" else []),
        *(["imposed acceptance"] if _is_imposed(result) else []),
    ]
    return " · ".join(parts)


def _method(row: Row) -> str:
    """`draft k≤4`, with the rule of verification if it is not the usual one."""
    if row["method"] == "plain":
        return "plain"
    rule = "" if row["verify"] == "coupled" else f" {row['verify']}"
    return f"{row['method']} k{'≤' if row['adaptive'] else '='}{row['draft_max']}{rule}"


def _load(row: Row) -> str:
    """`4` requests at a time, or `2/s ≤4`."""
    count = str(row["concurrency"])
    return count if row["rate"] is None else f"{row['rate']:g}/s ≤{count}"


Columns = Sequence[tuple[str, Callable[[Row], str]]]
NAMES: Columns = (
    ("category", lambda row: str(row["category"])),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("tokens", lambda row: str(row["prompt_tokens_asked"] or "own")),
    ("load", _load),
    ("method", _method),
    ("lag", lambda row: str(row["lag"])),
    ("graphs", lambda row: "on" if row["graphs"] else "off"),
    ("tp", lambda row: str(row["tp"])),
    ("draft-tp", lambda row: str(row["draft_tp"])),
)
"""What tells rows apart."""
ALWAYS = ("category", "T", "method")
LEGEND = "±: 95 % interval for a second run's median · len: tokens a round · TTFT, TPOT, ITL: ms"


def row_table(rows: Sequence[Row], figures: Columns) -> list[str]:
    """What tells rows apart, but for what is the same everywhere, and figures of each."""
    named = [(name, cell) for name, cell in NAMES if name in ALWAYS or len(set(map(cell, rows))) > 1]
    columns = (*named, *figures)
    return table_lines([name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


FIGURES: Columns = (
    ("tok/s", lambda row: f"{row['tokens_per_second']['median']:.1f}"),
    ("±", lambda row: _percent(row["tokens_per_second"])),
    ("×plain", lambda row: _ratio(row["speed_up"])),
    ("±", lambda row: _percent(row["speed_up"])),
    ("len", lambda row: f"{row['acceptance_length']:.2f}"),
    ("acc", lambda row: "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}"),
    ("TTFT", lambda row: _latency(row["ttft_ms"])),
    ("TPOT", lambda row: _latency(row["tpot_ms"])),
)
WIDE: Columns = (
    ("ITL", lambda row: _latency(row["itl_ms"])),
    ("by position", lambda row: _positions(row)),
)
"""Figures for terminals of 100 columns or more, and for files."""


def _positions(row: Row) -> str:
    """Per cent of the first, second, … drafts that were accepted, of four at most."""
    pairs = zip(row["accepted_per_position"], row["drafted_per_position"], strict=True)
    return "/".join(f"{100 * accepted / drafted:.0f}" for accepted, drafted in list(pairs)[:4] if drafted)


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    from spd.runtime.lab import verdict

    mark = SLOWER if verdict(ratio) == "slower" else ""
    return "" if ratio is None else f"{ratio['median']:.2f}{mark}"


def _percent(spread: Mapping[str, Any] | None) -> str:
    """Half of an interval as a share of its median."""
    if spread is None:
        return ""
    share = spread["half_width"]
    if share is None:
        return "?"
    return ">99%" if share >= 0.995 else f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"


def _latency(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return ""
    ms = spread["median"]
    return f"{ms:.0f}" if ms >= 99.5 else f"{ms:.3g}"


def _summary(result: Mapping[str, Any]) -> list[str]:
    """What stands below a table: whether texts are equal, and whether all of them are there."""
    lines = []
    equality = result["equality"]
    if equality["differences"]:
        first = equality["differences"][0]
        lines.append(
            f"DIFFERENT: {len(equality['differences'])} texts differ from plain decoding; the first: prompt "
            f"{first['prompt']}, T {first['temperature']:g}, token {first['position']}"
        )
    elif _is_imposed(result):
        lines.append("imposed acceptance: drafts are taken unread, so those texts mean nothing")
    elif equality["tokens"]:
        lines.append(f"equal: every text is that of plain decoding ({equality['tokens']:,} tokens compared)")
    if result["interrupted"]:
        lines.append("interrupted: whole repetitions are counted, and of a first one what was done")
    return [*lines, *_advice(result["rows"])]


def _advice(rows: Sequence[Row]) -> list[str]:
    """The speculating row with the highest ratio to plain, those first that are faster beyond noise."""
    from spd.runtime.lab import verdict

    paired = [row for row in rows if row["speed_up"] is not None]
    if not paired:
        return []
    told = [
        (verdict(row["speed_up"]) == "faster", row["speed_up"]["median"], i) for i, row in enumerate(paired)
    ]
    sure, ratio, index = max(told)
    words = f"{_method(paired[index])} ({paired[index]['category']}, T {paired[index]['temperature']:g})"
    if verdict(paired[index]["speed_up"]) == "slower":
        return [f"speculation does not pay here ({ratio:.2f} × plain at best): --spec off"]
    return [f"{'best' if sure else 'no difference beyond noise'}: {words}, {ratio:.2f} × plain"]


def _is_imposed(result: Mapping[str, Any]) -> bool:
    return any(row["acceptance"] == "imposed" for row in result["rows"])
