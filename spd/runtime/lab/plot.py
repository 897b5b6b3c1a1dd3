"""A benchmark's rows as a picture; matplotlib is imported by the command that draws."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spd.errors import ResourceError, UsageError

FORMATS = (".svg", ".png", ".pdf")
VARIED = {"temperature": "T {:g}", "prompt_tokens_asked": "{} tokens", "rate": "{:g}/s"}
"""What a method's label leaves out, in words."""
Row = Mapping[str, Any]


def check_plot(path: Path) -> None:
    """Refuse early what could not be drawn. Raises UsageError and ResourceError."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: the name must end in one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ResourceError(
            "--plot needs matplotlib, which is not installed", fix=["pip install 'spd[plot]'"]
        ) from None


def axis_of(rows: Sequence[Row]) -> str:
    """What the rows are best drawn over: a load, a rate, the number of drafts, else the category."""
    for name in ("concurrency", "rate"):
        if len({row[name] for row in rows}) > 1:
            return name
    lengths = {row["draft_max"] for row in rows if row["method"] != "plain" and not row["adaptive"]}
    return "draft_max" if len(lengths) > 2 else "category"


def plot_rows(rows: Sequence[Row], path: Path, title: str, label: Callable[[Row], str]) -> None:
    """Tokens a second and the ratio to plain decoding, one panel each, with their intervals."""
    from matplotlib.figure import Figure

    axis = axis_of(rows)
    chosen = [row for row in rows if axis == "category" or row["category"] == rows[-1]["category"]]
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    speed, ratio = figure.subplots(2, 1, sharex=True)
    draw = _bars if axis == "category" else _lines
    draw(speed, chosen, axis, "tokens_per_second", label)
    draw(ratio, chosen, axis, "speed_up", label)
    speed.set_ylabel("tokens/s")
    ratio.set_ylabel("× plain decoding")
    ratio.axhline(1.0, color="0.4", linewidth=1, linestyle="--")
    words = {"draft_max": "drafts a round", "concurrency": "requests at a time", "rate": "requests/s"}
    ratio.set_xlabel(words.get(axis, ""))
    speed.set_ylim(bottom=0)
    for panel, name, least in ((speed, "tokens_per_second", 0.0), (ratio, "speed_up", 0.55)):
        medians = [row[name]["median"] for row in chosen if row[name] is not None]
        bottom, top = panel.get_ylim()  # intervals of a few noisy runs reach far
        panel.set_ylim(max(0.0, bottom), min(top, 2 * max([least, *medians])))
    figure.legend(*speed.get_legend_handles_labels(), fontsize="small", ncols=3, loc="outside lower center")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def _series(rows: Sequence[Row], axis: str, label: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows by what they are called in the legend: all that differs between them but the axis."""
    differ = [name for name in VARIED if name != axis and len({row[name] for row in rows}) > 1]
    series: dict[str, list[Row]] = {}
    for row in rows:
        name = label(row)
        if axis == "draft_max":
            name = re.sub(" k[=≤][0-9]+", " adaptive" * row["adaptive"], name)
        words = [name, *(VARIED[key].format(row[key]) for key in differ)]
        series.setdefault(", ".join(words), []).append(row)
    return series


def _bars(panel: Any, rows: Sequence[Row], axis: str, figure: str, label: Callable[[Row], str]) -> None:
    places = list(dict.fromkeys(row[axis] for row in rows))
    series = _series(rows, axis, label)
    width = 0.8 / max(1, len(series))
    for number, (name, own) in enumerate(series.items()):
        if own[0][figure] is None:
            continue  # its place and its colour stay its own in both panels
        at = [places.index(row[axis]) - 0.4 + width * (number + 0.5) for row in own]
        heights, errors = [row[figure]["median"] for row in own], _errors(own, figure)
        panel.bar(at, heights, width, label=name, yerr=errors, color=f"C{number}", capsize=2)
    panel.set_xticks(range(len(places)), places)


def _lines(panel: Any, rows: Sequence[Row], axis: str, figure: str, label: Callable[[Row], str]) -> None:
    for number, (name, own) in enumerate(_series(rows, axis, label).items()):
        shown = [row for row in own if row[figure] is not None]
        if not shown:
            continue
        if axis == "draft_max" and shown[0]["method"] == "plain":
            panel.axhline(shown[0][figure]["median"], label=name, color=f"C{number}", linewidth=1)
            continue
        panel.errorbar(
            [row[axis] for row in shown],
            [row[figure]["median"] for row in shown],
            yerr=_errors(shown, figure),
            label=name,
            color=f"C{number}",
            marker="o",
            capsize=3,
        )
        panel.set_xticks(sorted({row[axis] for row in rows if row["method"] != "plain"}))


def _errors(rows: Sequence[Row], figure: str) -> list[list[float]]:
    """Distances from the median down and up; none where nothing is known of them."""
    spreads = [row[figure] for row in rows]
    return [
        [s["median"] - (s["median"] if s["low"] is None else s["low"]) for s in spreads],
        [(s["median"] if s["high"] is None else s["high"]) - s["median"] for s in spreads],
    ]
