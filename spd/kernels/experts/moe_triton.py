# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `moe`: without sorting or synchronizing, by launches of shapes that the plan
knows.

A program of the products belongs to one expert and one tile of its weight's rows, and multiplies
the rows that chose the expert, BLOCK_T at a time; without any it ends. So nothing is sorted, the
weights of an expert are read once however many rows chose it, and a row's result depends on itself
and the weights alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.experts.moe import ExpertWeights, RoutingRule
from spd.kernels.launch import ceil_div, device_properties, pdl_options, power_of_two
from spd.kernels.linear.skinny_config import (
    TOKEN_TILE,
    LinearConfig,
    config_for,
    gate_up_config,
    with_tile,
)
from spd.kernels.linear.skinny_linear import AnyWeight, step_of
from spd.kernels.linear.skinny_linear_triton import launch_of, operands_of
from spd.kernels.linear.skinny_product_triton import activated, gate_and_up, product
from spd.kernels.linear.tiled_weight import TiledWeight
from spd.kernels.linear.weight_operands_triton import row_width, rows_of_weight
from spd.kernels.overlap_triton import release, wait, wait_and_release

ROUTER = LinearConfig(block_n=16, block_k=32, split_k=8, warps=4, stages=3)
TALL_BLOCK_N = 128
"""Rows of a 16-bit weight that a program multiplies."""
LIST_BLOCK = 256
"""Pairs of a row and an expert that the kernel of lists reads at a time."""
SUM_BLOCK = 1024
"""Elements of a row that a program of the last sum computes."""


