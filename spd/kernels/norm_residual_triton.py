# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton twin of `norm_residual`: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import Signature, overlap, power_of_two
from spd.kernels.overlap_triton import release, wait

WARPS = 8
"""Of a program that holds a whole row of the stream."""


@triton.jit
def norm_residual_kernel(
    y,
    weight,
    residual,
    x,
    squares,
    epsilon,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row, which it holds whole."""
    wait(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    value = tl.load(y + row * N + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(residual + row * N + column, mask=inside, other=0.0).to(tl.float32)
    stream += value * tl.rsqrt(tl.sum(value * value, 0) / N + epsilon) * factor
    rounded = stream.to(x.dtype.element_ty)
    tl.store(x + row * N + column, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    tl.store(squares + row, tl.sum(wide * wide, 0))


def norm_residual(y: Tensor, weight: Tensor, epsilon: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """See `spd.kernels.norm_residual`; every tensor contiguous."""
    rows, n = y.shape
    x, squares = torch.empty_like(residual), torch.empty(rows, 1, dtype=torch.float32, device=y.device)
    norm_residual_kernel[(rows,)](
        y,
        weight,
        residual,
        x,
        squares,
        epsilon,
        N=n,
        BLOCK=power_of_two(n),
        **overlap(y.device),
        num_warps=WARPS,
    )
    return x, squares


def signatures() -> dict[str, Signature]:
    """The kernel as launched for a model of 9B."""
    types = dict.fromkeys(("y", "residual", "x"), "*bf16") | dict.fromkeys(("weight", "squares"), "*fp32")
    block = {"N": 3584, "BLOCK": 4096, "PDL": True}
    options = {"num_warps": WARPS}
    types["epsilon"] = "fp32"
    return {"norm_residual": Signature(norm_residual_kernel, types, block, options)}
