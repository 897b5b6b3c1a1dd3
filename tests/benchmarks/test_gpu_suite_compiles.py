"""The GPU suite's kernels without a GPU: compiled ahead of time for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_suite import kernels
from tests.kernels.test_kernels_compile import compile_all


def launches(capability: tuple[int, int]) -> dict[str, Callable[[], None]]:
    """Return the launches of the probes by name, for `compile_ahead`."""
    words = torch.empty(1 << 20, dtype=torch.int32, device="meta")
    sums = torch.empty(132, dtype=torch.int32, device="meta")
    return {
        "sum": lambda: kernels.read_sum(words, sums, 4096, 8),
        "vector": lambda: kernels.copy(words, words, 132, 4096, 8),
    }


def test_compiles_for_hopper_with_wide_loads_and_without_spills(tmp_path: Path) -> None:
    """A kernel whose loads are narrow would measure itself and not the memory."""
    compiled = compile_all(90, [__name__], tmp_path)
    assert sorted(kernel["kernel"] for kernel in compiled) == ["copy_kernel", "read_sum_kernel"]
    for kernel in compiled:
        assert kernel["target"][0].startswith("sm_90"), kernel
        assert kernel["local"] == 0, kernel
        assert kernel["wide_loads"], kernel
