"""`spd compare`: compares results of `spd bench` row by row; finds changes beyond noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from spd.cli.bench_table import BENCH_SCHEMA, SLOWER_MARK, BenchResult, Columns, row_table
from spd.cli.options import JsonOptions, argument, main_option
from spd.cli.terminal.console import Session
from spd.cli.terminal.sink import Sink
from spd.errors import CheckFailedError, UsageError
from spd.formats.files import read_input
from spd.runtime.lab import compare_results, models_of

COMPARE_SCHEMA = "spd.compare/1"
"""The `schema` of the output of `spd compare --json`."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompareOptions(JsonOptions):
    """The options of `spd compare`."""

    files: list[Path] = argument("A.json B.json …", "Results of spd bench, the oldest first.")
    threshold: float = main_option(
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
    first_path, *later_paths = options.files
    results = [read_bench_result(path) for path in options.files]
    comparisons = [
        {
            "before": str(first_path),
            "after": str(path),
            **compare_results(results[0], result, options.threshold),
        }
        for path, result in zip(later_paths, results[1:], strict=True)
    ]
    if not any(comparison["changes"] for comparison in comparisons):
        raise _no_common_rows_error(results)
    sink = Sink.stdout()
    output = {"schema": COMPARE_SCHEMA, "threshold": options.threshold, "comparisons": comparisons}
    lines = chain.from_iterable(map(_comparison_lines, comparisons))
    sink.write_result(options.json, output, list(lines))
    num_slower = sum(
        change["regressed"] for comparison in comparisons for change in comparison["changes"]
    )
    if num_slower:
        message = f"{num_slower} rows are slower by more than {options.threshold:.3g} and by more than noise"
        raise CheckFailedError(message, fix=["spd explain says what a round's time goes into"])


def _no_common_rows_error(results: Sequence[BenchResult]) -> UsageError:
    """Return the error for results that share no row."""
    models = [models_of(result) for result in results]
    if all(set(models[0]).isdisjoint(names) for names in models[1:]):
        model_lists = [", ".join(names) for names in models]
        message = f"these results are of different models: {' and '.join(model_lists)}"
        names = ",".join(dict.fromkeys(chain.from_iterable(models)))
        return UsageError(message, fix=[f"spd bench -m {names} measures them in turn"])
    reason = ["Rows match by model, prompts, -n, temperature, load, method and settings."]
    fix = ["measure with the same options: spd bench --help"]
    return UsageError("no rows of these results measure the same work", reason=reason, fix=fix)


def _comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """Return lines of a comparison: files, differing conditions, a table, and rows of one only."""
    figures: Columns = (
        ("before", lambda row: f"{row['before']:.1f}"),
        ("after", lambda row: f"{row['after']:.1f}"),
        ("change", lambda row: f"{row['change']:+.1%}"),
        ("verdict", lambda row: row["verdict"] + (f" {SLOWER_MARK}" if row["regressed"] else "")),
    )
    lines = [f"{Path(comparison['before']).name} → {Path(comparison['after']).name}"]
    lines += [
        f"not under the same conditions: {condition}" for condition in comparison["conditions"]
    ]
    if comparison["models"]:
        lines.append(f"spd bench -m {','.join(comparison['models'])} measures both in turn")
    lines += row_table(comparison["changes"], figures) if comparison["changes"] else []
    only = ((comparison["only_before"], "first"), (comparison["only_after"], "second"))
    return [*lines, *(f"{count} rows only in the {where}" for count, where in only if count)]


def read_bench_result(path: Path) -> BenchResult:
    """Read and check a result that `spd bench -o FILE` wrote.

    Raises NotFoundError and UsageError.
    """
    fix = ["spd bench -o FILE writes one"]
    try:
        value = json.loads(read_input(path, fix[0]))
        schema = value["schema"]
        if schema != BENCH_SCHEMA:
            raise ValueError(f"schema {schema!r}, expected {BENCH_SCHEMA}")
        # This reads every field that a comparison reads.
        _comparison_lines({"before": "", "after": "", **compare_results(value, value, 0.0)})
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is not a result of spd bench", reason=[reason], fix=fix) from None
    result: BenchResult = value
    return result
