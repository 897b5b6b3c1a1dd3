"""`spd compare`: results of `spd bench` side by side, and what changed beyond noise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.cli.commands.bench import SLOWER, Columns, row_table
from spd.cli.options import JsonOptions, argument, first
from spd.cli.text.output import Session, Sink
from spd.errors import CheckFailedError, UsageError
from spd.formats.files import read_input

SCHEMA, READ = "spd.compare/1", "spd.bench/1"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompareOptions(JsonOptions):
    """Everything `spd compare` takes."""

    files: list[Path] = argument("A.json B.json …", "Results of spd bench, the oldest first.")
    threshold: float = first(
        0.03, "SHARE", "Slower by more than this, and more than noise, is a regression. Default: 0.03."
    )


def compare(session: Session, options: CompareOptions) -> None:
    """Compare results of spd bench with the first of them; exits 6 if a row became slower."""
    from spd.runtime.lab import compare_results

    if len(options.files) < 2:
        raise UsageError("one result has nothing to be compared with", fix=["spd compare A.json B.json"])
    if not 0 <= options.threshold < 1:
        why = f"--threshold {options.threshold:g}: is not a share below 1"
        raise UsageError(why, fix=["--threshold 0.03 for 3 per cent"])
    first, *others = options.files
    results = [read_result(path) for path in options.files]
    comparisons = [
        {"before": str(first), "after": str(path), **compare_results(results[0], result, options.threshold)}
        for path, result in zip(others, results[1:], strict=True)
    ]
    if not any(comparison["changes"] for comparison in comparisons):
        raise UsageError(
            "no rows of these results measure the same work",
            reason=["Rows match by model, prompts, -n, temperature, load, method and settings."],
            fix=["measure with the same options: spd bench --help"],
        )
    sink = Sink.stdout()
    shown = {"schema": SCHEMA, "threshold": options.threshold, "comparisons": comparisons}
    sink.answer(options.json, shown, [line for each in comparisons for line in _lines(each)])
    slower = sum(change["regressed"] for comparison in comparisons for change in comparison["changes"])
    if slower:
        raise CheckFailedError(
            f"{slower} rows are slower by more than {options.threshold:.3g} and by more than noise",
            fix=["spd explain says what a round's time goes into"],
        )


def _lines(comparison: dict[str, Any]) -> list[str]:
    figures: Columns = (
        ("before", lambda row: f"{row['before']:.1f}"),
        ("after", lambda row: f"{row['after']:.1f}"),
        ("change", lambda row: f"{row['change']:+.1%}"),
        ("verdict", lambda row: row["verdict"] + (f" {SLOWER}" if row["regressed"] else "")),
    )
    lines = [f"{Path(comparison['before']).name} → {Path(comparison['after']).name}"]
    lines += [f"not under the same conditions: {each}" for each in comparison["conditions"]]
    lines += row_table(comparison["changes"], figures) if comparison["changes"] else []
    only = ((comparison["only_before"], "first"), (comparison["only_after"], "second"))
    return [*lines, *(f"{count} rows only in the {where}" for count, where in only if count)]


def read_result(path: Path) -> dict[str, Any]:
    """The object that `spd bench -o FILE` wrote. Raises NotFoundError and UsageError naming the file."""
    from spd.runtime.lab import compare_results

    fix = ["spd bench -o FILE writes one"]
    try:
        value = json.loads(read_input(path, fix[0]))
    except (ValueError, RecursionError):
        raise UsageError(f"cannot read {path}: it is not JSON", fix=fix) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != READ:
        reason = [f"schema {schema!r}, expected {READ}"]
        raise UsageError(f"{path} is not a result of spd bench", reason=reason, fix=fix)
    assert isinstance(value, dict)
    try:
        compare_results(value, value, 0.0)  # reads all that is read of one
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is a damaged result of spd bench", reason=[why]) from None
    return value