@triton.jit(do_not_specialize=["rows"])
def router_kernel(
    w, x, parts, rows, n, k, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store float32 partial scores [T, SPLIT_K, E] of tokens x by the router's weight, both widened
    first."""
    first = tl.program_id(1) * BLOCK_N
    row_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row_n = first + tl.arange(0, BLOCK_N)
    weight_rows = rows_of_weight(w, first, n, k, BLOCK_N)
    size = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = tl.program_id(2) * size
    wait_and_release(PDL)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + size, k), BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        weights = tl.load(weight_rows + column[None, :], mask=column[None, :] < k, other=0.0)
        inside = (row_t[None, :] < rows) & (column[:, None] < k)
        tokens = tl.load(x + row_t[None, :] * k + column[:, None], mask=inside, other=0.0)
        total = tl.dot(weights.to(tl.float32), tokens.to(tl.float32), total, input_precision="ieee")
    at = (row_t[None, :] * SPLIT_K + tl.program_id(2)) * n + row_n[:, None]
    tl.store(parts + at, total, mask=(row_t[None, :] < rows) & (row_n[:, None] < n))


@triton.jit
def best_index(scores, is_free, index):
    """Return the index of the largest score among is_free, the lowest of equal ones, NaN or not."""
    best = tl.max(tl.where(is_free, scores, float("-inf")), 0)
    return tl.min(tl.where(is_free & (scores == best), index, 1 << 30), 0)


@triton.jit
def choose_experts_kernel(
    parts, correction, ids, weights, added, scale,
    E: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_S: tl.constexpr, GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr, GROUP_BEST: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one token's experts, best first, and their weights; one program a token."""
    wait_and_release(PDL)
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK_E)
    inside = index < E
    logits = tl.zeros((BLOCK_E,), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(parts + (row * PARTS + part) * E + index, mask=inside, other=0.0)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(inside, logits, float("-inf"))
        exponentials = tl.exp(logits - tl.max(logits, 0))
        scores = exponentials / tl.sum(exponentials, 0)
    choice = scores
    if correction is not None:
        choice += tl.load(correction + index, mask=inside, other=0.0)
    choice = tl.where(choice != choice, float("inf"), choice)
    is_free = inside
    if GROUPS_KEPT < GROUPS:
        is_free = is_free & is_in_kept_group(
            choice, index, E // GROUPS, GROUPS, GROUPS_KEPT, GROUP_BEST
        )
    slot = tl.arange(0, BLOCK_S)
    chosen = tl.zeros((BLOCK_S,), tl.int32)
    weight = tl.zeros((BLOCK_S,), tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        best = tl.minimum(best_index(choice, is_free, index), E - 1)
        is_free = is_free & (index != best)
        chosen = tl.where(slot == rank, best, chosen)
        weight = tl.where(slot == rank, tl.sum(tl.where(index == best, scores, 0.0), 0), weight)
    if NORMALISED:
        weight = weight / (tl.sum(weight, 0) + added)
    tl.store(ids + row * PER_TOKEN + slot, chosen.to(tl.int64), mask=slot < PER_TOKEN)
    tl.store(weights + row * PER_TOKEN + slot, weight * scale, mask=slot < PER_TOKEN)


@triton.jit
def is_in_kept_group(
    choice, index, SIZE, GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr, BEST: tl.constexpr
):
    """True for experts of the GROUPS_KEPT groups whose BEST best experts have the largest sum."""
    group = index // SIZE
    group_ids = tl.arange(0, triton.next_power_of_2(GROUPS))
    group_scores = tl.full((triton.next_power_of_2(GROUPS),), float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        is_free = group == g
        total = tl.zeros((), tl.float32)
        for _ in tl.static_range(BEST):
            best = best_index(choice, is_free, index)
            total += tl.sum(tl.where(index == best, choice, 0.0), 0)
            is_free = is_free & (index != best)
        group_scores = tl.where(group_ids == g, total, group_scores)
    open_groups = group_ids < GROUPS
    is_kept = index < 0
    for _ in tl.static_range(GROUPS_KEPT):
        best = best_index(group_scores, open_groups, group_ids)
        open_groups = open_groups & (group_ids != best)
        is_kept = is_kept | (group == best)
    return is_kept


@triton.jit(do_not_specialize=["pairs"])
def list_rows_kernel(ids, lists, counts, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """List the pairs (row * k + place) that chose one expert, ascending, and count them."""
    wait_and_release(PDL)
    expert = tl.program_id(0)
    count = 0
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_chosen = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        place = count + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        tl.store(lists + expert.to(tl.int64) * pairs + place, pair, mask=is_chosen)
        count += tl.sum(is_chosen.to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["pairs", "per_token"])
def experts_gate_up_kernel(
    weight, bias, x, lists, counts, inner, pairs, per_token, n, k,
    GROUP_K: tl.constexpr, CODE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, ACT: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store inner [pairs, n]: an `Activation` of each pair's row of x by its expert's w [2 * n, k]
    + bias.

    Without gates w is [n, k], and has no bias.
    """
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    row_n = first + tl.arange(0, BLOCK_N)
    width = row_width(k, BLOCK_K, CODE)
    base = expert * (n if ACT == "relu2" else 2 * n)
    wait(PDL)
    count = tl.load(counts + expert)
    for start in range(0, count, BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        pair = tl.load(lists + expert * pairs + place, mask=place < count, other=pairs)
        row_t = tl.where(place < count, pair // per_token, pairs)
        if ACT == "relu2":
            rows = rows_of_weight(weight.stored + base * width, first, n, width, BLOCK_N)
            value = product(
                rows, weight, base, x, first, row_t, pairs, n, k,
                GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, 1, EVEN_K,
            )  # fmt: skip
            value = tl.where(value < 0.0, 0.0, value)
            value *= value
        else:
            gate, up = gate_and_up(
                weight, base, x, first, row_t, pairs, n, k,
                GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, 1, EVEN_K,
            )  # fmt: skip
            if bias is not None:
                shift = bias + expert * (2 * n) + row_n
                gate += tl.load(shift, mask=row_n < n, other=0.0)[:, None]
                up += tl.load(shift + n, mask=row_n < n, other=0.0)[:, None]
            value = activated(gate, up, ACT, LIMIT, ALPHA)
        mask = (place[None, :] < count) & (row_n[:, None] < n)
        at = inner + pair[None, :].to(tl.int64) * n + row_n[:, None]
        tl.store(at, value.to(inner.dtype.element_ty), mask=mask)
    release(PDL)


@triton.jit(do_not_specialize=["pairs"])
def experts_down_kernel(
    weight, bias, inner, lists, counts, outputs, pairs, n, k,
    GROUP_K: tl.constexpr, CODE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store outputs float32 [pairs, n]: inner [pairs, k] by each pair's expert's w [n, k], plus
    bias [n]."""
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    row_n = first + tl.arange(0, BLOCK_N)
    width = row_width(k, BLOCK_K, CODE)
    base = expert * n
    weight_rows = rows_of_weight(weight.stored + base * width, first, n, width, BLOCK_N)
    wait(PDL)
    count = tl.load(counts + expert)
    for start in range(0, count, BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        pair = tl.load(lists + expert * pairs + place, mask=place < count, other=pairs)
        total = product(
            weight_rows, weight, base, inner, first, pair, pairs, n, k,
            GROUP_K, CODE, BLOCK_N, BLOCK_T, BLOCK_K, 1, EVEN_K,
        )  # fmt: skip
        if bias is not None:
            total += tl.load(bias + expert * n + row_n, mask=row_n < n, other=0.0)[:, None]
        mask = (place[None, :] < count) & (row_n[:, None] < n)
        tl.store(outputs + pair[None, :].to(tl.int64) * n + row_n[:, None], total, mask=mask)
    release(PDL)


@triton.jit
def sum_experts_kernel(
    outputs, weights, stream, y, squares, n, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the weighted sum of a part of one row, best expert first, plus the stream if not
    None."""
    wait_and_release(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = row * PER_TOKEN + place
        value = tl.load(outputs + pair * n + column, mask=column < n, other=0.0)
        total += tl.load(weights + pair) * value
    if stream is not None:
        total += tl.load(stream + row * n + column, mask=column < n, other=0.0).to(tl.float32)
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + row * n + column, rounded, mask=column < n)
    if squares is not None:
        value = tl.where(column < n, rounded.to(tl.float32), 0.0)
        tl.store(squares + row * tl.num_programs(1) + tl.program_id(1), tl.sum(value * value, 0))


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Launch `Kernels.router_logits`; K is always cut into the same parts."""
    rows, k = x.shape
    experts = weight.shape[0]
    parts = torch.empty(rows, ROUTER.split_k, experts, dtype=torch.float32, device=x.device)
    sizes = {"BLOCK_N": ROUTER.block_n, "BLOCK_T": TOKEN_TILE, "BLOCK_K": ROUTER.block_k}
    options = {"SPLIT_K": ROUTER.split_k, "num_warps": ROUTER.warps, "num_stages": ROUTER.stages}
    router_kernel[(ceil_div(rows, TOKEN_TILE), ceil_div(experts, ROUTER.block_n), ROUTER.split_k)](
        weight, x, parts, rows, experts, k, **sizes, **options, **pdl_options(x.device)
    )
    return parts


def route(parts: Tensor, correction: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Launch `Kernels.route`; parts are added in their order."""
    rows, count, experts = parts.shape
    ids = parts.new_empty(rows, rule.per_token, dtype=torch.int64)
    weights = parts.new_empty(rows, rule.per_token)
    sizes = {"E": experts, "BLOCK_E": power_of_two(experts), "PARTS": count}
    sizes |= {
        "PER_TOKEN": rule.per_token,
        "BLOCK_S": power_of_two(rule.per_token),
        "GROUPS": rule.groups,
    }
    sizes |= {"GROUPS_KEPT": rule.top_groups, "GROUP_BEST": rule.experts_per_group_score}
    options = {"num_warps": 4, "enable_fp_fusion": False, **pdl_options(parts.device)}
    choose_experts_kernel[(rows,)](
        parts,
        correction,
        ids,
        weights,
        rule.weight_epsilon,
        rule.scale,
        SIGMOID=rule.sigmoid,
        NORMALISED=rule.normalised,
        **sizes,
        **options,
    )
    return ids, weights


def _product_config(n: int, k: int, weight: AnyWeight, *, pair: bool) -> LinearConfig:
    """Return the config of a dense weight of this shape, but with K unsplit and tall tiles.

    Many experts fill a device anyway.
    """
    values = operands_of(weight).stored
    device = device_properties(values.device)
    size = values.element_size()
    config = replace(
        config_for(n=n, k=k, itemsize=size, device=device, step=step_of(weight)), split_k=1
    )
    if size > 1:
        config = with_tile(
            replace(config, block_n=TALL_BLOCK_N, stages=3), TOKEN_TILE, size, device
        )
    return gate_up_config(config, n) if pair else config


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    stream: Tensor | None = None,
    *,
    chunk: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch `Kernels.experts`; a prompt chunk runs the same programs."""
    gate_up = expert_weights.gate_up
    down = expert_weights.down
    assert isinstance(gate_up, Tensor | TiledWeight) and isinstance(down, Tensor | TiledWeight)
    lists, counts = _list_rows(ids, down.shape[0])
    inner = _multiply_gate_up(
        x=x,
        lists=lists,
        counts=counts,
        per_token=ids.shape[1],
        gate_up=gate_up,
        expert_weights=expert_weights,
    )
    outputs = _multiply_down(
        inner=inner, lists=lists, counts=counts, down=down, bias=expert_weights.down_bias
    )
    return _sum_outputs(x, outputs, weights, stream)


def _list_rows(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of ids [T, k] that chose each expert, int32 [E, T * k], and their counts
    [E]."""
    pairs = ids.numel()
    lists = torch.empty(num_experts, pairs, dtype=torch.int32, device=ids.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    list_rows_kernel[(num_experts,)](
        ids,
        lists,
        counts,
        pairs,
        BLOCK=min(power_of_two(pairs), LIST_BLOCK),
        **pdl_options(ids.device),
        num_warps=1,
    )
    return lists, counts


def _multiply_gate_up(
    x: Tensor,
    lists: Tensor,
    counts: Tensor,
    per_token: int,
    gate_up: Tensor | TiledWeight,
    expert_weights: ExpertWeights,
) -> Tensor:
    """Return the activations [T * per_token, I] of x [T, K] for all pairs of a row and its
    expert."""
    act = expert_weights.act
    count, rows, k = gate_up.shape
    pairs = lists.shape[1]
    n = rows // 2 if act.gated else rows
    inner = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    config = _product_config(rows, k, gate_up, pair=act.gated)
    experts_gate_up_kernel[(ceil_div(rows, config.block_n), count)](
        operands_of(gate_up),
        expert_weights.gate_up_bias,
        x,
        lists,
        counts,
        inner,
        pairs,
        per_token,
        n,
        k,
        **launch_of(config, gate_up, x, act),
    )
    return inner


def _multiply_down(
    inner: Tensor, lists: Tensor, counts: Tensor, down: Tensor | TiledWeight, bias: Tensor | None
) -> Tensor:
    """Return inner [pairs, I] by each pair's expert's matrix of down [E, K, I]: float32 [pairs,
    K]."""
    count, k, n = down.shape
    pairs = lists.shape[1]
    outputs = torch.empty(pairs, k, dtype=torch.float32, device=inner.device)
    config = _product_config(k, n, down, pair=False)
    experts_down_kernel[(ceil_div(k, config.block_n), count)](
        operands_of(down),
        bias,
        inner,
        lists,
        counts,
        outputs,
        pairs,
        k,
        n,
        **launch_of(config, down, inner),
    )
    return outputs


def _sum_outputs(
    x: Tensor, outputs: Tensor, weights: Tensor, stream: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of each row's outputs by weights [T, k], plus the stream, and their
    squares."""
    rows, k = x.shape
    block = min(power_of_two(k), SUM_BLOCK)
    parts = ceil_div(k, block)
    y = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    squares = None
    if stream is not None:
        squares = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    sum_experts_kernel[(rows, parts)](
        outputs,
        weights,
        stream,
        y,
        squares,
        k,
        PER_TOKEN=weights.shape[1],
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
        **pdl_options(x.device),
    )
    return y, squares
