"""What the assembler says of every kernel on six architectures; needs no GPU.

Usage: python -m benchmarks.compiled_kernels   (writes benchmarks/results/compiled_kernels.json)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/compiled_kernels.json"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
COLUMNS = [
    "architecture",
    "kernel",
    "registers a thread",
    "bytes of local memory a thread",
    "bytes of shared memory",
]


def compiled(architecture: int) -> list[list[Any]]:
    """Return a row for each kernel, in bfloat16 where there is a choice."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = ROOT / "tests/kernels/compile_ahead.py"
    output = subprocess.run(
        [sys.executable, str(script), str(architecture), "fp16", "tests.kernels.launches"],
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    kernels = [json.loads(line) for line in output.splitlines()]
    return [[architecture, k["name"], k["registers"], k["local"], k["shared"]] for k in kernels]


def main() -> None:
    """Compile, and write the table with one row a line."""
    kernels = [row for architecture in ARCHITECTURES for row in compiled(architecture)]
    rows = [json.dumps(row) for row in kernels]
    head = {
        "schema": "spd.benchmarks.compiled_kernels/1",
        "triton": triton.__version__,
        "assembler": "the ptxas that Triton brings",
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    table = ",\n".join(f"  {row}" for row in rows)
    text = "\n".join(
        ["{", *lines, f' "columns": {json.dumps(COLUMNS)},', f' "rows": [\n{table}\n ]', "}"]
    )
    RESULT.write_text(text + "\n")
    print(f"{len(rows)} rows; in local memory: {[row for row in kernels if row[3]]}")


if __name__ == "__main__":
    main()
