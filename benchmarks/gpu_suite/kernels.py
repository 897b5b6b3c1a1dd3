# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The Triton kernels that the probe of the memory's rate measures: a read and a copy.

They compile ahead of time without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def read_sum_kernel(x, out, size, BLOCK: tl.constexpr):
    """Sum int32 values, wrapping, one partial sum a program: reads everything, writes almost
    nothing."""
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


def read_sum(x: torch.Tensor, partial: torch.Tensor, block: int, warps: int) -> None:
    """Sum an int32 vector into one partial sum for each element of `partial`, which sets the
    grid."""
    read_sum_kernel[(partial.numel(),)](x, partial, x.numel(), BLOCK=block, num_warps=warps)


def copy(x: torch.Tensor, out: torch.Tensor, programs: int, block: int, warps: int) -> None:
    """Copy an int32 vector."""
    copy_kernel[(programs,)](x, out, x.numel(), BLOCK=block, num_warps=warps)
