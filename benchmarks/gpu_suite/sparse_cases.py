"""Kernels of latent attention, of experts and of eight-bit weights; see `kernel_cases` for the
columns.

Bytes are those that must be moved: a latent once for all heads, of the experts those that rows
chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.block_weights import TYPES, draw_blocks
from benchmarks.gpu_suite.graph_timer import Call
from benchmarks.gpu_suite.kernel_cases import PAGE, Bench, Case, Rows
from spd.kernels.attention.attention_chunks import num_chunks
from spd.kernels.attention.paged_attention import AttentionHeads, Windows
from spd.kernels.experts.moe import ExpertWeights
from spd.kernels.linear.few_bits import GroupedWeight, quantize_int8
from spd.kernels.linear.group_rounding import quantize_groups
from spd.kernels.linear.skinny_linear import AnyWeight
from spd.kernels.linear.skinny_linear_triton import operands_of
from spd.kernels.linear.tiled_weight import TiledWeight, tile_weight
from spd.runtime.layers.skinny_linear import SkinnyLinear, share_workspace

CACHE_BYTES = 50 << 20
"""The last level cache of an H100 or H200."""
GROUP = 128
"""Rows and columns of an FP8 block."""


def latent_case(
    bench: Bench,
    heads: int,
    rank: int,
    rope_dim: int,
    slots: int,
    context: int,
    rows: Sequence[int],
) -> Rows:
    """Measure decode windows over latents.

    Shares count every slot's latents, and `partial_bytes`.
    """
    kernels = bench.kernels
    table_rows = Rows()
    device = bench.timer.device
    size = rank + rope_dim
    pages = -(-context // PAGE)
    nbytes = slots * context * size * bench.dtype.itemsize
    pools = [bench.normal(slots * pages + 2, PAGE, size) for _ in range(bench.timer.copies(nbytes))]
    table = (torch.randperm(slots * pages, device=device) + 2).view(slots, pages)
    shape = AttentionHeads(heads, 1, size)
    for width in rows:
        positions = (
            (torch.arange(width, device=device) + context - width).expand(slots, width).contiguous()
        )
        valid = torch.ones(slots, width, dtype=torch.bool, device=device)
        window = Windows(positions, valid, table, [context] * slots, [None] * slots)
        plan = kernels.plan_attention(window, shape, PAGE, bench.dtype)
        query = bench.normal(slots, width, heads, size)
        calls = [
            partial(kernels.mla_attention, query, pool, plan, rank, size**-0.5) for pool in pools
        ]
        partial_results = partial_bytes(slots * width * heads, context, rank)
        if partial_results:
            bench.notes.append(
                f"{partial_results / 1e6:.0f} MB of partial results of {width} rows counted, too"
            )
        table_rows[str(width)] = bench.row(calls, nbytes + partial_results)
    return table_rows


def partial_bytes(rows: int, context: int, rank: int) -> int:
    """Return the bytes of the chunks' float32 results, written and read; 0 if the cache holds them.

    With 128 heads they are more than the latents themselves: 4 x 512 bytes for each head and 128
    positions, against 2 x 576 a position. A share of the latents alone could not reach half of the
    read rate however good the kernel. What the cache holds costs no memory traffic, and counting it
    would flatter.
    """
    once = 4 * rows * num_chunks(context) * rank
    return 2 * once if once > CACHE_BYTES else 0


def experts_case(
    bench: Bench,
    count: int,
    per_token: int,
    hidden: int,
    inner: int,
    kind: str,
    rows: Sequence[int],
) -> Rows:
    """Measure a layer's routed experts; the share is of the read rate for the chosen experts."""
    kernels = bench.kernels
    table_rows = Rows()
    device = bench.timer.device
    gate_up = _stacked(bench=bench, kind=kind, count=count, n=2 * inner, k=hidden)
    down = _stacked(bench=bench, kind=kind, count=count, n=hidden, k=inner)
    expert_weights = ExpertWeights(gate_up, down)
    expert_bytes = (_bytes(gate_up) + _bytes(down)) // count
    for number in rows:
        x = bench.normal(number, hidden)
        stream = bench.normal(number, hidden)
        ids = torch.rand(number, count, device=device).argsort(-1)[:, :per_token].contiguous()
        weights = torch.rand(number, per_token, device=device)
        touched = len(set(ids.flatten().tolist()))
        turns = other_experts(ids, count, bench.timer.copies(touched * expert_bytes))
        calls = [
            partial(kernels.experts, x, expert_ids, weights, expert_weights, stream)
            for expert_ids in turns
        ]
        table_rows[str(number)] = bench.row(calls, touched * expert_bytes)
    return table_rows


