"""Counts mypy's errors in the tests, a folder at a time, against a baseline that only falls.

    python -m tests.type_errors

`spd` and `benchmarks` have none (`mypy` alone checks them). The tests are older than their check, so a folder
may have as many errors as here. Lower its number where it has fewer; never raise one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASELINE: Mapping[str, int] = {
    "tests": 51,
    "tests/cli": 240,
    "tests/cli/serve": 61,
    "tests/formats": 52,
    "tests/gpu": 3,
    "tests/kernels": 62,
    "tests/parallel": 13,
    "tests/recipes": 87,
    "tests/runtime": 166,
    "tests/runtime/measuring": 29,
}
"""Errors by folder; a folder that is not here has none."""
ERROR = re.compile(r"^([^:\n]+)/[^/:\n]+\.py:[0-9]+: error: .*$", re.MULTILINE)


def run_mypy() -> str:
    """Return what mypy says of everything. Raises SystemExit if it could not check at all."""
    command = [sys.executable, "-m", "mypy", "spd", "benchmarks", "tests"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    return run.stdout


def compare(output: str, baseline: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the lines of folders with more errors than in the baseline, and of those with fewer."""
    counts = Counter(match[1] for match in ERROR.finditer(output))
    more: list[str] = []
    fewer: list[str] = []
    for folder in sorted(counts.keys() | baseline.keys()):
        count = counts[folder]
        allowed = baseline.get(folder, 0)
        if count > allowed:
            errors = [match[0] for match in ERROR.finditer(output) if match[1] == folder]
            more += [*errors, f"{folder}: {count} errors, more than {allowed}"]
        elif count < allowed:
            fewer.append(f"{folder}: {count} errors: lower its number, {allowed}, in BASELINE")
    return more, fewer


def main() -> int:
    """Print where the errors are not those of the baseline; return the exit status."""
    more, fewer = compare(run_mypy(), BASELINE)
    print("\n".join([*more, *fewer]) or f"{sum(BASELINE.values())} errors, as in the baseline")
    return 1 if more else 0


if __name__ == "__main__":
    raise SystemExit(main())
