"""Mixture of experts: routing of rows, and the experts' products.

A row's result does not depend on the other rows or on their experts. Rows whose results are not
read are routed, too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.activation import SILU, Activation
from spd.kernels.linear.few_bits import GroupedWeight
from spd.kernels.linear.int8_activations import codes_linear
from spd.kernels.linear.norm_gate import activate
from spd.kernels.linear.rows import sum_of_squares
from spd.kernels.linear.skinny_linear import plain_weight
from spd.kernels.linear.tiled_weight import TiledWeight
from spd.kernels.native.packed import PackedWeight

WINDOW_TILE_ROWS = 4
"""Rows of one expert that the torch form computes at a time in a window.

The last tile is filled up with copies of its last row, so that arithmetic does not depend on the
number of an expert's rows.
"""
CHUNK_TILE_ROWS = 16
"""Rows of one expert that the torch form computes at a time in a prompt chunk."""


class RoutingRule(Protocol):
    """The routing parameters of a layer; see `Kernels.route`."""

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


def _best_indices(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest `count` in the last dimension, ties to the lowest index."""
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
        group_scores = grouped.gather(-1, _best_indices(grouped, rule.experts_per_group_score)).sum(
            dim=-1
        )
        best = _best_indices(group_scores, rule.top_groups)
        is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best, True)
        choice = grouped.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = _best_indices(choice, rule.per_token)
    weights = scores.gather(-1, ids)
    if rule.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.weight_epsilon)
    return ids, weights * rule.scale


ExpertMatrices = Tensor | TiledWeight | GroupedWeight | PackedWeight
"""Matrices of E experts: tiled codes for Triton, grouped ones for torch, packed for the C
kernels."""


def dequantize_matrices(weights: ExpertMatrices, dtype: torch.dtype) -> Tensor:
    """Return the matrices [E, N, K] as one tensor of a dtype."""
    assert isinstance(weights, Tensor | TiledWeight)
    return plain_weight(weights, dtype)


class ExpertWeights(NamedTuple):
    """All experts of a layer: each computes down(act(gate_up(x) + gate_up_bias)) + down_bias.

    gate_up is [E, 2 * I, K] with the gates first, or [E, I, K] where the activation has none; down
    [E, K, I].
    """

    gate_up: ExpertMatrices
    down: ExpertMatrices
    act: Activation = SILU
    gate_up_bias: Tensor | None = None  # float32 [E, 2 * I]; None if down_bias is None
    down_bias: Tensor | None = None  # float32 [E, K]

    def apply_expert(self, rows: Tensor, expert: int) -> Tensor:
        """Return one expert's results of rows [T, K], by torch."""
        inner = activate(_linear(rows, self.gate_up, self.gate_up_bias, expert), self.act)
        return _linear(inner, self.down, self.down_bias, expert)


def _linear(x: Tensor, weights: ExpertMatrices, bias: Tensor | None, expert: int) -> Tensor:
    """Return x [T, K] times one of the weights [E, N, K], plus its bias [N]."""
    if isinstance(weights, GroupedWeight):
        product = codes_linear(x, weights.select(expert))
    else:
        product = F.linear(x, dequantize_matrices(weights, x.dtype)[expert])
    return product if bias is None else product + bias[expert].to(product.dtype)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights,
    stream: Tensor | None = None,
    *,
    chunk: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `Kernels.experts` by torch: each chosen expert's rows, a fixed number at a time.

    Waits for the device to read the ids.
    """
    if stream is None:
        tile = CHUNK_TILE_ROWS if chunk else WINDOW_TILE_ROWS
        return _by_expert(
            x=x, ids=ids, weights=weights, expert_weights=expert_weights, tile=tile
        ), None
    gate_up = dequantize_matrices(expert_weights.gate_up, torch.float32).float()
    down = dequantize_matrices(expert_weights.down, torch.float32).float()
    widened = expert_weights._replace(gate_up=gate_up, down=down)
    y = (
        stream.float()
        + _by_expert(
            x=x.float(), ids=ids, weights=weights, expert_weights=widened, tile=WINDOW_TILE_ROWS
        )
    ).to(stream.dtype)
    return y, sum_of_squares(y)


def _by_expert(
    x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, tile: int
) -> Tensor:
    """Return the weighted sum of every row's experts [T, K].

    An expert computes `tile` rows at a time.
    """
    pairs = dict[int, list[int]]()
    for pair, expert in enumerate(ids.flatten().tolist()):
        pairs.setdefault(expert, []).append(pair)
    order: list[int] = []
    tiles: list[int] = []
    for expert, expert_pairs in pairs.items():
        expert_pairs += expert_pairs[-1:] * (-len(expert_pairs) % tile)
        order += expert_pairs
        tiles += [expert] * (len(expert_pairs) // tile)
    pair_order = torch.tensor(order, device=x.device)
    rows = torch.split(x.index_select(0, pair_order // ids.shape[1]), tile)
    expert_outputs = [
        expert_weights.apply_expert(tile_rows, expert)
        for tile_rows, expert in zip(rows, tiles, strict=True)
    ]
    out = x.new_empty(ids.numel(), x.shape[1]).index_copy_(0, pair_order, torch.cat(expert_outputs))
    return torch.bmm(weights.unsqueeze(1), out.view(*ids.shape, -1).float()).squeeze(1).to(x.dtype)
