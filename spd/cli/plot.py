"""Plots of `spd bench` and `spd explain` as SVG or PNG; matplotlib is imported only to draw one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.bench_table import (
    BenchResult,
    Row,
    bar_labels,
    method_name,
    summary_rows,
    with_short_models,
    workload_name,
)
from spd.cli.terminal.sink import check_writable, output_error
from spd.errors import UsageError
from spd.runtime.lab import share_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from spd.runtime.lab import Explanation

PICTURE_SUFFIXES = (".svg", ".png")
INSTALL_COMMAND = "pip install 'spd[plot]'"
PLOT_HELP = f"Draw it as .svg or .png, after {INSTALL_COMMAND}."
PANEL_INCHES = 7.0  # inches of a panel
MIN_DRAFTS = 10  # drafts at a position from which on its acceptance is drawn
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "x")
"""In plots of acceptance the line style stands for the model, the marker for the workload.

The colour stands for the method.
"""
Panel = Callable[["Axes"], None]
"""A function that draws one plot of a picture."""


def check_plot(path: Path | None) -> None:
    """Raise an error early for a picture that could not be written after minutes of work.

    UsageError for its suffix or without matplotlib, else what `check_writable` raises. None is
    fine.
    """
    if path is None:
        return
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise UsageError(f"--plot {path}: a picture is .svg or .png", fix=["--plot speed.svg"])
    if find_spec("matplotlib") is None:
        message = "--plot needs matplotlib, which is not installed"
        raise UsageError(message, fix=[INSTALL_COMMAND], code="no_matplotlib")
    check_writable(path)


def plot_bench(result: BenchResult, path: Path) -> None:
    """Write a picture of a result of `spd bench`: tokens a second, and acceptance by position.

    Raises ResourceError if it cannot be written.
    """
    all_rows = with_short_models(result["rows"])
    rows = summary_rows(all_rows)
    labels = bar_labels(all_rows)
    num_workloads = len({workload_name(row) for row in rows})
    names = [
        f"{workload_name(row)}: {labels(row)}" if num_workloads > 1 else labels(row) for row in rows
    ]
    panels: list[Panel] = [partial(_draw_speeds, rows, names)]
    if any(any(row["drafted_per_position"]) for row in rows):
        panels.append(partial(_draw_acceptance, rows, names))
    _write_picture(panels, max(3.5, 1.5 + 0.36 * len(rows)), path)


def _draw_speeds(rows: Sequence[Row], names: Sequence[str], axes: Axes) -> None:
    """Draw one bar per row, the first on top, coloured by model, with figures to the right."""
    speeds = [row["tokens_per_second"] for row in rows]
    medians = [speed["median"] for speed in speeds]
    models = {row["model"] for row in rows}
    workloads = {workload_name(row) for row in rows}
    model_indices = _category_indices([row["model"] for row in rows])
    axes.barh(
        range(len(rows)), medians, color=[f"C{index % 10}" for index in model_indices], alpha=0.75
    )
    for index, (row, speed) in enumerate(zip(rows, speeds, strict=True)):
        if speed["low"] is not None:
            error_bar = [[speed["median"] - speed["low"]], [speed["high"] - speed["median"]]]
            axes.errorbar(speed["median"], index, xerr=error_bar, color="black", capsize=3)
        ratio = row["speed_up"]
        text = f"{speed['median']:.1f}" + (f"  {ratio['median']:.2f} × plain" if ratio else "")
        right_margin = axes.get_yaxis_transform()
        axes.text(1.03, index, text, va="center", fontsize="small", transform=right_margin)
    # The interval of a few repetitions may be many times as wide as the median.
    highest = max(speed["high"] or 0.0 for speed in speeds)
    end = 1.05 * max(max(medians), min(highest, 1.5 * max(medians)))
    axes.set_xlim(0, end)
    cut_rows = [index for index, speed in enumerate(speeds) if (speed["high"] or 0.0) > end]
    axes.plot([end] * len(cut_rows), cut_rows, ">", color="black", clip_on=False, gid="cut")
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("tokens a second, with the 95 % interval for a second run's median")
    # What differs between bars is in their names.
    common = [names for names in (models, workloads) if len(names) == 1]
    axes.set_title(": ".join(name for names in common for name in names))


def _draw_acceptance(rows: Sequence[Row], names: Sequence[str], axes: Axes) -> None:
    """Draw the acceptance by position of each row that drafted, with intervals."""
    model_indices = _category_indices([row["model"] for row in rows])
    workload_indices = _category_indices([workload_name(row) for row in rows])
    method_indices = _category_indices([method_name(row) for row in rows])
    columns = zip(rows, names, model_indices, workload_indices, method_indices, strict=True)
    for index, (row, name, model, workload, method) in enumerate(columns):
        pairs = zip(row["accepted_per_position"], row["drafted_per_position"], strict=True)
        counts = [(accepted, drafted) for accepted, drafted in pairs if drafted >= MIN_DRAFTS]
        shares = [accepted / drafted for accepted, drafted in counts]
        shift = 0.3 * ((index + 0.5) / len(rows) - 0.5)  # so that no interval hides another
        if not shares and any(row["drafted_per_position"]):
            axes.plot([], [], " ", label=f"{name}: fewer than {MIN_DRAFTS} drafts")
        if shares:
            axes.errorbar(
                [position + shift for position in range(1, len(shares) + 1)],
                [100 * share for share in shares],
                _error_bars(shares, [share_interval(*pair) for pair in counts]),
                capsize=3,
                color=f"C{method % 10}",
                linestyle=LINE_STYLES[model % len(LINE_STYLES)],
                marker=MARKERS[workload % len(MARKERS)],
                label=name,
            )
    _style_acceptance(axes)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _error_bars(
    shares: Sequence[float], intervals: Sequence[tuple[float, float]]
) -> list[list[float]]:
    """Return the lengths in per cent of error bars below and above shares."""
    pairs = list(zip(shares, intervals, strict=True))
    return [
        [max(0.0, 100 * (share - low)) for share, (low, _) in pairs],
        [max(0.0, 100 * (high - share)) for share, (_, high) in pairs],
    ]


def _category_indices(names: Sequence[str]) -> list[int]:
    """Return the index of each name among the distinct names."""
    categories = list(dict.fromkeys(names))
    return [categories.index(name) for name in names]


def plot_explanation(explanation: Explanation, path: Path) -> None:
    """Write a picture of predicted speed by number of drafts, acceptance, and a round's parts.

    Raises ResourceError if it cannot be written.
    """

    def draw_draft_counts(axes: Axes) -> None:
        """Draw predicted tokens a second by number of drafts, with the speed of the run."""
        counts = [estimate.k for estimate in explanation.prospects]
        speeds = [estimate.tokens_per_second for estimate in explanation.prospects]
        axes.plot(counts, speeds, "-o", label="by the trace")
        axes.plot(
            [explanation.best.k],
            [explanation.best.tokens_per_second],
            "*",
            markersize=16,
            label="best",
        )
        axes.axhline(explanation.tokens_per_second, color="C1", linestyle="--", label="this run")
        axes.set_ylim(0, 1.1 * max(*speeds, explanation.tokens_per_second))
        axes.set_xticks(counts)
        axes.set_xlabel("drafts a round; 0 is plain decoding")
        axes.set_ylabel("tokens a second")
        axes.set_title(f"{explanation.method}: what other K would give")
        axes.legend(fontsize="small")

    def draw_acceptance(axes: Axes) -> None:
        """Draw the share of rounds that accepted the draft at each position."""
        positions = range(1, len(explanation.acceptance) + 1)
        shares = [100 * share for share in explanation.acceptance]
        axes.bar(positions, shares, alpha=0.75)
        error_bars = _error_bars(explanation.acceptance, explanation.acceptance_intervals)
        axes.errorbar(positions, shares, error_bars, color="black", linestyle="", capsize=3)
        for position, share in zip(positions, shares, strict=True):
            axes.text(position + 0.05, share + 1, f"{share:.0f}")  # beside its error bar
        _style_acceptance(axes)

    def draw_round_parts(axes: Axes) -> None:
        """Draw the time of each part of a round of the run."""
        bars = axes.barh(list(explanation.parts), list(explanation.parts.values()), alpha=0.75)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"a round of this run: {explanation.now.round_ms:.2f} ms")

    _write_picture(
        [
            draw_draft_counts,
            *([draw_acceptance] if explanation.acceptance else []),
            draw_round_parts,
        ],
        4.0,
        path,
    )


def _style_acceptance(axes: Axes) -> None:
    """Set the limits, labels and title of a plot of acceptance by position."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, 105)
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, 0.5), max(right, 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("accepted, %, with the 95 % interval")
    axes.set_title("acceptance by position")


def _write_picture(panels: Sequence[Panel], height: float, path: Path) -> None:
    """Draw panels side by side, each `height` inches high, and write the file.

    Raises ResourceError.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    data = BytesIO()
    with rc_context(
        {
            "text.parse_math": False,  # a name may hold a dollar sign
            "svg.fonttype": "none",  # text that can be searched
            "svg.hashsalt": "spd",  # the same picture is the same file
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.dpi": 120,
        }
    ):
        figure = Figure(figsize=(PANEL_INCHES * len(panels), height), layout="constrained")
        for number, draw in enumerate(panels, 1):
            draw(figure.add_subplot(1, len(panels), number))
        is_svg = path.suffix.lower() == ".svg"
        figure.savefig(
            data, format=path.suffix[1:].lower(), metadata={"Date": None} if is_svg else None
        )
    try:
        path.write_bytes(data.getvalue())
    except OSError as error:
        raise output_error(path, error, was_opened=True) from None
