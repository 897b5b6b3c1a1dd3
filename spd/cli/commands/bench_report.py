"""A benchmark's result in words: a table, and the sentences below it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spd.cli.text.output import as_line, to_json
from spd.cli.text.table import WIDTH, render_table
from spd.cli.text.wrap import fit_lines

if TYPE_CHECKING:
    from spd.cli.commands.bench import BenchOptions

SLOWER = "▼"


def render(result: Mapping[str, Any], options: BenchOptions, columns: int | None = None) -> str:
    """The result in the form that was asked for; the table in a terminal's columns."""
    rows = result["rows"]
    if options.json:
        return to_json(result) + "\n"
    if not rows:
        return "nothing was measured\n"
    table = render_table(*table_rows(rows), expendable=3, columns=columns)
    return f"{fit_lines(headline(result), columns)}\n{table}"


def headline(result: Mapping[str, Any]) -> str:
    """What was measured with what; lines of at most 80 columns."""
    plan, settings = result["plans"][0], result["settings"]
    least, most = (pick(row["repetitions"] for row in result["rows"]) for pick in (min, max))
    times = f"r={least}" if least == most else f"r={least}–{most}"
    device = result["machine"].get("gpu", "CPU") if plan["device"] != "cpu" else f"CPU x{plan['threads']}"
    parts = [
        as_line(f"{short_name(result['model'])} {plan['dtype']}"),
        device,
        f"torch {result['versions'].get('torch', '?')}",
        f"spd {result['versions']['spd']}",
        f"{times} n={settings['max_tokens']}",
    ]
    if plan["load"] == "dummy":
        parts.append("dummy weights: speed only")
    if _is_imposed(result):
        parts.append("imposed acceptance")
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 > WIDTH:
            lines.append(part)
        else:
            lines[-1] += f" · {part}"
    return "\n".join(lines)


def short_name(name: str) -> str:
    """A model's name, or the last part of a path, short enough for a table."""
    last = name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".", "~")) else name
    return last if len(last) <= WIDTH // 2 else last[: WIDTH // 2 - 1] + "…"


def method_label(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """`draft k≤4`, with whatever else differs between rows."""
    label = str(row["method"])
    if row["method"] != "plain":
        label += f" k{'≤' if row['adaptive'] else '='}{row['draft_max']}"
        if row["verify"] != "coupled":
            label += f" {row['verify']}"
        if len({other["draft_tp"] for other in rows}) > 1:
            label += f" draft-tp{row['draft_tp']}"
    for name in ("lag", "graphs", "tp"):
        if len({other[name] for other in rows}) > 1:
            value = row[name]
            label += (
                f" {name}{value}" if not isinstance(value, bool) else f" {name} {'on' if value else 'off'}"
            )
    return label


def table_rows(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[str]]]:
    """Header and cells; columns that say the same everywhere, and repeated names, are left out."""
    several = {
        name: len({row[name] for row in rows}) > 1 for name in ("prompt_tokens_asked", "concurrency", "rate")
    }
    header = ["category", "T"]
    header += ["tokens"] if several["prompt_tokens_asked"] else []
    header += ["load"] if several["concurrency"] or several["rate"] else []
    ranks = any(row["tp"] > 1 for row in rows)
    figures = ["tok/s", "±", "×plain", "±", "len", "acc", "TTFT"]
    if ranks:  # in the place of what fits beside them no longer
        figures = ["tok/s", "±", "×plain", "acc", "draft ms", "verify ms"]
    header += ["method", *figures]
    body: list[list[str]] = []
    before: list[str] = []
    for row in rows:
        work = [row["category"], f"{row['temperature']:g}"]
        work += [str(row["prompt_tokens_asked"] or "own")] if several["prompt_tokens_asked"] else []
        work += [load_label(row, rows)] if several["concurrency"] or several["rate"] else []
        shown = [""] * len(work) if work == before else work
        before = work
        found = _figures(row)
        found = [*found[:3], found[5], *_parts(row)] if ranks else found
        body.append([*shown, method_label(row, rows), *found])
    return header, body


def _parts(row: Mapping[str, Any]) -> list[str]:
    """Milliseconds of drafting a token, and of a verification: what ranks change."""
    times, drafts = row["round_ms"], sum(row["drafted_per_position"])
    a_draft = times["draft"] * row["rounds"] / drafts if drafts else None
    return ["" if a_draft is None else f"{a_draft:.2f}", f"{times['verify']:.2f}"]


