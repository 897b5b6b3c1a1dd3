"""Mixture of experts: which experts a row goes through, and what they make of it.

A row's result does not depend on the other rows or on where they go. Rows that nobody reads go somewhere too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.silu_mul import silu_mul

SMALL_EXPERTS = 8 * 2**20
"""Bytes of all experts of a layer up to which the torch form computes every expert for every row: reading
them all costs less than sorting rows, and nothing depends on where rows go."""
FEW_ROWS = 4
"""Rows of one expert that the torch form computes at a time in a window; with more rows than it has the
last one is repeated, so that the number of an expert's rows chooses no arithmetic."""
MANY_ROWS = 16
"""The same in a prompt chunk."""


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest `count` of the last dimension, largest first, ties to the lowest index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route(
    x: Tensor,
    weight: Tensor,
    correction: Tensor | None,
    per_token: int,
    groups: int,
    groups_kept: int,
    group_best: int,
    sigmoid: bool,
    normalised: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose `per_token` of E experts for each row of x [T, K] and weigh them: (ids int64, weights) [T, k].

    weight float32 [E, K]; scores are float32: the sigmoid, else the softmax, of x Wᵀ. Experts are chosen
    by score + correction [E], best first, ties to the lowest id, from the `groups_kept` of `groups` groups
    of neighbours whose `group_best` best ones have the largest sum. Weights float32 are the scores alone,
    divided by their sum if `normalised`, times `scale`. NaN counts as largest: ids are always in range.
    Source: DeepSeek-V2 (2405.04434), DeepSeek-V3 (2412.19437).
    """
    logits = F.linear(x.float(), weight)
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    choice = scores if correction is None else scores + correction
    if groups_kept < groups:
        grouped = choice.view(choice.shape[0], groups, -1)
        leaders = grouped.gather(-1, _best(grouped, group_best)).sum(dim=-1)
        kept = torch.zeros_like(leaders, dtype=torch.bool).scatter_(-1, _best(leaders, groups_kept), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = _best(choice, per_token)
    weights = scores.gather(-1, ids)
    if normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, chunk: bool = False
) -> Tensor:
    """The weighted sum of what each row's experts make of it, x [T, K] to [T, K] in x's dtype.

    ids int64 [T, k] in [0, E), weights float32 [T, k]; gate_up [E, 2 * I, K] with the gate first, down
    [E, K, I]: an expert is down(silu(gate(x)) * up(x)). chunk: whether the rows are a prompt chunk, which
    has one size and a program of its own.
    """
    if gate_up.nbytes + down.nbytes <= SMALL_EXPERTS:
        made = _all_experts(x, ids, gate_up, down)
    else:
        made = _chosen_experts(x, ids, gate_up, down, MANY_ROWS if chunk else FEW_ROWS)
    return torch.bmm(weights.unsqueeze(1), made.float()).squeeze(1).to(x.dtype)


def _all_experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[T, k, K]: every expert for every row, then each row's own ones."""
    inner = silu_mul(torch.bmm(x.expand(gate_up.shape[0], -1, -1), gate_up.transpose(1, 2)))
    made = torch.bmm(inner, down.transpose(1, 2)).transpose(0, 1)
    return made.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[1]))


def _chosen_experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, tile: int) -> Tensor:
    """[T, k, K]: each chosen expert for its own rows, always `tile` of them at a time. Asks the host."""
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.flatten().tolist()):
        pairs.setdefault(expert, []).append(pair)
    order: list[int] = []
    tiles: list[int] = []
    for expert, own in pairs.items():
        own += own[-1:] * (-len(own) % tile)
        order += own
        tiles += [expert] * (len(own) // tile)
    where = torch.tensor(order, device=x.device)
    rows = torch.split(x.index_select(0, where // ids.shape[1]), tile)
    made = [
        F.linear(silu_mul(F.linear(some, gate_up[expert])), down[expert])
        for some, expert in zip(rows, tiles, strict=True)
    ]
    out = x.new_empty(ids.numel(), x.shape[1])
    return out.index_copy_(0, where, torch.cat(made)).view(*ids.shape, -1)
