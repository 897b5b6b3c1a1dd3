"""The tables of the suites for docs/measurements.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.suites.report import WRONG
from benchmarks.table_forms import Result, table

SUITE_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "server-tests": "llama.cpp's server tests",
        "templates": "published templates, spd and transformers",
        "schemas": "JSON-Schema-Test-Suite, instances",
        "tool-parsers": "vLLM's tests of tool parsers",
        "replies": "scripted replies with a call",
        "histories": "histories × 3 APIs × 10 templates",
        "hostile-folders": "hostile model folders",
        "hostile-requests": "hostile requests",
    }
)


def suites(result: Result) -> str:
    """Return every suite's cases, their outcomes in words, and how many are wrong."""
    rows = []
    for name, title in SUITE_TITLES.items():
        if name not in result["suites"]:
            continue
        total = result["suites"][name]["total"]
        outcomes = sorted(total.items(), key=lambda pair: -pair[1])
        words = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes if outcome != WRONG)
        rows.append([title, f"{sum(total.values()):,}", words, f"{total.get(WRONG, 0):,}"])
    return table(["suite", "cases", "outcomes", "wrong"], rows)


def suite_schemas(result: Result) -> str | None:
    """Return the outcomes of JSON-Schema-Test-Suite by keyword."""
    report = result["suites"].get("schemas")
    if report is None:
        return None
    outcomes = [outcome for outcome in report["total"] if outcome != WRONG]
    rows = []
    for keyword, counts in sorted(report["rows"].items()):
        cells = [f"{counts[outcome]:,}" if outcome in counts else "" for outcome in outcomes]
        rows.append([f"`{keyword}`", *cells, f"{counts.get(WRONG, 0):,}"])
    return table(["file", *outcomes, "wrong"], rows)
