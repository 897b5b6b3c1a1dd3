"""Pictures of `spd bench` and `spd explain` as SVG or PNG, by matplotlib, imported only to draw one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.bench_table import Row, bar_labels, chief_rows, method_name, work_name
from spd.cli.terminal.sink import cannot_write, check_writable
from spd.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from spd.runtime.lab import Explanation

FORMATS = (".svg", ".png")
INSTALL = "pip install 'spd[plot]'"
PLOT_HELP = f"Draw it as .svg or .png, after {INSTALL}."
WIDTH = 7.0  # inches of a panel
FEWEST = 10  # drafts at a position of which a share is drawn
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "x")
"""Of acceptance: a line's style says the model, its marker the work, its colour the method."""
Panel = Callable[["Axes"], None]


def check_plot(path: Path | None) -> None:
    """Refuse early what could not be drawn after minutes of work. Raises UsageError."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: a picture is .svg or .png", fix=["--plot speed.svg"])
    if find_spec("matplotlib") is None:
        words = "--plot needs matplotlib, which is not installed"
        raise UsageError(words, fix=[INSTALL], code="no_matplotlib")
    check_writable(path)


def plot_bench(result: Mapping[str, Any], path: Path) -> None:
    """Draw tokens a second with their intervals, and acceptance by position, of a result of `spd bench`."""
    rows = chief_rows(result["rows"])
    labels = bar_labels(result["rows"])
    works = len({work_name(row) for row in rows})
    names = [f"{work_name(row)}: {labels(row)}" if works > 1 else labels(row) for row in rows]
    panels: list[Panel] = [partial(_draw_speeds, result, rows, names)]
    if any(any(row["drafted_per_position"]) for row in rows):
        panels.append(partial(_draw_acceptance, rows, names))
    _save(panels, max(3.5, 1.5 + 0.36 * len(rows)), path)


def _draw_speeds(
    result: Mapping[str, Any], rows: Sequence[Row], names: Sequence[str], axes: Axes
) -> None:
    """Draw a bar a row, the first on top, in its model's colour; figures stand to the right."""
    speeds = [row["tokens_per_second"] for row in rows]
    medians = [speed["median"] for speed in speeds]
    models = _places([row["model"] for row in rows])
    axes.barh(range(len(rows)), medians, color=[f"C{place % 10}" for place in models], alpha=0.75)
    for place, (row, speed) in enumerate(zip(rows, speeds, strict=True)):
        if speed["low"] is not None:
            reach = [[speed["median"] - speed["low"]], [speed["high"] - speed["median"]]]
            axes.errorbar(speed["median"], place, xerr=reach, color="black", capsize=3)
        ratio = row["speed_up"]
        words = f"{speed['median']:.1f}" + (f"  {ratio['median']:.2f} × plain" if ratio else "")
        beside = axes.get_yaxis_transform()
        axes.text(1.01, place, words, va="center", fontsize="small", transform=beside)
    # An interval of a few repetitions may be many times as wide as what was measured.
    highest = max(speed["high"] or 0.0 for speed in speeds)
    axes.set_xlim(0, 1.05 * max(*medians, min(highest, 1.5 * max(medians))))
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("tokens a second, with the 95 % interval for a second run's median")
    works = {work_name(row) for row in rows}
    axes.set_title(": ".join([result["model"], *works]) if len(works) == 1 else result["model"])


def _draw_acceptance(rows: Sequence[Row], names: Sequence[str], axes: Axes) -> None:
    """Draw a line for each row that drafted."""
    models = _places([row["model"] for row in rows])
    works = _places([work_name(row) for row in rows])
    methods = _places([method_name(row) for row in rows])
    for row, name, model, work, method in zip(rows, names, models, works, methods, strict=True):
        pairs = zip(row["accepted_per_position"], row["drafted_per_position"], strict=True)
        shares = [100 * accepted / drafted for accepted, drafted in pairs if drafted >= FEWEST]
        if shares:
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                color=f"C{method % 10}",
                linestyle=LINES[model % len(LINES)],
                marker=MARKERS[work % len(MARKERS)],
                label=name,
            )
    _style_acceptance(axes)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _places(names: Sequence[str]) -> list[int]:
    """Return for each name its place among the different ones."""
    different = list(dict.fromkeys(names))
    return [different.index(name) for name in names]


def plot_explanation(found: Explanation, path: Path) -> None:
    """Draw what other numbers of drafts would give, acceptance by position, and a round's parts."""

    def prospects(axes: Axes) -> None:
        """Draw tokens a second over the number of drafts, beside the run's own."""
        counts = [prospect.k for prospect in found.prospects]
        speeds = [prospect.tokens_per_second for prospect in found.prospects]
        axes.plot(counts, speeds, "-o", label="by the trace")
        axes.plot([found.best.k], [found.best.tokens_per_second], "*", markersize=16, label="best")
        axes.axhline(found.tokens_per_second, color="C1", linestyle="--", label="this run")
        axes.set_ylim(bottom=0)
        axes.set_xticks(counts)
        axes.set_xlabel("drafts a round; 0 is plain decoding")
        axes.set_ylabel("tokens a second")
        axes.set_title(f"{found.method}: what other K would give")
        axes.legend(fontsize="small")

    def acceptance(axes: Axes) -> None:
        """Draw the share of rounds that accepted so many drafts."""
        positions = range(1, len(found.survival) + 1)
        bars = axes.bar(positions, [100 * share for share in found.survival], alpha=0.75)
        axes.bar_label(bars, fmt="%.0f")
        _style_acceptance(axes)

    def parts(axes: Axes) -> None:
        """Draw what a round of the run spent on what."""
        bars = axes.barh(list(found.parts), list(found.parts.values()), alpha=0.75)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"a round of this run: {found.now.round_ms:.2f} ms")

    _save([prospects, *([acceptance] if found.survival else []), parts], 4.0, path)


def _style_acceptance(axes: Axes) -> None:
    """Name the axes of acceptance by position."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, 105)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("accepted, %")
    axes.set_title("acceptance by position")


def _save(panels: Sequence[Panel], height: float, path: Path) -> None:
    """Draw panels side by side into a file. Raises ResourceError if it cannot be written."""
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
        figure = Figure(figsize=(WIDTH * len(panels), height), layout="constrained")
        for number, draw in enumerate(panels, 1):
            draw(figure.add_subplot(1, len(panels), number))
        is_svg = path.suffix.lower() == ".svg"
        figure.savefig(
            data, format=path.suffix[1:].lower(), metadata={"Date": None} if is_svg else None
        )
    try:
        path.write_bytes(data.getvalue())
    except OSError as error:
        raise cannot_write(path, error, opened=True) from None
