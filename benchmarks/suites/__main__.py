"""Suites of other projects and of spd, in one report.

    python -m benchmarks.suites --llama DIR --jsonschema DIR --vllm DIR [--client PYTHON]
        [--only NAME,…] [--out FILE]

Nothing is fetched. The folders are unpacked source packages (sdists) of PyPI, which pip downloads:

    pip download --no-deps --no-binary :all: llama-cpp-python jsonschema vllm

`--llama` is `llama-cpp-python`: llama.cpp's server tests and the published chat templates.
`--jsonschema` is `jsonschema`: JSON-Schema-Test-Suite. `--vllm` is `vllm`: its tests of tool
parsers. `--client` is a Python with pytest, requests, openai and filelock, which runs the server
tests; this one by default.

A suite whose package is not named is left out, and its last outcomes are kept. Status 1 where an
outcome is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.environment import ROOT, describe_commit, describe_machine
from benchmarks.suites import (
    histories,
    hostile,
    replies,
    schema_suite,
    server_tests,
    templates,
    tool_parsers,
)
from benchmarks.suites.report import WRONG, Report

OUT = ROOT / "benchmarks" / "results" / "suites.json"
Run = Callable[[argparse.Namespace], Report]
SUITES: Mapping[str, tuple[str, Run]] = {
    "server-tests": ("llama", lambda options: server_tests.run(options.llama, options.client)),
    "templates": ("llama", lambda options: templates.run(options.llama)),
    "schemas": ("jsonschema", lambda options: schema_suite.run(options.jsonschema)),
    "tool-parsers": ("vllm", lambda options: tool_parsers.run(options.vllm)),
    "replies": ("llama", lambda options: replies.run(options.llama)),
    "histories": ("llama", lambda options: histories.run(options.llama)),
    "hostile-folders": ("", lambda options: hostile.run_files()),
    "hostile-requests": ("", lambda options: hostile.run_server()),
}
"""Suites by name: the option that names their package, and the function that runs them."""


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name in ("llama", "jsonschema", "vllm"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--client", default=sys.executable)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*SUITES])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    for name in options.only:
        if name not in SUITES:
            parser.error(f"there is no suite {name}: {', '.join(SUITES)}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the suites, print a table of each and write the report; return the exit status."""
    options = parsed(arguments)
    results = {}
    if options.out.exists():
        results = json.loads(options.out.read_text(encoding="utf-8"))["suites"]
    wrong = 0
    for name in options.only:
        package, run = SUITES[name]
        if package and getattr(options, package) is None:
            print(f"{name}: left out without --{package}")
            continue
        report = run(options)
        print(report.text())
        for line in report.details:
            print(f"    {line}")
        wrong += report.total[WRONG]
        results[name] = {**report.as_dict(), **describe_commit("spd", "benchmarks/suites")}
        document = {"machine": describe_machine(), "suites": results}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
