"""The command: `python -m benchmarks.gpu_suite --out DIR`; its exit status says whether all gates are met."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_suite.digest import digest
from benchmarks.gpu_suite.gates import exit_status
from benchmarks.gpu_suite.suite import PROBES, REPORT, run_here, run_suite

NO_GPU = """\
gpu_suite needs a CUDA GPU, and torch sees none here.
  Run it on a machine with one: python -m benchmarks.gpu_suite --out benchmarks/results
  Its kernels are compiled without a GPU by: pytest tests/benchmarks/test_gpu_suite_compiles.py"""

STATUSES = """\
exit status:
  0  every probe ended, and every gate of them was measured and met
  1  a gate was missed, or a probe failed, died or timed out
  4  nothing of that, but a probe was cut short or not run, or a gate was not measured
  5  there is no GPU"""


def gpu_is_there() -> bool:
    """Return whether torch is there and sees a CUDA GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, or with --child one probe in this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help=f"folder of {REPORT}")
    names = ", ".join(probe.name for probe in PROBES)
    parser.add_argument("--only", help=f"comma list of probes: {names}")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="for all probes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child-seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return run_here(options.child, options.child_result, options.child_seconds)
    usual = [probe.name for probe in PROBES if probe.usual]
    wanted = options.only.split(",") if options.only else usual
    unknown = sorted(set(wanted) - {probe.name for probe in PROBES})
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the probes are {names}")
    if not gpu_is_there():
        print(NO_GPU, file=sys.stderr)
        return 5
    probes = [probe for probe in PROBES if probe.name in wanted]
    report = run_suite(
        options.out, probes, options.budget, lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(digest(report))
    return exit_status(report["probes"])


if __name__ == "__main__":
    raise SystemExit(main())