def load_label(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """`4` requests at a time, or `2/s`, or `2/s ≤4` where rows differ in how many may run together."""
    if row["rate"] is None:
        return str(row["concurrency"])
    several = len({other["concurrency"] for other in rows}) > 1
    return f"{row['rate']:g}/s" + (f" ≤{row['concurrency']}" if several else "")


def _figures(row: Mapping[str, Any]) -> list[str]:
    from spd.runtime.lab import verdict

    speed, ratio = row["tokens_per_second"], row["speed_up"]
    rate, ttft = row["acceptance_rate"], row["ttft_ms"]
    mark = SLOWER if verdict(ratio) == "slower" else ""
    return [
        f"{speed['median']:.1f}",
        _percent(speed["half_width"]),
        "" if ratio is None else f"{ratio['median']:.2f}{mark}",
        "" if ratio is None else _percent(ratio["half_width"]),
        f"{row['acceptance_length']:.2f}",
        "" if rate is None else f"{rate:.0%}",
        "" if ttft is None else f"{ttft['median']:.0f}",
    ]


def _percent(share: float | None) -> str:
    if share is None:
        return "?"
    return ">99%" if share >= 0.995 else f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """What stands below a table: equality, the best way of decoding, what the intervals mean."""
    lines = []
    equality = result["equality"]
    differences = equality["differences"]
    if differences:
        first = differences[0]
        lines.append(
            f"DIFFERENT: {len(differences)} texts differ from plain decoding; the first: prompt "
            f"{first['prompt']}, T {first['temperature']:g}, token {first['position']}"
        )
    elif _is_imposed(result):
        lines.append("imposed acceptance: drafts are taken unread, so those texts mean nothing")
    elif equality["tokens"]:
        lines.append(f"equal: every text is that of plain decoding ({equality['tokens']:,} tokens compared)")
    if result["interrupted"]:
        lines.append("interrupted: whole repetitions are counted, and of a first one what was done")
    best = best_row(result["rows"])
    if best is not None:
        lines += textwrap.wrap(_advice(best, result["rows"]), WIDTH, break_on_hyphens=False)
    lines += _roofline_words(result["rows"])
    if result["rows"]:
        ranks = any(row["tp"] > 1 for row in result["rows"])
        columns = "draft ms: a token · verify ms: a round" if ranks else "len: tokens a round · TTFT: ms"
        lines.append(f"±: 95 % interval for a second run's median · {columns}")
    return lines


def _is_imposed(result: Mapping[str, Any]) -> bool:
    return any(row["acceptance"] == "imposed" for row in result["rows"])


def _roofline_words(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    plain = [row for row in rows if row["method"] == "plain" and row["roofline"] is not None]
    if not plain or plain[-1]["roofline"]["verify_share"] is None:
        return []
    found = plain[-1]["roofline"]
    return [
        f"reading takes {found['verify_share']:.0%} of a plain round, at the "
        f"{found['read_bytes_per_second'] / 1e9:.3g} GB/s measured here"
    ]


def best_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The speculating row with the highest ratio to plain, over all categories where there are several.

    A ratio that noise alone would give counts only where no row is faster beyond it.
    """
    from spd.runtime.lab import verdict

    paired = [row for row in _whole(rows) if row["speed_up"] is not None]
    sure = [row for row in paired if verdict(row["speed_up"]) == "faster"]
    return max(sure or paired, key=lambda row: float(row["speed_up"]["median"]), default=None)


def _whole(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["category"] == "all"] or list(rows)


def _advice(best: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    from spd.runtime.lab import verdict

    ratio, judged = best["speed_up"]["median"], verdict(best["speed_up"])
    flags = f"{_flags(best, rows)} at T {best['temperature']:g}"
    if len({row["prompt_tokens_asked"] for row in rows}) > 1:
        flags += f", {best['prompt_tokens_asked'] or 'own'} tokens"
    if len({load_label(row, rows) for row in rows}) > 1:
        flags += f", load {load_label(best, rows)}"
    if judged == "faster":
        return f"best: {flags}, {ratio:.2f} × plain"
    if judged == "slower":
        return f"speculation does not pay here ({ratio:.2f} × plain at best): --spec off"
    return f"no difference beyond noise: {flags} gives {ratio:.2f} × plain"


def _flags(best: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What to type for a row: its drafts, and whatever else differs between rows or is no default."""
    flags = f"--spec {best['method']} --draft-max {best['draft_max']}"
    flags += "" if best["adaptive"] or best["verify"] != "coupled" else " --no-adaptive"
    flags += "" if best["verify"] == "coupled" else f" --verify {best['verify']}"
    for name in ("lag", "graphs", "tp", "draft_tp"):
        if len({row[name] for row in rows}) > 1:
            value = best[name] if not isinstance(best[name], bool) else "on" if best[name] else "off"
            flags += f" --{name.replace('_', '-')} {value}"
    return flags
