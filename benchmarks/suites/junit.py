"""Outcomes of other people's tests, from the report that pytest writes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.suites.report import WRONG, Report

PASSED = "passed"
ASIDE = "not applicable"
SHOWN = 500
"""Characters of a failure that are stored."""


def count_junit(report: Report, path: Path, not_applicable: Mapping[str, str]) -> None:
    """Count each test; `not_applicable` sets failed ones aside, by wildcards for `file::test`."""
    for case in ElementTree.parse(path).iter("testcase"):
        module = case.get("classname", "").partition("test_")[2].partition(".")[0]
        row = module.removesuffix("_tool_parser")
        name = f"{row}::{case.get('name', '')}"
        skipped = case.find("skipped")
        failed = next((part for part in case if part.tag in ("failure", "error")), None)
        message = "" if failed is None else failed.get("message", "")
        if skipped is not None:
            report.add(row, ASIDE)
            report.reasons[name] = skipped.get("message", "")
        elif failed is None or "[XPASS" in message:  # better than its authors expect
            report.add(row, PASSED)
        elif (reason := _reason(name, message, not_applicable)) is not None:
            report.add(row, ASIDE)
            report.reasons[name] = reason
        else:
            report.add(row, WRONG, f"{name}: {message[:SHOWN]}")


def _reason(name: str, message: str, not_applicable: Mapping[str, str]) -> str | None:
    """Return the reason why a failed test does not apply to spd, or None.

    Keys match names or `message:` texts.
    """
    for key, reason in not_applicable.items():
        kind, _, text = key.partition("message:")
        if (not kind and text in message) or (kind and fnmatch(name, key)):
            return reason
    return None