def other_experts(ids: Tensor, count: int, turns: int) -> list[Tensor]:
    """Choices [T, C] of the same pattern among `count` experts, no two of the same: what one
    touches, the cache has lost when it comes again. `turns` of them, fewer where that would take
    more experts."""
    ranks = (torch.bincount(ids.flatten(), minlength=count) > 0).cumsum(0)
    pattern = ranks[ids] - 1
    touched = int(ranks[-1])
    labels = torch.randperm(count, device=ids.device)
    max_turns = max(1, min(turns, count // touched))
    return [labels[pattern + turn * touched].contiguous() for turn in range(max_turns)]


def eight_bit_case(bench: Bench, kind: str, n: int, k: int, rows: Sequence[int]) -> Rows:
    """Measure a product by weights in codes; the rival is the same product by 16-bit ones."""
    kernels = bench.kernels
    table_rows = Rows()
    copies = bench.timer.copies(n * k)
    wide = bench.normal(copies, n, k, scale=k**-0.5).unbind()
    narrow = [few_bits(weight, kind) for weight in wide]
    product = SkinnyLinear(wide[0], None, kernels)
    share_workspace([product, SkinnyLinear(narrow[0], None, kernels)], max(rows))
    for count in rows:
        x = bench.normal(count, k)
        residual = bench.normal(count, n)

        def calls(weights: Sequence[AnyWeight], x: Tensor = x, r: Tensor = residual) -> list[Call]:
            return [
                partial(kernels.linear, x, weight, None, product.workspace, None, r)
                for weight in weights
            ]

        table_rows[str(count)] = bench.row(calls(narrow), _bytes(narrow[0]), calls(wide))
    return table_rows


def few_bits(weight: Tensor, kind: str) -> TiledWeight:
    """Return a weight in codes of a kind; of a GGUF type random ones of its shape."""
    if kind in TYPES:
        n, k = weight.shape
        return draw_blocks(kind, n, k, weight.device)
    if kind in ("int4", "int8"):
        return tile_weight(
            quantize_groups(weight, "iq4") if kind == "int4" else quantize_int8(weight)
        )
    n, k = weight.shape
    scales = torch.full((n, -(-k // GROUP)), k**-0.5, dtype=torch.bfloat16, device=weight.device)
    codes = (weight.float() * k**0.5).to(torch.float8_e4m3fn).view(torch.uint8)
    return tile_weight(GroupedWeight("e4m3", codes, scales, None, GROUP))


def _stacked(bench: Bench, kind: str, count: int, n: int, k: int) -> Tensor | TiledWeight:
    if kind == "wide":
        return bench.normal(count, n, k, scale=k**-0.5)
    weights = [few_bits(bench.normal(n, k, scale=k**-0.5), kind) for _ in range(count)]
    first = weights[0]
    scales = torch.stack([weight.scales for weight in weights])
    codes = torch.stack([weight.codes for weight in weights])
    return replace(first, codes=codes, scales=scales, shape=torch.Size((count, n, k)))


def _bytes(weight: AnyWeight) -> int:
    return sum(part.nbytes for part in operands_of(weight) if part is not None)


SIZES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {"count": 128, "per_token": 8, "hidden": 2048, "inner": 768},
    "GLM-4.5-Air": {"count": 128, "per_token": 8, "hidden": 4096, "inner": 1408},
    "DeepSeek-V2-Lite": {"count": 64, "per_token": 6, "hidden": 2048, "inner": 1408},
}
"""Experts of a layer of published models."""


def sparse_cases() -> dict[str, Case]:
    """Return every case by its name: latent attention, experts, and products above 32 MB."""
    cases: dict[str, Case] = {}
    for name, heads in (("V3", 128), ("V2-Lite", 16)):
        for slots in (1, 16):
            for context in (4096, 32768):
                cases[f"mla {name} {slots} slots {context}"] = partial(
                    latent_case,
                    heads=heads,
                    rank=512,
                    rope_dim=64,
                    slots=slots,
                    context=context,
                    rows=(1, 4),
                )
    for name, sizes in SIZES.items():
        cases[f"experts {name}"] = partial(experts_case, kind="wide", rows=(1, 8, 16, 64), **sizes)
    v3: dict[str, Any] = {"count": 256, "per_token": 8, "hidden": 7168, "inner": 2048}
    cases["experts DeepSeek-V3 fp8"] = partial(experts_case, kind="fp8", rows=(1, 8, 16), **v3)
    for kind in ("int8", "fp8", "int4"):
        for n, k in ((4096, 12288), (24576, 4096), (7168, 18432)):
            cases[f"{kind} {n}x{k}"] = partial(eight_bit_case, kind=kind, n=n, k=k, rows=(1, 4, 8))
    for kind in TYPES:
        cases[f"GGUF {kind} 24576x4096"] = partial(
            eight_bit_case, kind=kind, n=24576, k=4096, rows=(1, 4, 8)
        )
    return cases
