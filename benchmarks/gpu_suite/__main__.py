"""The command: `python -m benchmarks.gpu_suite --out DIR`.

Its exit status says whether all gates are met.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_suite.digest import digest
from benchmarks.gpu_suite.gates import exit_status
from benchmarks.gpu_suite.report import REPORT
from benchmarks.gpu_suite.suite import PROBES, run_here, run_suite

NO_GPU = """\
gpu_suite needs a CUDA GPU, and torch sees none here.
  Run it on a machine with one: python -m benchmarks.gpu_suite --out benchmarks/results
  Its kernels are compiled without a GPU by: pytest tests/benchmarks/test_gpu_suite_compiles.py"""

SECOND_REPORT = REPORT.replace(".", ".2.")
NOTES = """\
probes and the seconds that each may take:
  {usual}
only when named by --only:
  {named}
What some leave of the budget is for those behind them, so that one that is named alone may take all of it.

report:
  {report} is written anew after each probe. One of the same machine, GPU, commit and sources is gone on
  with: a probe that runs again has its line replaced, others keep theirs. One of another machine or commit
  is replaced by a usual run; with --only it is left alone, and {beside} (.3., ...)
  is written beside it.

exit status, of the probes that were run:
  0  every probe ended, and every gate of them was measured and met
  1  a gate was missed, or a probe failed, died or timed out
  4  nothing of that, but a probe was cut short or not run, or a gate was not measured
  5  there is no GPU"""


def describe_probes() -> str:
    """Return the text below the options in --help."""

    def list_probes(is_default: bool) -> str:
        descriptions = ", ".join(
            f"{probe.name} {probe.seconds:g}" for probe in PROBES if probe.is_default == is_default
        )
        return textwrap.fill(descriptions, 100, subsequent_indent="  ")

    return NOTES.format(
        usual=list_probes(True), named=list_probes(False), report=REPORT, beside=SECOND_REPORT
    )


def gpu_is_there() -> bool:
    """Return True if torch is installed and sees a CUDA GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, or with --child one probe in this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        epilog=describe_probes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help=f"folder of {REPORT}"
    )
    names = ", ".join(probe.name for probe in PROBES)
    parser.add_argument(
        "--only", metavar="PROBES", help="comma list of probes, instead of the usual ones"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=540.0,
        metavar="SECONDS",
        help="for all probes (default %(default)g)",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child-seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return run_here(options.child, options.child_result, options.child_seconds)
    default_names = [probe.name for probe in PROBES if probe.is_default]
    requested = options.only.split(",") if options.only else default_names
    unknown = sorted(set(requested) - {probe.name for probe in PROBES})
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the probes are {names}")
    if not gpu_is_there():
        print(NO_GPU, file=sys.stderr)
        return 5
    probes = [probe for probe in PROBES if probe.name in requested]
    report = run_suite(
        options.out,
        probes,
        options.budget,
        lambda line: print(line, file=sys.stderr, flush=True),
        share=True,
        keep=options.only is not None,
    )
    print(digest(report))
    return exit_status(
        {name: answer for name, answer in report["probes"].items() if name in requested}
    )


if __name__ == "__main__":
    raise SystemExit(main())
