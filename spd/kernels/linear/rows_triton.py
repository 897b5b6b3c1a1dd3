# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `rows`: one launch each, every tensor contiguous."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, pdl_options, power_of_two
from spd.kernels.linear.block_product_triton import block_values
from spd.kernels.linear.norm_gate import rms_norm
from spd.kernels.linear.skinny_linear_triton import operands_of
from spd.kernels.linear.tiled_weight import BLOCK_STEP, TiledWeight
from spd.kernels.linear.weight_operands_triton import (
    WeightOperands,
    places_of_rows,
    row_width,
)
from spd.kernels.overlap_triton import wait_and_release

COPY_BLOCK = 2048
"""Values of a program that computes a part of a row."""
CODE_BLOCK = 512
"""Codes of a program that computes a part of a row."""
WARPS = 8
"""Warps of a program that holds a full row of the stream."""


@triton.jit
def embed_kernel(
    token_ids, table, x, squares, h, SCALE: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    """Store a part of one row: table[id], times SCALE if not None, and the part's sum of
    squares."""
    wait_and_release(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.load(token_ids + row).to(tl.int64)
    column = part * BLOCK_H + tl.arange(0, BLOCK_H)
    value = tl.load(table + token * h + column, mask=column < h, other=0.0)
    if SCALE is not None:
        value = (value.to(tl.float32) * SCALE).to(value.dtype)
    tl.store(x + row * h + column, value, mask=column < h)
    value32 = value.to(tl.float32)
    tl.store(squares + row * tl.num_programs(1) + part, tl.sum(value32 * value32, 0))


@triton.jit
def code_rows_kernel(
    token_ids, weight, y, k, GROUP_K: tl.constexpr, CODE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store a part of one row of a weight in blocks, each value rounded once.

    The launch must disable fused multiply-add, so that a minimum is taken off as ggml does it.
    """
    wait_and_release(PDL)
    row = tl.program_id(0)
    token = tl.load(token_ids + row).to(tl.int64)
    scales_at, factors_at, upper_at = places_of_rows(weight, token, k, GROUP_K, CODE, BLOCK_K)
    own = WeightOperands(
        weight.stored + token * row_width(k, BLOCK_K, CODE),
        weight.upper + upper_at if weight.upper is not None else None,
        weight.scales + scales_at,
        None,
        weight.minima + scales_at if weight.minima is not None else None,
        weight.factors + factors_at if weight.factors is not None else None,
        None,
    )
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = block_values(own, tl.minimum(column, k - 1), GROUP_K, CODE, BLOCK_K)
    tl.store(y + row * k + column, value.to(y.dtype.element_ty), mask=column < k)


@triton.jit
def rms_norm_rows_kernel(
    x, squares, weight, y, k, epsilon, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm a part of one row."""
    wait_and_release(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    part = tl.arange(0, BLOCK_P)
    total = tl.sum(tl.load(squares + row * PARTS + part, mask=part < PARTS, other=0.0), 0)
    value = tl.load(x + row * k + column, mask=column < k, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(total / k + epsilon) * factor
    tl.store(y + row * k + column, value.to(y.dtype.element_ty), mask=column < k)


@triton.jit
def norm_residual_kernel(
    y, weight, residual, x, squares, epsilon, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the norm of one full row of y to the stream."""
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    value = tl.load(y + row * N + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    stream = tl.load(residual + row * N + column, mask=inside, other=0.0).to(tl.float32)
    stream += value * tl.rsqrt(tl.sum(value * value, 0) / N + epsilon) * factor
    rounded = stream.to(x.dtype.element_ty)
    tl.store(x + row * N + column, rounded, mask=inside)
    value32 = rounded.to(tl.float32)
    tl.store(squares + row, tl.sum(value32 * value32, 0))


def embed(token_ids: Tensor, table: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Launch `Kernels.embed`; the table is contiguous."""
    rows = token_ids.shape[0]
    h = table.shape[1]
    block = min(power_of_two(h), COPY_BLOCK)
    parts = ceil_div(h, block)
    x = torch.empty(rows, h, dtype=table.dtype, device=table.device)
    squares = torch.empty(rows, parts, dtype=torch.float32, device=table.device)
    embed_kernel[(rows, parts)](
        token_ids,
        table,
        x,
        squares,
        h,
        SCALE=scale,
        BLOCK_H=block,
        **pdl_options(x.device),
        num_warps=4,
    )
    return x, squares


def code_rows(token_ids: Tensor, table: TiledWeight, dtype: torch.dtype) -> Tensor:
    """Launch `Kernels.code_rows`."""
    rows = token_ids.shape[0]
    k = table.shape[1]
    block = min(power_of_two(k), CODE_BLOCK)
    y = torch.empty(rows, k, dtype=dtype, device=table.device)
    code_rows_kernel[(rows, ceil_div(k, block))](
        token_ids,
        operands_of(table),
        y,
        k,
        GROUP_K=table.group,
        CODE=table.kind,
        BLOCK_K=BLOCK_STEP,
        BLOCK=block,
        enable_fp_fusion=False,
        **pdl_options(y.device),
        num_warps=4,
    )
    return y


def rms_norm_rows(x: Tensor, squares: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Launch `Kernels.rms_norm_rows`.

    Rows of a prompt chunk have no squares and are normed by torch.
    """
    if squares is None:
        return rms_norm(x, weight, epsilon)
    rows, k = x.shape
    block = min(power_of_two(k), COPY_BLOCK)
    parts = squares.shape[1]
    y = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    sizes = {"PARTS": parts, "BLOCK_P": power_of_two(parts), "BLOCK_K": block}
    rms_norm_rows_kernel[(rows, ceil_div(k, block))](
        x, squares, weight, y, k, epsilon, **sizes, **pdl_options(x.device), num_warps=4
    )
    return y


def norm_residual(
    y: Tensor, weight: Tensor, epsilon: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch `Kernels.norm_residual`; y and residual are contiguous."""
    rows, n = y.shape
    x = torch.empty_like(residual)
    squares = torch.empty(rows, 1, dtype=torch.float32, device=y.device)
    sizes = {"N": n, "BLOCK": power_of_two(n)}
    norm_residual_kernel[(rows,)](
        y, weight, residual, x, squares, epsilon, **sizes, **pdl_options(y.device), num_warps=WARPS
    )
    return x, squares
