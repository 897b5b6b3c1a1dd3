"""The GPU suite's kernels without a GPU: compiled ahead of time for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_suite import kernels
from tests.kernels.test_kernels_compile import compile_all


def launches(capability: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """What the probes launch, for `compile_ahead`."""
    many, few = (torch.empty(size, dtype=torch.int32, device="meta") for size in (1 << 20, 132))
    found = {
        "sum": lambda: kernels.read_sum(many, few, 4096, 8),
        "vector": lambda: kernels.copy(many, many, 132, 4096, 8),
        "graph": lambda: kernels.add_one(few, 1),
    }
    w, x = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (4096, 64))
    return found | {f"tile_{tile}": partial(kernels.skinny_gemm, w, x, tile) for tile in (16, 64)}


def test_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    """A bandwidth kernel whose loads are narrow would measure itself and not the memory.

    And Triton would compile a product for one row apart from that for five, with other bits perhaps.
    """
    found = [(kernel["kernel"], kernel) for kernel in compile_all(90, [__name__], tmp_path)]
    assert {name for name, _ in found} == {
        f"{n}_kernel" for n in ("read_sum", "copy", "node", "skinny_gemm")
    }
    assert len(found) == 5
    for name, kernel in found:
        assert kernel["target"][0].startswith("sm_90") and kernel["local"] == 0, kernel
        if name.startswith("skinny_gemm"):
            assert (kernel["wgmma"] or kernel["mma"]) and kernel["any_rows"] == ["rows"], kernel
        elif name != "node_kernel":
            assert kernel["wide_loads"], kernel
