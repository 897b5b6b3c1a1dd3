"""`spd compare`: results of `spd bench`, row by row, and what changed beyond noise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from spd.cli.bench_table import SCHEMA, SLOWER, Columns, row_table
from spd.cli.options import JsonOptions, argument, first
from spd.cli.terminal.console import Session
from spd.cli.terminal.sink import Sink
from spd.errors import CheckFailedError, UsageError
from spd.formats.files import read_input
from spd.runtime.lab import compare_results, models_of

COMPARED = "spd.compare/1"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompareOptions(JsonOptions):
    """Everything `spd compare` takes."""

    files: list[Path] = argument("A.json B.json …", "Results of spd bench, the oldest first.")
    threshold: float = first(
        0.03,
        "SHARE",
        "A regression is slower by more, and by more than noise. Default: 0.03.",
        min=0,
        max=1,
    )


def compare(session: Session, options: CompareOptions) -> None:
    """Compare results of spd bench with the first; the exit code is 6 if a row became slower.

    Examples:
      spd compare yesterday.json today.json
    """
    if len(options.files) < 2:
        raise UsageError(
            "a comparison needs two results or more", fix=["spd compare A.json B.json"]
        )
    first, *others = options.files
    results = [read_result(path) for path in options.files]
    comparisons = [
        {
            "before": str(first),
            "after": str(path),
            **compare_results(results[0], result, options.threshold),
        }
        for path, result in zip(others, results[1:], strict=True)
    ]
    if not any(comparison["changes"] for comparison in comparisons):
        raise _nothing_in_common(results)
    sink = Sink.stdout()
    shown = {"schema": COMPARED, "threshold": options.threshold, "comparisons": comparisons}
    sink.answer(options.json, shown, [line for each in comparisons for line in _lines(each)])
    slower = sum(
        change["regressed"] for comparison in comparisons for change in comparison["changes"]
    )
    if slower:
        words = (
            f"{slower} rows are slower by more than {options.threshold:.3g} and by more than noise"
        )
        raise CheckFailedError(words, fix=["spd explain says what a round's time goes into"])


def _nothing_in_common(results: Sequence[Mapping[str, Any]]) -> UsageError:
    """Return the error for results without a row that two of them share."""
    models = [models_of(result) for result in results]
    if all(set(models[0]).isdisjoint(names) for names in models[1:]):
        shown = [", ".join(names) for names in models]
        words = f"these results are of different models: {' and '.join(shown)}"
        names = ",".join(dict.fromkeys(chain(*models)))
        return UsageError(words, fix=[f"spd bench -m {names} measures them in turn"])
    why = ["Rows match by model, prompts, -n, temperature, load, method and settings."]
    fix = ["measure with the same options: spd bench --help"]
    return UsageError("no rows of these results measure the same work", reason=why, fix=fix)


def _lines(comparison: dict[str, Any]) -> list[str]:
    """Return what is printed of one comparison."""
    figures: Columns = (
        ("before", lambda row: f"{row['before']:.1f}"),
        ("after", lambda row: f"{row['after']:.1f}"),
        ("change", lambda row: f"{row['change']:+.1%}"),
        ("verdict", lambda row: row["verdict"] + (f" {SLOWER}" if row["regressed"] else "")),
    )
    lines = [f"{Path(comparison['before']).name} → {Path(comparison['after']).name}"]
    lines += [f"not under the same conditions: {each}" for each in comparison["conditions"]]
    if comparison["models"]:
        lines.append(f"spd bench -m {','.join(comparison['models'])} measures both in turn")
    lines += row_table(comparison["changes"], figures) if comparison["changes"] else []
    only = ((comparison["only_before"], "first"), (comparison["only_after"], "second"))
    return [*lines, *(f"{count} rows only in the {where}" for count, where in only if count)]


def read_result(path: Path) -> dict[str, Any]:
    """Return what `spd bench -o FILE` wrote. Raises NotFoundError and UsageError naming the file."""
    fix = ["spd bench -o FILE writes one"]
    try:
        value = json.loads(read_input(path, fix[0]))
        if (schema := value["schema"]) != SCHEMA:
            raise ValueError(f"schema {schema!r}, expected {SCHEMA}")
        _lines(
            {"before": "", "after": "", **compare_results(value, value, 0.0)}
        )  # reads all that is read
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RecursionError,
    ) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is not a result of spd bench", reason=[why], fix=fix) from None
    return dict(value)
