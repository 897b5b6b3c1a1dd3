# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The Triton kernels the probes measure: a read, a copy, a skinny matrix product and a graph node.

Each comes with its launch, which fixes every choice that could change bits (tile, warps, stages). They
compile ahead of time without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def read_sum_kernel(x, out, size, BLOCK: tl.constexpr):
    """Sum int32 values, wrapping, one partial sum a program: reads everything, writes almost nothing."""
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(program * BLOCK, size, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x + offsets, mask=offsets < size, other=0)
    tl.store(out + program, tl.sum(total))


@triton.jit
def copy_kernel(x, out, size, BLOCK: tl.constexpr):
    """Copy int32 values with a persistent grid."""
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(out + offsets, tl.load(x + offsets, mask=offsets < size), mask=offsets < size)


# The number of rows must not choose the program, so Triton may not specialize on it being 1 or a
# multiple of 16.
@triton.jit(do_not_specialize=["rows"])
def skinny_gemm_kernel(
    w, x, y, rows, n, k, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr
):
    """y[t, n] = sum_k w[n, k] x[t, k] in float32: the weights are the dot's M side, the tokens its N side."""
    row_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        weight_mask = (row_n[:, None] < n) & (column[None, :] < k)
        weights = tl.load(w + row_n[:, None] * k + column[None, :], mask=weight_mask, other=0.0)
        token_mask = (row_t[None, :] < rows) & (column[:, None] < k)
        tokens = tl.load(x + row_t[None, :] * k + column[:, None], mask=token_mask, other=0.0)
        total = tl.dot(weights, tokens, total, input_precision="ieee")
    mask = (row_n[:, None] < n) & (row_t[None, :] < rows)
    tl.store(y + row_t[None, :] * n + row_n[:, None], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def node_kernel(x, SIZE: tl.constexpr):
    """Add one to SIZE counters a program: next to no work, so that a graph of them times its nodes."""
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + offsets, tl.load(x + offsets) + 1)


@dataclass(frozen=True)
class GemmConfig:
    """The choices of `skinny_gemm` that may depend on the weight's shape but never on the rows."""

    block_n: int = 64
    block_k: int = 128
    warps: int = 4
    stages: int = 3


def skinny_gemm(
    w: torch.Tensor, x: torch.Tensor, tile: int, config: GemmConfig = GemmConfig()
) -> torch.Tensor:
    """Multiply x (T, K) by the weights w (N, K) and return (T, N), `tile` tokens a program.

    The output starts as NaN, so that an element no program wrote is seen.
    """
    y = torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    launch_skinny_gemm(w, x, y, tile, config)
    return y


def launch_skinny_gemm(
    w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, tile: int, config: GemmConfig
) -> Any:
    """Launch into y and return Triton's compiled kernel (None under the interpreter)."""
    rows, k = x.shape
    n = w.shape[0]
    assert w.is_contiguous() and x.is_contiguous() and y.is_contiguous() and w.shape[1] == k
    grid = (triton.cdiv(n, config.block_n), triton.cdiv(rows, tile))
    return skinny_gemm_kernel[grid](
        w,
        x,
        y,
        rows,
        n,
        k,
        BLOCK_N=config.block_n,
        BLOCK_T=tile,
        BLOCK_K=config.block_k,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def read_sum(x: torch.Tensor, partial: torch.Tensor, block: int, warps: int) -> None:
    """Sum an int32 vector into one partial sum for each element of `partial`, which sets the grid."""
    read_sum_kernel[(partial.numel(),)](x, partial, x.numel(), BLOCK=block, num_warps=warps)


def copy(x: torch.Tensor, out: torch.Tensor, programs: int, block: int, warps: int) -> None:
    """Copy an int32 vector."""
    copy_kernel[(programs,)](x, out, x.numel(), BLOCK=block, num_warps=warps)


def add_one(x: torch.Tensor, size: int) -> None:
    """Add one to every element of an int32 vector whose length is a multiple of `size`."""
    node_kernel[(x.numel() // size,)](x, SIZE=size, num_warps=1)
