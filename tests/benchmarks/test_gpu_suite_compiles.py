"""The GPU suite's kernels without a GPU: compiled ahead of time for Hopper, and run by the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.test_kernels_compile import compile_all

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def test_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    """A bandwidth kernel whose loads are narrow would measure itself and not the memory.

    And Triton would compile a product for one row apart from that for five, with other bits perhaps.
    """
    found = {kernel["name"]: kernel for kernel in compile_all(90, ["benchmarks.gpu_suite.kernels"], tmp_path)}
    assert {"read_sum", "copy", "node", "skinny_gemm_bf16_16"} <= set(found)
    for name, kernel in found.items():
        assert kernel["target"][0].startswith("sm_90") and kernel["local"] == 0, kernel
        if name.startswith("skinny_gemm"):
            assert (kernel["wgmma"] or kernel["mma"]) and kernel["any_rows"] == ["rows"], kernel
        elif name != "node":
            assert kernel["wide_loads"], kernel


def test_interpreted_kernels_are_right() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("interpreted_kernels.py")
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    if run.returncode == 77:
        pytest.skip(f"the interpreter of Triton {triton.__version__} cannot loop with this NumPy")
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split() == ["read_sum", "copy", "add_one", "float32", "float16", "invariant"]
