"""Probes that run NVIDIA's own tools, beside a driver or toolkit: clocks, counters, faults.

A tool that is not installed is named in the answer; nothing else is measured in its place.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.gpu_suite.suite import PACKAGE, child_command, environment

CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
SAMPLE_MILLISECONDS = 100
NUMBER = re.compile(r"\d+(?:\.\d+)?")
SMI = (
    "nvidia-smi",
    f"--query-gpu={','.join(CLOCKS)}",
    "--format=csv,noheader,nounits",
    f"--loop-ms={SAMPLE_MILLISECONDS}",
)
PLAIN = f"{PACKAGE}.end_to_end:run_plain"
LAYER = (sys.executable, "-c", f"import {PACKAGE}.vendor_tools as t; t.run_eager_layer()")
COUNTED_KERNELS = "attend_chunk|gate_up|delta_rule|linear"
COUNTERS = {
    "Duration": "us",
    "DRAM Throughput": "dram_percent",
    "Registers Per Thread": "registers",
    "Achieved Occupancy": "occupancy_percent",
}
"""Metrics of `ncu --set basic` that are kept, by the names of their columns in the answer."""
NCU = (
    "ncu",
    "--clock-control",
    "none",
    "--set",
    "basic",
    "--csv",
    "-k",
    f"regex:{COUNTED_KERNELS}",
    "-c",
    "12",
)
SANITIZED_TESTS = ("split", "attention", "recurrent")
SANITIZERS = ("memcheck", "racecheck")
ERROR_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def missing_tool(name: str) -> dict[str, Any] | None:
    """Return an answer that names a tool that is not on the PATH; None where it is."""
    return None if shutil.which(name) else {"missing": name}


def summarize_clocks(lines: Iterable[str]) -> dict[str, Any]:
    """Return [lowest, median, highest] of each column of nvidia-smi's samples; MHz, W and °C."""
    samples = []
    for line in lines:
        fields = NUMBER.findall(line)
        if len(fields) == len(CLOCKS):  # a driver says [N/A] of what it cannot measure
            samples.append([float(field) for field in fields])
    columns = zip(*samples, strict=True)
    spans = [[min(column), median(column), max(column)] for column in columns]
    return {"samples": len(samples), **dict(zip(CLOCKS, spans, strict=False))}


def run_clocks(
    sampler: Sequence[str] = SMI, load: Sequence[str] | None = None, seconds: float = 30.0
) -> dict[str, Any]:
    """Sample the clocks while a load runs for at most so many seconds, by default plain rounds."""
    missing = missing_tool(sampler[0])
    if missing:
        return missing
    with (
        tempfile.TemporaryDirectory() as place,
        subprocess.Popen(sampler, stdout=subprocess.PIPE, text=True) as samples,
    ):
        plain = child_command(PLAIN, Path(place) / "rounds.json", seconds)
        # The clocks of the rounds that ran are what counts, also where they did not end in time.
        with suppress(subprocess.TimeoutExpired):
            command = plain if load is None else load
            subprocess.run(command, cwd=ROOT, env=environment(), timeout=seconds, check=False)
        samples.terminate()
        output, _ = samples.communicate()
    return summarize_clocks(output.splitlines())


def run_eager_layer() -> None:
    """Launch a layer's kernels once, eagerly: what `ncu` counts."""
    import torch

    from benchmarks.gpu_suite.graph_timer import Once
    from benchmarks.gpu_suite.kernel_cases import Bench, attention_case, layer_case
    from benchmarks.gpu_suite.kernel_table import heads_of
    from benchmarks.gpu_suite.recurrent_cases import SHAPES, delta_case
    from benchmarks.gpu_suite.shapes import QWEN3_8B
    from spd.kernels.dispatch import load_kernels

    with torch.inference_mode():
        bench = Bench(load_kernels("triton"), Once("cuda"), torch.bfloat16, 1.0)
        layer_case(bench, shape=QWEN3_8B, rows=(1, 5))
        attention_case(bench, heads=heads_of(QWEN3_8B), slots=1, context=4096, rows=(1, 5))
        delta_case(bench, SHAPES[0], slots=1, lengths=(0, 4))


def read_counters(output: str) -> list[dict[str, Any]]:
    """Return one row a launch, in order, of ncu's CSV: the kernel, and the metrics of COUNTERS."""
    table = output[output.find('"ID"') :] if '"ID"' in output else ""
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        column = COUNTERS.get(row["Metric Name"])
        if column:
            launch[column] = _in_microseconds(row["Metric Value"], row["Metric Unit"])
    return list(launches.values())


def _in_microseconds(value: str, unit: str) -> float:
    """Return a metric's value; of times, which have units, in microseconds."""
    number = float(value.replace(",", ""))
    scale = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3}
    return number * scale.get(unit, 1.0)


def run_ncu(tool: Sequence[str] = NCU, layer: Sequence[str] = LAYER) -> dict[str, Any]:
    """Count what a layer's kernels do by Nsight Compute."""
    missing = missing_tool(tool[0])
    if missing:
        return missing
    run = subprocess.run(
        [*tool, *layer], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    return {"status": run.returncode, "launches": read_counters(run.stdout)}


def run_sanitizer(
    tool: str = "compute-sanitizer", tests: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Run one GPU test of each kind under memcheck, then under racecheck; count their errors."""
    missing = missing_tool(tool)
    if missing:
        yield missing
        return
    answers: dict[str, Any] = {}
    for sanitizer in SANITIZERS:
        for name in SANITIZED_TESTS:
            selection = tests or ("tests/kernels", "-m", "gpu", "-k", name, "--maxfail=1")
            pytest = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", *selection]
            command = [tool, "--tool", sanitizer, *pytest, "--import-mode=importlib"]
            run = subprocess.run(
                command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
            )
            answers[f"{sanitizer} {name}"] = count_errors(run.stdout, run.returncode)
            yield {"tools": answers}


def count_errors(output: str, status: int) -> dict[str, Any]:
    """Return a sanitizer's count of errors; None where it printed none, as where it was killed."""
    summaries = ERROR_SUMMARY.findall(output)
    errors = sum(int(count) for count in summaries) if summaries else None
    return {"status": status, "errors": errors, "lines": output.splitlines()[-3:]}
