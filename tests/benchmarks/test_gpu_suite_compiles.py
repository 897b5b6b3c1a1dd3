"""The GPU suite's kernels without a GPU: compiled ahead of time for Hopper, and run by the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_suite import kernels
from benchmarks.gpu_suite.bandwidth import random_words, wrapped_sum
from benchmarks.gpu_suite.gemm_equality import position_differences, random_operands, row_count_differences
from benchmarks.gpu_suite.measure import relative_error
from tests.helpers import INTERPRETED
from tests.kernels.test_kernels_compile import compile_all

interpreted = INTERPRETED[0]


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
    assert {name for name, _ in found} == {f"{n}_kernel" for n in ("read_sum", "copy", "node", "skinny_gemm")}
    assert len(found) == 5
    for name, kernel in found:
        assert kernel["target"][0].startswith("sm_90") and kernel["local"] == 0, kernel
        if name.startswith("skinny_gemm"):
            assert (kernel["wgmma"] or kernel["mma"]) and kernel["any_rows"] == ["rows"], kernel
        elif name != "node_kernel":
            assert kernel["wide_loads"], kernel


@interpreted
def test_vectors_of_odd_lengths() -> None:
    """Every mask is needed, and outputs start as what no kernel would write."""
    x, counters = random_words(1000, "cpu"), torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    partial, out = torch.full((3,), -1, dtype=torch.int32), torch.full_like(x, 7)
    kernels.read_sum(x, partial, 64, 4)
    kernels.copy(x, out, 3, 64, 4)
    kernels.add_one(counters, 2)
    assert wrapped_sum(partial) == wrapped_sum(x) and torch.equal(out, x)
    assert counters.tolist() == [6, 7, 8, 9]


@interpreted
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_products_are_right_and_rows_alike(dtype: torch.dtype, bound: float) -> None:
    """Shapes that no block divides, for one tile of tokens and for two."""
    config = kernels.GemmConfig(block_n=32, block_k=32)
    for tile, rows in ((16, 5), (16, 19), (32, 19)):
        w, x = random_operands(40, 72, rows, dtype, "cpu", rows)
        error = relative_error(kernels.skinny_gemm(w, x, tile, config), x.double() @ w.double().T)
        assert error < bound, (tile, error)
    w, x = random_operands(40, 72, 6, dtype, "cpu", 1)
    product = partial(kernels.skinny_gemm, tile=16, config=config)
    assert row_count_differences(product, w, x) == position_differences(product, w, x) == []
