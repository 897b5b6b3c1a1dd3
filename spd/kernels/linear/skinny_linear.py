"""Linear layers for a few rows, with the norm's statistics passed along with the residual stream.

The residual stream x [T, K] has `squares` float32 [T, P]: P partial sums of the squares of each row
of x as stored, for any P. Their sum over P, divided by K, is the mean square, so that a norm costs
its reader one factor a row. The norm's scales are folded into the matrix that follows it when
weights are loaded: W' = W * norm_weight. Weights are [N, K], contiguous, as checkpoints store them.

A weight may also be a `TiledWeight`: codes of four to eight bits, with scales; or several of
different forms, one below the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.linear.activation import SILU, Activation
from spd.kernels.linear.norm_gate import activate
from spd.kernels.linear.rows import sum_of_squares
from spd.kernels.linear.tiled_weight import StackedTiles, TiledWeight
from spd.kernels.sampling.philox import STREAM_TARGET, gumbel


@dataclass(frozen=True)
class LinearWorkspace:
    """The buffers of products that are split along K: float32 partial sums and int32 counters.

    Counters are zero between calls. Products that run one after another share one workspace.
    """

    partials: Tensor
    counters: Tensor


AnyWeight = Tensor | TiledWeight | StackedTiles
"""A weight [N, K] of products; embeddings, heads and what is added to the stream have one form."""


def pieces_of(weight: AnyWeight) -> tuple[Tensor | TiledWeight, ...]:
    """Return the matrices that a product multiplies one by one, in the order of their rows."""
    return weight.pieces if isinstance(weight, StackedTiles) else (weight,)


def step_of(weight: AnyWeight) -> int | None:
    """Return the columns that a product must multiply at a time; None if any number is possible."""
    return weight.step if isinstance(weight, TiledWeight) else None


class Norm(NamedTuple):
    """A norm before a product: the rows' squares float32 [T, P], and its epsilon."""

    squares: Tensor
    epsilon: float


class Draw(NamedTuple):
    """The sampling parameters of S slots' windows: row r of slot s is at position first[s] + step +
    r."""

    seed: Tensor  # int64 [S]
    first: Tensor  # int64 [S]
    step: int
    temperature: Tensor  # float32 [S]; at 0 the likeliest token is drawn
    usable_vocab: int  # ids below it may be drawn


def plain_weight(weight: AnyWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight as a tensor."""
    return weight if isinstance(weight, Tensor) else weight.plain(dtype)


def linear(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    workspace: LinearWorkspace | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    *,
    chunk: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `Kernels.linear` by torch; the workspace is not used."""
    if norm is not None:
        scale = torch.rsqrt(norm.squares.sum(dim=-1, keepdim=True) / x.shape[1] + norm.epsilon)
        x = (x.float() * scale).to(x.dtype)  # before the product, where float16 cannot overflow
    if residual is None:
        return F.linear(x, plain_weight(weight, x.dtype), bias), None
    y = torch.addmm(residual, x, plain_weight(weight, x.dtype).t())
    y = y if bias is None else y + bias
    return y, sum_of_squares(y)


def norm_gate_up(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    workspace: LinearWorkspace | None,
    norm: Norm,
    act: Activation = SILU,
) -> Tensor:
    """Compute `Kernels.norm_gate_up` by torch."""
    both, _ = linear(x, weight, bias, workspace, norm)
    return activate(both.float(), act).to(x.dtype)


def head_logits(x: Tensor, weight: AnyWeight) -> Tensor:
    """Compute `Kernels.head_logits` by torch."""
    return F.linear(x.float(), plain_weight(weight, torch.float32).float())


def head_sample(
    x: Tensor, weight: AnyWeight, draw: Draw, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `Kernels.head_sample` by torch."""
    seed, first, step, temperature, usable_vocab = draw
    slots = seed.shape[0]
    rows = x.shape[0] // seed.shape[0]
    row_temperature = temperature.repeat_interleave(rows).unsqueeze(-1)
    positions = first.unsqueeze(-1) + step + torch.arange(rows, device=x.device)
    logits = head_logits(x, weight)
    if ids is not None:
        full_logits = logits.new_full(
            (x.shape[0], max(usable_vocab, int(ids[-1]) + 1)), float("-inf")
        )
        logits = full_logits.index_copy_(1, ids, logits)
    logits = logits[:, :usable_vocab]
    processed = torch.where(row_temperature > 0, logits / row_temperature, logits)
    noise = gumbel(seed.unsqueeze(-1).expand(slots, rows), positions, STREAM_TARGET, usable_vocab)
    token = torch.where(
        row_temperature > 0, processed + noise.view(slots * rows, -1), processed
    ).argmax(dim=-1)
    chosen = processed.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return token, chosen.isfinite() & ~processed.isnan().any(dim=-1)
