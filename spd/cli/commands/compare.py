"""`spd compare`: results of `spd bench` side by side, and what changed beyond noise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.commands.bench_report import SLOWER, load_label, method_label
from spd.cli.commands.values import parse_share
from spd.cli.options import CommonOptions, Session, argument, first, printed
from spd.cli.text.output import Sink, to_json, write_error
from spd.cli.text.table import render_table
from spd.errors import CheckFailedError, UsageError
from spd.formats.files import read_input

if TYPE_CHECKING:
    from spd.runtime.lab import Comparison


SCHEMA = "spd.compare/1"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompareOptions(CommonOptions):
    """Everything `spd compare` takes."""

    files: list[Path] = argument("A.json B.json …", "Results of spd bench, the oldest first.")
    threshold: str = first("3%", "3%", "Slower by more than this, and more than noise, is a regression.")
    json: bool = printed(False, None, "One JSON object.")


def compare(session: Session, options: CompareOptions) -> int:
    """Compare results of spd bench with the first of them; exits 6 if a row became slower."""
    from spd.runtime.lab import compare_results

    if len(options.files) < 2:
        raise UsageError("one result has nothing to be compared with", fix=["spd compare A.json B.json"])
    threshold = parse_share(options.threshold, "--threshold")
    results = [read_result(path) for path in options.files]
    comparisons = [compare_results(results[0], result) for result in results[1:]]
    if not any(comparison.changes for comparison in comparisons):
        raise UsageError(
            "no rows of these results measure the same work",
            reason=["Rows match by model, prompts, -n, temperature, load, method and settings."],
            fix=["measure with the same options: spd bench --help"],
        )
    sink = Sink.stdout()
    if options.json:
        shown = [
            {
                "before": str(options.files[0]),
                "after": str(path),
                "changes": [change.as_dict(threshold) for change in comparison.changes],
                "only_before": comparison.only_before,
                "only_after": comparison.only_after,
                "conditions": list(comparison.conditions),
            }
            for path, comparison in zip(options.files[1:], comparisons, strict=True)
        ]
        sink.write(to_json({"schema": SCHEMA, "threshold": threshold, "comparisons": shown}) + "\n")
    else:
        for path, comparison in zip(options.files[1:], comparisons, strict=True):
            words = _table(comparison, threshold, sink.columns).splitlines()
            sink.write_lines([f"{options.files[0].name} → {path.name}", *words])
    slower = sum(change.regressed(threshold) for each in comparisons for change in each.changes)
    if not slower:
        return 0
    failure = CheckFailedError(
        f"{slower} rows are slower by more than {threshold:.3g} and by more than noise",
        fix=["spd explain says what a round's time goes into"],
    )
    write_error(failure, session.console, as_json=False)  # the answer is on stdout already
    return failure.exit_code


def _table(comparison: Comparison, threshold: float, columns: int | None) -> str:
    rows: list[dict[str, Any]] = [dict(change.row) for change in comparison.changes]
    body = [
        [
            row["category"],
            f"{row['temperature']:g}",
            load_label(row, rows),
            method_label(row, rows),
            f"{change.before:.1f}",
            f"{change.after:.1f}",
            f"{change.share:+.1%}",
            change.verdict + (f" {SLOWER}" if change.regressed(threshold) else ""),
        ]
        for row, change in zip(rows, comparison.changes, strict=True)
    ]
    header = ["category", "T", "load", "method", "before", "after", "change", "verdict"]
    text = "".join(f"not under the same conditions: {each}\n" for each in comparison.conditions)
    text += render_table(header, body, columns=columns) if body else ""
    for count, where in ((comparison.only_before, "first"), (comparison.only_after, "second")):
        text += f"{count} rows only in the {where}\n" if count else ""
    return text


SCHEMA_PREFIX = "spd.bench/"


def read_result(path: Path) -> dict[str, Any]:
    """The object that `spd bench -o FILE` wrote. Raises NotFoundError and UsageError naming the file."""
    from spd.runtime.lab import compare_results as compare

    fix = "spd bench -o FILE writes one"
    try:
        value = json.loads(read_input(path, fix))
    except (ValueError, RecursionError):
        raise UsageError(f"cannot read {path}: it is not JSON", fix=[fix]) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != f"{SCHEMA_PREFIX}1":
        raise UsageError(
            f"{path} is not a result of spd bench",
            reason=[f"schema {schema!r}, expected {SCHEMA_PREFIX}1"],
            fix=[fix],
        )
    assert isinstance(value, dict)
    try:
        compare(value, value)  # reads all that is read of one
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is a damaged result of spd bench", reason=[why]) from None
    return value
