"""The GPU suite's kernels without a GPU: compiled ahead of time for Hopper, and run by the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.test_kernels_compile import compile_all

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def launches(capability: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """What the probes launch, for `compile_ahead`."""
    from benchmarks.gpu_suite import kernels

    many, few = (torch.empty(size, dtype=torch.int32, device="meta") for size in (1 << 20, 132))
    found = {
        "sum": lambda: kernels.read_sum(many, few, 4096, 8),
        "vector": lambda: kernels.copy(many, many, 132, 4096, 8),
        "graph": lambda: kernels.add_one(few, 1),
    }
    for dtype in (torch.bfloat16,):
        w, x = (torch.empty(n, 4096, dtype=dtype, device="meta") for n in (4096, 64))
        found |= {f"{dtype}_{tile}": partial(kernels.skinny_gemm, w, x, tile) for tile in (16, 64)}
    return found


def test_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    """A bandwidth kernel whose loads are narrow would measure itself and not the memory.

    And Triton would compile a product for one row apart from that for five, with other bits perhaps.
    """
    found = [(kernel["kernel"], kernel) for kernel in compile_all(90, [__name__], tmp_path)]
    assert {name for name, _ in found} == {f"{n}_kernel" for n in ("read_sum", "copy", "node", "skinny_gemm")}
    assert len(found) == 5
    for name, kernel in found:
        assert kernel["target"][0].startswith("sm_90") and kernel["local"] == 0, kernel
        if name.startswith("skinny_gemm"):
            assert (kernel["wgmma"] or kernel["mma"]) and kernel["any_rows"] == ["rows"], kernel
        elif name != "node_kernel":
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
