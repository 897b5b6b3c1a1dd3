"""A benchmark's result in words: a table, and the sentences around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from spd.cli.text.output import shortened
from spd.cli.text.wrap import WIDTH, table_lines

SLOWER = "▼"
Row = Mapping[str, Any]


def bench_text(result: Mapping[str, Any]) -> list[str]:
    """Lines about a result."""
    if not result["rows"]:
        return ["nothing was measured"]
    return [_headline(result), *table_lines(*table_rows(result["rows"])), *_summary(result), LEGEND]


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


def method_label(row: Row, rows: Sequence[Row]) -> str:
    """`draft k≤4`, with whatever else differs between rows."""
    label = str(row["method"])
    if label != "plain":
        label += f" k{'≤' if row['adaptive'] else '='}{row['draft_max']}"
        label += "" if row["verify"] == "coupled" else f" {row['verify']}"
    settings = [
        (name, value) for name, value in _settings(row, rows) if (label, name) != ("plain", "draft-tp")
    ]
    return label + "".join(f" {name} {value}" for name, value in settings)


def _settings(row: Row, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Options of the machine that differ between rows, with the row's values."""
    found = []
    for name in ("lag", "graphs", "tp", "draft_tp"):
        if len({other[name] for other in rows}) > 1:
            value = row[name]
            words = ("on" if value else "off") if isinstance(value, bool) else str(value)
            found.append((name.replace("_", "-"), words))
    return found


def load_label(row: Row, rows: Sequence[Row]) -> str:
    """`4` requests at a time, or `2/s`, or `2/s ≤4` where rows differ in how many may run together."""
    if row["rate"] is None:
        return str(row["concurrency"])
    several = len({other["concurrency"] for other in rows}) > 1
    return f"{row['rate']:g}/s" + (f" ≤{row['concurrency']}" if several else "")


WORK = ("prompt_tokens_asked", "concurrency", "rate")
LEGEND = "±: 95 % interval for a second run's median · len: tokens a round · TTFT, TPOT: ms"


def table_rows(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells; columns of the work that say the same everywhere are left out."""
    several = {name: len({row[name] for row in rows}) > 1 for name in WORK}
    work: list[tuple[str, Callable[[Row], str]]] = [
        ("category", lambda row: str(row["category"])),
        ("T", lambda row: f"{row['temperature']:g}"),
    ]
    if several["prompt_tokens_asked"]:
        work.append(("tokens", lambda row: str(row["prompt_tokens_asked"] or "own")))
    if several["concurrency"] or several["rate"]:
        work.append(("load", lambda row: load_label(row, rows)))
    figures: list[tuple[str, Callable[[Row], str]]] = [
        ("method", lambda row: method_label(row, rows)),
        ("tok/s", lambda row: f"{row['tokens_per_second']['median']:.1f}"),
        ("±", lambda row: _percent(row["tokens_per_second"])),
        ("×plain", lambda row: _ratio(row["speed_up"])),
        ("±", lambda row: _percent(row["speed_up"])),
        ("len", lambda row: f"{row['acceptance_length']:.2f}"),
        ("acc", lambda row: "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}"),
        *((name.upper(), partial(_latency, f"{name}_ms")) for name in ("ttft", "tpot")),
    ]
    cells = (*work, *figures)
    return [name for name, _ in cells], [[cell(row) for _, cell in cells] for row in rows]


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


def _latency(name: str, row: Row) -> str:
    if row[name] is None:
        return ""
    ms = row[name]["median"]
    return f"{ms:.0f}" if ms >= 99.5 else f"{ms:.3g}"


def _summary(result: Mapping[str, Any]) -> list[str]:
    """What stands below a table: equality, the best way of decoding."""
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
    if advice := _advice(result["rows"]):
        lines.append(advice)
    return lines


def _is_imposed(result: Mapping[str, Any]) -> bool:
    return any(row["acceptance"] == "imposed" for row in result["rows"])


def _advice(rows: Sequence[Row]) -> str | None:
    """The speculating row with the highest ratio to plain, over all categories if it can be.

    A ratio that noise alone would give counts only where no row is faster beyond it.
    """
    from spd.runtime.lab import verdict

    whole = [row for row in rows if row["category"] == "all"] or rows
    paired = [row for row in whole if row["speed_up"] is not None]
    sure = [row for row in paired if verdict(row["speed_up"]) == "faster"]
    if not paired:
        return None
    best = max(sure or paired, key=lambda row: float(row["speed_up"]["median"]))
    ratio = f"{best['speed_up']['median']:.2f} × plain"
    if verdict(best["speed_up"]) == "slower":
        return f"speculation does not pay here ({ratio} at best): --spec off"
    words = f"{method_label(best, rows)} at T {best['temperature']:g}, load {load_label(best, rows)}: {ratio}"
    return f"best: {words}" if sure else f"no difference beyond noise: {words}"
