"""Layers of which every rank holds a part: sums after a block, the vocabulary at both ends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.linear.skinny_linear import Draw
from spd.kernels.sampling.philox import STREAM_TARGET, gumbel
from spd.kernels.sampling.sampling import NEGATIVE_INFINITY, scale
from spd.runtime.layers.base import Communicator, ForwardBatch, Residual
from spd.runtime.layers.linear import AnyHead, AnyLinear, Around


def squared(x: Tensor, kernels: Kernels, scale: float | None = None) -> Residual:
    """Rows x [T, N], times scale, as a stream that carries its squares."""
    return Residual(*kernels.embed(torch.arange(x.shape[0], device=x.device), x, scale))


def added(stream: Residual, y: Tensor, kernels: Kernels) -> Residual:
    """The stream [T, N] plus y [T, N], rounded alone before, with squares where it has them."""
    x = stream.x + y
    return Residual(x) if stream.squares is None else squared(x, kernels)


class SummedLinear:
    """A product whose columns [N, K / ranks] are a rank's own: see `AnyLinear`. The bias is added once."""

    def __init__(
        self, inner: AnyLinear, bias: Tensor | None, around: Around, ranks: Communicator, kernels: Kernels
    ) -> None:
        """around: of the whole; none of it stands before the product."""
        self.inner, self.bias, self.around, self.ranks, self.kernels = inner, bias, around, ranks, kernels

    def __call__(self, stream: Residual, batch: ForwardBatch, onto: Residual | None = None) -> Residual:
        y, around = self.ranks.sum(self.inner(stream, batch).x), self.around
        y = y if self.bias is None else y + self.bias
        if onto is None or onto.squares is None:
            return around.ended(y, onto)
        if around.post_norm is None:
            return added(onto, y, self.kernels)
        return Residual(*self.kernels.norm_residual(y, around.post_norm, around.epsilon, onto.x))


class ShardedEmbedding:
    """The rows of a table [V, H] that begin with a rank's first id; others come from other ranks."""

    def __init__(self, weight: Tensor, first: int, vocab_size: int, ranks: Communicator) -> None:
        self.weight, self.first, self.ranks = weight, first, ranks
        self.shape = torch.Size((vocab_size, weight.shape[1]))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [T, H] of ids int64 [T]: zeros but on one rank, so that their sum is exact."""
        own = ids - self.first
        here = (own >= 0) & (own < self.weight.shape[0])
        found = self.weight[torch.where(here, own, 0)]
        return self.ranks.sum(torch.where(here.unsqueeze(-1), found, torch.zeros_like(found)))


AnyEmbedding = Tensor | ShardedEmbedding


class ShardedHead(AnyHead):
    """Logits of a rank's own ids, gathered; or only the best of each rank, where no more is asked.

    Kernels that draw have nothing to say of how good their best is.
    """

    def __init__(
        self,
        inner: AnyHead,
        first: int,
        vocab_size: int,
        ranks: Communicator,
        ids: tuple[Tensor, int] | None = None,
    ) -> None:
        """ids: of a head of some ids each row's token, int64, ascending, and how many there are in all."""
        self.inner, self.first, self.vocab_size, self.ranks = inner, first, vocab_size, ranks
        self.ids = ids
        self.carries_squares = inner.carries_squares
        self.width = -(-vocab_size // ranks.size)

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        own = self.part(hidden, tile)
        every = self.ranks.gather(F.pad(own, (0, self.width - own.shape[-1])))
        return every.transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def part(self, hidden: Tensor, tile: int) -> Tensor:
        """Float32 logits [T, ids of this rank]."""
        return self.inner.logits(hidden, tile)

    def _tokens(self, own: int, device: torch.device) -> tuple[Tensor, int]:
        """What this rank's rows stand for, int64 [own], and how many tokens there are."""
        if self.ids is None:
            return torch.arange(self.first, self.first + own, device=device), self.vocab_size
        known, total = self.ids
        return known[self.first : self.first + own], total

    def choose(self, part: Tensor, draw: Draw, *, noise: bool) -> tuple[Tensor, Tensor]:
        """Tokens [S, R] and whether each is finite, from part [S, R, ids]: the best of every rank's best.

        The draw of `sample_rows` for requests with nothing but a temperature, in its bits; without noise all
        are greedy. Ties go to the lowest id.
        """
        own = part.shape[-1]
        tokens, every_id = self._tokens(own, part.device)
        if self.ids is not None or draw.usable_vocab < self.first + own:
            part = torch.where(tokens < draw.usable_vocab, part, NEGATIVE_INFINITY)
        scores = part
        if noise:
            part = scale(part, draw.temperature)
            rows = torch.arange(part.shape[1], device=part.device)
            positions = draw.first.unsqueeze(-1) + draw.step + rows
            # Of all ids, since a logarithm's bits may depend on where in its row an element lies.
            seeds = draw.seed.unsqueeze(-1).expand_as(positions)
            own_noise = gumbel(seeds, positions, STREAM_TARGET, every_id)[..., tokens]
            greedy = (draw.temperature <= 0).view(-1, 1, 1)
            scores = torch.where(greedy, part, part + own_noise)
        best = scores.argmax(dim=-1, keepdim=True)
        told = torch.cat((scores.gather(-1, best), part.gather(-1, best)), dim=-1).view(torch.int32)
        every = self.ranks.gather(torch.cat((told, tokens[best].int()), dim=-1))
        # Ranks are in the order of their ids, and argmax takes the first of equals.
        winner = every[..., 0].contiguous().view(torch.float32).argmax(dim=0)
        score = every[..., 1:].gather(0, winner[None, ..., None].expand(1, *winner.shape, 2))[0]
        return score[..., 1].long(), score[..., 0].contiguous().view(torch.float32).isfinite()
