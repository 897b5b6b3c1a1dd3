# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton twin of `rotary_store`: one launch, float32 inside, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import Signature, ceil_div, overlap, power_of_two
from spd.kernels.overlap_triton import release, wait
from spd.kernels.rotary import pairs_of

HEADS_A_PROGRAM = 4
"""Fills a warp with 16-byte loads of 128 16-bit elements a head, and sums a head within the warp."""


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_slots"])
def rotary_store_kernel(
    qkv, cos, sin, positions, kv_slots, qk_weight, key_pages, value_pages, query, epsilon,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row and HEADS of its H + 2K heads; a head is two halves of HALF elements, padded to BLOCK."""
    wait(PDL)
    release(PDL)
    D: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    within = column < HALF
    position = tl.load(positions + row)
    slot = tl.load(kv_slots + row)
    source = qkv + row * ((H + 2 * K) * D) + head[:, None] * D + column[None, :]
    mask = (head < H + 2 * K)[:, None] & within[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    turn = tl.load(cos + position * D + column, mask=within, other=0.0).to(tl.float32)[None, :]
    lift = tl.load(sin + position * D + HALF + column, mask=within, other=0.0).to(tl.float32)[None, :]

    x, y = first, second
    if qk_weight is not None:
        scales = qk_weight + head[:, None] * D + column[None, :]
        scaled = (head < H + K)[:, None] & within[None, :]
        inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + epsilon)[:, None]
        x = x * inverse * tl.load(scales, mask=scaled, other=0.0).to(tl.float32)
        y = y * inverse * tl.load(scales + HALF, mask=scaled, other=0.0).to(tl.float32)
    left = x * turn - y * lift
    right = y * turn + x * lift

    to_query = query + row * (H * D) + head[:, None] * D + column[None, :]
    is_query = (head < H)[:, None] & within[None, :]
    tl.store(to_query, left.to(query.dtype.element_ty), mask=is_query)
    tl.store(to_query + HALF, right.to(query.dtype.element_ty), mask=is_query)
    to_key = key_pages + slot * (K * D) + (head - H)[:, None] * D + column[None, :]
    is_key = ((head >= H) & (head < H + K))[:, None] & within[None, :]
    tl.store(to_key, left.to(key_pages.dtype.element_ty), mask=is_key)
    tl.store(to_key + HALF, right.to(key_pages.dtype.element_ty), mask=is_key)
    to_value = value_pages + slot * (K * D) + (head - H - K)[:, None] * D + column[None, :]
    is_value = (head >= H + K)[:, None] & mask
    tl.store(to_value, first.to(value_pages.dtype.element_ty), mask=is_value)
    tl.store(to_value + HALF, second.to(value_pages.dtype.element_ty), mask=is_value)


def rotary_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    qk_weight: Tensor | None,
    epsilon: float,
    key_pages: Tensor,
    value_pages: Tensor,
    num_heads: int,
) -> Tensor:
    """Rotate a fused projection's queries and keys, write keys and values to the pools, return the queries.

    As in `spd.kernels.rotary_store`; every tensor contiguous but for the rows' indices.
    """
    kv_heads, size = key_pages.shape[2:]
    pairs, rows = pairs_of(size), qkv.shape[0]
    query = torch.empty((rows, num_heads, size), dtype=qkv.dtype, device=qkv.device)
    rotary_store_kernel[(rows, ceil_div(num_heads + 2 * kv_heads, HEADS_A_PROGRAM))](
        qkv.contiguous(),
        cos,
        sin,
        positions.contiguous(),
        kv_slots.contiguous(),
        qk_weight,
        key_pages,
        value_pages,
        query,
        epsilon,
        H=num_heads,
        K=kv_heads,
        HALF=pairs,
        HEADS=HEADS_A_PROGRAM,
        BLOCK=power_of_two(pairs),
        num_warps=1,
        **overlap(qkv.device),
    )
    return query


def signatures() -> dict[str, Signature]:
    """The kernel as launched for an 8B model, with and without the per-head norm."""
    found = {}
    for name in ("bf16", "fp16"):
        for normed in (True, False):
            types = dict.fromkeys(
                ("qkv", "cos", "sin", "qk_weight", "key_pages", "value_pages", "query"), f"*{name}"
            )
            types |= {"positions": "*i64", "kv_slots": "*i64", "epsilon": "fp32"}
            constants: dict[str, int | None] = {
                "H": 32,
                "K": 8,
                "HALF": 64,
                "HEADS": HEADS_A_PROGRAM,
                "BLOCK": 64,
            }
            if not normed:
                del types["qk_weight"]
                constants["qk_weight"] = None
            found[f"rotary_store_{name}{'_normed' if normed else ''}"] = Signature(
                rotary_store_kernel,
                types,
                constants,
                {"num_warps": 1},
                unspecialized=("positions", "kv_slots"),
            )
    return found
