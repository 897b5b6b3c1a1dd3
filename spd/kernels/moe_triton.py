"""Triton twin of `moe`: no sorting, no look by the host, every launch of a shape that the plan knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spd.kernels.launch import Signature, ceil_div, overlap, power_of_two
from spd.kernels.moe_kernels_triton import (
    choose_experts_kernel,
    experts_down_kernel,
    experts_gate_up_kernel,
    list_rows_kernel,
    router_kernel,
    sum_experts_kernel,
)
from spd.kernels.skinny_config import TOKEN_TILE, LinearConfig, config_for, paired, unsplit
from spd.kernels.skinny_linear import AnyWeight, capability_of
from spd.kernels.skinny_linear_triton import groups_of, operands_of

ROUTER = LinearConfig(block_n=16, block_k=32, split_k=8, warps=4, stages=3)
LIST_BLOCK = 256
SUM_BLOCK = 1024


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """See `moe.router_logits`; the parts of K are always the same ones."""
    rows, k = x.shape
    experts = weight.shape[0]
    parts = torch.empty(rows, ROUTER.split_k, experts, dtype=torch.float32, device=x.device)
    router_kernel[(ceil_div(rows, TOKEN_TILE), ceil_div(experts, ROUTER.block_n), ROUTER.split_k)](
        weight,
        x,
        parts,
        rows,
        experts,
        k,
        BLOCK_N=ROUTER.block_n,
        BLOCK_T=TOKEN_TILE,
        BLOCK_K=ROUTER.block_k,
        SPLIT_K=ROUTER.split_k,
        **overlap(x.device),
        num_warps=ROUTER.warps,
        num_stages=ROUTER.stages,
    )
    return parts


def route(
    parts: Tensor,
    correction: Tensor | None,
    per_token: int,
    groups: int,
    groups_kept: int,
    group_best: int,
    sigmoid: bool,
    normalised: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `moe.route`; parts are added in their order."""
    rows, count, experts = parts.shape
    device = parts.device
    ids = torch.empty(rows, per_token, dtype=torch.int64, device=device)
    weights = torch.empty(rows, per_token, dtype=torch.float32, device=device)
    choose_experts_kernel[(rows,)](
        parts,
        correction,
        ids,
        weights,
        scale,
        E=experts,
        BLOCK_E=power_of_two(experts),
        PARTS=count,
        PER_TOKEN=per_token,
        BLOCK_S=power_of_two(per_token),
        GROUPS=groups,
        GROUPS_KEPT=groups_kept,
        GROUP_BEST=group_best,
        SIGMOID=sigmoid,
        NORMALISED=normalised,
        **overlap(device),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return ids, weights


def _product_config(n: int, k: int, weight: AnyWeight, *, pair: bool) -> LinearConfig:
    values = operands_of(weight)[0]
    return _expert_config(n, k, values.element_size(), capability_of(values.device), pair)


def _expert_config(n: int, k: int, itemsize: int, capability: tuple[int, int], pair: bool) -> LinearConfig:
    """As a dense weight's of this shape, but K whole and tiles tall: many experts fill a device anyway."""
    config = unsplit(config_for(max(n, 2048), k, itemsize, capability))
    return paired(config, n) if pair else config


def _constants(config: LinearConfig, weight: AnyWeight | None, k: int, halves: int) -> dict[str, Any]:
    return {
        **groups_of(weight),
        "BLOCK_N": config.block_n // halves,
        "BLOCK_T": TOKEN_TILE,
        "BLOCK_K": config.block_k,
        "EVEN_K": k % config.block_k == 0,
    }


def _made(x: Tensor, ids: Tensor, gate_up: AnyWeight, down: AnyWeight) -> Tensor:
    """float32 [T * k, K]: what each row's experts make of it."""
    count, double, k = gate_up.shape
    n, pairs, device = double // 2, ids.numel(), x.device
    lists = torch.empty(count, pairs, dtype=torch.int32, device=device)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    list_rows_kernel[(count,)](
        ids, lists, counts, pairs, BLOCK=min(power_of_two(pairs), LIST_BLOCK), **overlap(device), num_warps=1
    )
    inner = torch.empty(pairs, n, dtype=x.dtype, device=device)
    made = torch.empty(pairs, k, dtype=torch.float32, device=device)
    fuses = x.dtype == torch.float32
    config = _product_config(double, k, gate_up, pair=True)
    values, scales, _ = operands_of(gate_up)
    experts_gate_up_kernel[(ceil_div(n, config.block_n // 2), count)](
        values,
        scales,
        0 if scales is None else scales.stride(0),
        x,
        lists,
        counts,
        inner,
        pairs,
        ids.shape[1],
        n,
        k,
        **_constants(config, gate_up, k, 2),
        **overlap(device),
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=fuses,
    )
    config = _product_config(k, n, down, pair=False)
    values, scales, _ = operands_of(down)
    experts_down_kernel[(ceil_div(k, config.block_n), count)](
        values,
        scales,
        0 if scales is None else scales.stride(0),
        inner,
        lists,
        counts,
        made,
        pairs,
        k,
        n,
        **_constants(config, down, n, 1),
        **overlap(device),
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=fuses,
    )
    return made


def _summed(
    made: Tensor, weights: Tensor, dtype: torch.dtype, stream: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The rows' weighted sums, onto the stream where there is one, and the squares of that."""
    rows, per_token = weights.shape
    n = made.shape[1]
    block = min(power_of_two(n), SUM_BLOCK)
    y = torch.empty(rows, n, dtype=dtype, device=made.device)
    squares = None
    if stream is not None:
        squares = torch.empty(rows, ceil_div(n, block), dtype=torch.float32, device=made.device)
    sum_experts_kernel[(rows, ceil_div(n, block))](
        made,
        weights,
        stream,
        y,
        squares,
        n,
        PER_TOKEN=per_token,
        BLOCK=block,
        **overlap(made.device),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y, squares


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: AnyWeight, down: AnyWeight, *, chunk: bool = False
) -> Tensor:
    """See `moe.experts`; a prompt chunk runs the same program."""
    return _summed(_made(x, ids, gate_up, down), weights, x.dtype, None)[0]


def experts_onto(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: AnyWeight, down: AnyWeight, stream: Tensor
) -> tuple[Tensor, Tensor]:
    """See `moe.experts_onto`."""
    y, squares = _summed(_made(x, ids, gate_up, down), weights, x.dtype, stream)
    assert squares is not None
    return y, squares


def signatures(capability: tuple[int, int] = (9, 0)) -> dict[str, Signature]:
    """A layer of Qwen3-30B-A3B in bfloat16, and one of DeepSeek-V3 in FP8."""
    qwen = _signatures("30b", 128, 2048, 768, 8, 1, 1, False, None, capability)
    return qwen | _signatures("v3", 256, 7168, 2048, 8, 8, 4, True, "fp8e4nv", capability)


def _signatures(
    name: str,
    count: int,
    hidden: int,
    inner: int,
    per_token: int,
    groups: int,
    kept: int,
    sigmoid: bool,
    eight: str | None,
    capability: tuple[int, int],
) -> dict[str, Signature]:
    rule = {"PER_TOKEN": per_token, "BLOCK_S": per_token, "GROUPS": groups, "GROUPS_KEPT": kept}
    rule |= {"GROUP_BEST": 2, "SIGMOID": sigmoid, "NORMALISED": True, "E": count, "BLOCK_E": count}
    router = {"BLOCK_N": ROUTER.block_n, "BLOCK_T": TOKEN_TILE, "BLOCK_K": ROUTER.block_k}
    four = {"num_warps": 4}
    router_types = {"w": "*fp32", "x": "*bf16", "parts": "*fp32"} | dict.fromkeys(("rows", "n", "k"), "i32")
    choose_types = {"parts": "*fp32", "ids": "*i64", "weights": "*fp32", "scale": "fp32"}
    if sigmoid:
        choose_types["correction"] = "*fp32"
    list_types = {"ids": "*i64", "lists": "*i32", "counts": "*i32", "pairs": "i32"}
    sum_types = {"made": "*fp32", "weights": "*fp32", "stream": "*bf16", "y": "*bf16", "squares": "*fp32"}
    pdl, loose = {"PDL": True}, ("rows", "pairs", "scale")
    found = {
        f"router_{name}": Signature(
            router_kernel,
            router_types,
            router | {"SPLIT_K": ROUTER.split_k} | pdl,
            four | {"num_stages": ROUTER.stages},
            loose,
        ),
        f"choose_experts_{name}": Signature(
            choose_experts_kernel,
            choose_types,
            rule | {"PARTS": ROUTER.split_k} | pdl | ({} if sigmoid else {"correction": None}),
            four,
            loose,
        ),
        f"list_rows_{name}": Signature(
            list_rows_kernel, list_types, {"BLOCK": LIST_BLOCK} | pdl, {"num_warps": 1}, loose
        ),
        f"sum_experts_{name}": Signature(
            sum_experts_kernel,
            sum_types | {"n": "i32"},
            {"PER_TOKEN": per_token, "BLOCK": SUM_BLOCK} | pdl,
            four,
        ),
    }
    return found | _product_signatures(name, hidden, inner, eight, capability)


def _product_signatures(
    name: str, hidden: int, inner: int, eight: str | None, capability: tuple[int, int]
) -> dict[str, Signature]:
    pdl, loose = {"PDL": True}, ("pairs", "per_token", "scale_stride")
    found = {}
    size, group = (1, {"GROUP_N": 16, "GROUP_K": 128}) if eight else (2, {"GROUP_N": 1, "GROUP_K": 0})
    types = {
        "w": f"*{eight or 'bf16'}",
        "lists": "*i32",
        "counts": "*i32",
        "pairs": "i32",
        "scale_stride": "i32",
    }
    types |= {"inner": "*bf16", "n": "i32", "k": "i32"} | ({"scale": "*fp32"} if eight else {})
    none = {} if eight else {"scale": None}
    config = _expert_config(2 * inner, hidden, size, capability, True)
    found[f"experts_gate_up_{name}"] = Signature(
        experts_gate_up_kernel,
        types | {"x": "*bf16", "per_token": "i32"},
        _constants(config, None, hidden, 2) | group | pdl | none,
        {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False},
        loose,
    )
    config = _expert_config(hidden, inner, size, capability, False)
    found[f"experts_down_{name}"] = Signature(
        experts_down_kernel,
        types | {"made": "*fp32"},
        _constants(config, None, inner, 1) | group | pdl | none,
        {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False},
        loose,
    )
    return found
