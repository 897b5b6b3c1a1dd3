"""Mixture of experts: which experts a row goes through, and what they make of it.

A row's result does not depend on the other rows or on where they go. Rows that are not read go somewhere too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.activation import SILU, Activation
from spd.kernels.linear.few_bits import GroupedWeight, TiledWeight, grouped_linear
from spd.kernels.linear.norm_gate import activate
from spd.kernels.linear.rows import sum_of_squares
from spd.kernels.linear.skinny_linear import plain_weight
from spd.kernels.native.packed import PackedWeight

FEW_ROWS = 4
"""Rows of one expert that the torch form computes at a time in a window; with more rows than it has the
last one is repeated, so that the number of an expert's rows chooses no arithmetic."""
MANY_ROWS = 16  # the same in a prompt chunk


class RoutingRule(Protocol):
    """How the experts of a row are chosen and weighed; see `Kernels.route`."""

    @property
    def per_token(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def experts_per_group_score(self) -> int: ...
    @property
    def sigmoid(self) -> bool: ...
    @property
    def normalised(self) -> bool: ...
    @property
    def weight_epsilon(self) -> float: ...
    @property
    def scale(self) -> float: ...


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest `count` of the last dimension, largest first, ties to the lowest index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `Kernels.router_logits` by torch, in one part."""
    return F.linear(x.float(), weight).unsqueeze(1)


def route(parts: Tensor, correction: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Compute `Kernels.route` by torch."""
    logits = parts.sum(dim=1)
    scores = logits.sigmoid() if rule.sigmoid else logits.softmax(dim=-1)
    choice = scores if correction is None else scores + correction
    if rule.top_groups < rule.groups:
        grouped = choice.view(choice.shape[0], rule.groups, -1)
        leaders = grouped.gather(-1, _best(grouped, rule.experts_per_group_score)).sum(dim=-1)
        best = _best(leaders, rule.top_groups)
        kept = torch.zeros_like(leaders, dtype=torch.bool).scatter_(-1, best, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = _best(choice, rule.per_token)
    weights = scores.gather(-1, ids)
    if rule.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.weight_epsilon)
    return ids, weights * rule.scale


ExpertMatrices = Tensor | TiledWeight | GroupedWeight | PackedWeight
"""A matrix for each of E experts: Triton's codes are tiled, torch's grouped, the C kernels' packed."""


def unpacked(weights: ExpertMatrices, dtype: torch.dtype) -> Tensor:
    """Return the matrices [E, N, K] as one tensor of a dtype."""
    assert isinstance(weights, Tensor | TiledWeight)
    return plain_weight(weights, dtype)


class ExpertWeights(NamedTuple):
    """All experts of a layer: one is down(act(gate_up(x) + its bias)) + its bias.

    gate_up is [E, 2 * I, K] with the gates first, or [E, I, K] where the activation has none; down [E, K, I].
    """

    gate_up: ExpertMatrices
    down: ExpertMatrices
    act: Activation = SILU
    gate_up_bias: Tensor | None = None  # float32 [E, 2 * I]; both are given or neither
    down_bias: Tensor | None = None  # float32 [E, K]

    def apply_expert(self, rows: Tensor, expert: int) -> Tensor:
        """What one expert makes of rows [T, K], by torch's operations."""
        inner = activate(_linear(rows, self.gate_up, self.gate_up_bias, expert), self.act)
        return _linear(inner, self.down, self.down_bias, expert)


def _linear(x: Tensor, weights: ExpertMatrices, bias: Tensor | None, expert: int) -> Tensor:
    """Return x [T, K] times one of the weights [E, N, K], plus its bias [N]."""
    if isinstance(weights, GroupedWeight):
        made = grouped_linear(x, weights.select(expert))
    else:
        made = F.linear(x, unpacked(weights, x.dtype)[expert])
    return made if bias is None else made + bias[expert].to(made.dtype)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    stream: Tensor | None = None,
    *,
    chunk: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `Kernels.experts` by torch: each chosen expert for its own rows, a fixed number at a time.

    Waits for the device, which alone knows the ids.
    """
    if stream is None:
        return _by_expert(x, ids, weights, expert_weights, MANY_ROWS if chunk else FEW_ROWS), None
    gate_up = unpacked(expert_weights.gate_up, torch.float32).float()
    down = unpacked(expert_weights.down, torch.float32).float()
    wide = expert_weights._replace(gate_up=gate_up, down=down)
    y = (stream.float() + _by_expert(x.float(), ids, weights, wide, FEW_ROWS)).to(stream.dtype)
    return y, sum_of_squares(y)


def _by_expert(
    x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, tile: int
) -> Tensor:
    """Sum, weighted, what every row [T, K] becomes by its experts, `tile` rows of one at a time."""
    pairs = dict[int, list[int]]()
    for pair, expert in enumerate(ids.flatten().tolist()):
        pairs.setdefault(expert, []).append(pair)
    order: list[int] = []
    tiles: list[int] = []
    for expert, chosen in pairs.items():
        chosen += chosen[-1:] * (-len(chosen) % tile)
        order += chosen
        tiles += [expert] * (len(chosen) // tile)
    where = torch.tensor(order, device=x.device)
    rows = torch.split(x.index_select(0, where // ids.shape[1]), tile)
    made = [
        expert_weights.apply_expert(some, expert) for some, expert in zip(rows, tiles, strict=True)
    ]
    out = x.new_empty(ids.numel(), x.shape[1]).index_copy_(0, where, torch.cat(made))
    return torch.bmm(weights.unsqueeze(1), out.view(*ids.shape, -1).float()).squeeze(1).to(x.dtype)
