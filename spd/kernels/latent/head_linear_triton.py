# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `head_linear`: the products by which heads enter and leave the space of latents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.latent.mla_attention import HeadMatrices
from spd.kernels.launch import ceil_div, pdl_options, power_of_two
from spd.kernels.linear.skinny_config import TOKEN_TILE
from spd.kernels.overlap_triton import release, wait

BLOCK_A = 64
"""Input columns of a head's matrix that a program multiplies at a time."""
BLOCK_B = 64
"""Output columns of a head's matrix that a program computes."""


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["x", "y"])
def head_linear_kernel(
    w, x, y, rows, x_row, x_head, y_row, y_head, A: tl.constexpr, B: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_T rows of one head by BLOCK_B of its B columns: x [T, A] by w [A, B]."""
    head = tl.program_id(1).to(tl.int64)
    row_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    wait(PDL)
    total = tl.zeros((BLOCK_B, BLOCK_T), dtype=tl.float32)
    for start in range(0, A, BLOCK_A):
        inner = start + tl.arange(0, BLOCK_A)
        at = w + head * (A * B) + inner[:, None] * B + column[None, :]
        weights = tl.load(at, mask=(inner < A)[:, None] & (column < B)[None, :], other=0.0)
        inside = (row_t[None, :] < rows) & (inner < A)[:, None]
        tokens = tl.load(
            x + row_t[None, :].to(tl.int64) * x_row + head * x_head + inner[:, None],
            mask=inside,
            other=0.0,
        )
        total = tl.dot(tl.trans(weights), tokens, total, input_precision="ieee")
    release(PDL)
    at = y + row_t[None, :].to(tl.int64) * y_row + head * y_head + column[:, None]
    tl.store(at, total.to(y.dtype.element_ty), mask=(row_t[None, :] < rows) & (column < B)[:, None])


def head_linear(x: Tensor, weight: HeadMatrices) -> Tensor:
    """Launch `Kernels.head_linear`; x has a last stride of 1."""
    assert isinstance(weight, Tensor)
    heads, a, b = weight.shape
    rows = x.shape[0]
    assert x.stride(-1) == 1
    y = torch.empty(rows, heads, b, dtype=x.dtype, device=x.device)
    sizes = {"A": a, "BLOCK_A": min(BLOCK_A, max(16, power_of_two(a))), "B": b, "BLOCK_B": BLOCK_B}
    head_linear_kernel[(ceil_div(rows, TOKEN_TILE), heads, ceil_div(b, BLOCK_B))](
        weight,
        x,
        y,
        rows,
        x.stride(0),
        x.stride(1),
        y.stride(0),
        y.stride(1),
        BLOCK_T=TOKEN_TILE,
        num_warps=4,
        num_stages=min(3, ceil_div(a, BLOCK_A)),  # stages beyond the steps cost registers
        **sizes,
        **pdl_options(x.device),
    )
    return y
