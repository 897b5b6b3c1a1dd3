# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `gated_norm`: one launch, one program a row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import pdl_options, power_of_two
from spd.kernels.overlap_triton import wait_and_release


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["gate"])
def gated_norm_kernel(
    x, gate, weight, out, stride, epsilon, H: tl.constexpr, SIZE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and gate one row of one head."""
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    j = tl.arange(0, BLOCK)
    within = j < SIZE
    value = tl.load(x + (row * H + head) * SIZE + j, mask=within, other=0.0)
    activated_gate = tl.load(gate + row * stride + head * SIZE + j, mask=within, other=0.0).to(
        tl.float32
    )
    activated_gate *= tl.sigmoid(activated_gate)
    value *= activated_gate if GATE_FIRST else 1.0
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + epsilon)
    normed = normed * tl.load(weight + head * WEIGHT_STRIDE + j, mask=within, other=0.0)
    normed *= 1.0 if GATE_FIRST else activated_gate
    tl.store(out + (row * H + head) * SIZE + j, normed.to(out.dtype.element_ty), mask=within)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool = False
) -> Tensor:
    """Launch `Kernels.gated_norm`; rows of gate have stride 1."""
    assert gate.stride(1) == 1
    rows, heads, size = x.shape
    out = torch.empty((rows, heads * size), dtype=gate.dtype, device=x.device)
    weight_stride = weight.numel() // heads * (weight.dim() - 1)
    sizes = {"H": heads, "SIZE": size, "WEIGHT_STRIDE": weight_stride, "BLOCK": power_of_two(size)}
    gated_norm_kernel[(rows, heads)](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        epsilon,
        GATE_FIRST=gate_first,
        num_warps=1 if size <= 512 else 4,
        **sizes,
        **pdl_options(x.device),
    )
    return out
