"""Run the GPU suite's kernels under Triton's interpreter; started by a test with TRITON_INTERPRET=1.

The variable must be there before triton is imported, hence a process of its own. bfloat16 products are
not run: the interpreter gets them wrong. Ends with status 77 where the interpreter cannot loop at all
(Triton 3.6 beside NumPy 2.4).
"""

from __future__ import annotations

import sys

import torch
from triton.runtime.errors import InterpreterError

from benchmarks.gpu_suite.bandwidth import random_words, wrapped_sum
from benchmarks.gpu_suite.gemm_equality import position_differences, random_operands, row_count_differences
from benchmarks.gpu_suite.kernels import GemmConfig, add_one, copy, read_sum, skinny_gemm
from benchmarks.gpu_suite.measure import relative_error

CONFIG = GemmConfig(block_n=32, block_k=32)


def check_vectors() -> None:
    """Odd lengths, so that every mask is needed; outputs start as what no kernel would write."""
    x = random_words(1000, "cpu")
    partial = torch.full((3,), -1, dtype=torch.int32)
    read_sum(x, partial, 64, 4)
    assert wrapped_sum(partial) == wrapped_sum(x)
    print("read_sum")
    out = torch.full_like(x, 7)
    copy(x, out, 3, 64, 4)
    assert torch.equal(out, x)
    print("copy")
    counters = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    add_one(counters, 2)
    assert counters.tolist() == [6, 7, 8, 9]
    print("add_one")


def check_product(dtype: torch.dtype, bound: float) -> None:
    """Shapes that no block divides, for one tile of tokens and for two."""
    for tile, rows in ((16, 5), (16, 19), (32, 19)):
        w, x = random_operands(40, 72, rows, dtype, "cpu", rows)
        out = skinny_gemm(w, x, tile, CONFIG)
        error = relative_error(out, x.double() @ w.double().T)
        assert error < bound, f"{dtype} tile {tile}: {error}"
    print(str(dtype).removeprefix("torch."))


if __name__ == "__main__":
    try:
        copy(torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), 1, 8, 4)
    except InterpreterError as error:
        if "0-dimensional" in str(error):
            sys.exit(77)
        raise
    check_vectors()
    check_product(torch.float32, 1e-6)
    check_product(torch.float16, 1e-3)
    weights, tokens = random_operands(40, 72, 6, torch.float16, "cpu", 1)

    def product(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A tile is a fixed shape here too, so equality must hold."""
        return skinny_gemm(w, x, 16, CONFIG)

    assert row_count_differences(product, weights, tokens) == []
    assert position_differences(product, weights, tokens) == []
    print("invariant")
