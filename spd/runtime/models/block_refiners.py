"""What makes a block drafter's drafts depend on each other: its rows run together, and each draft
is drawn from logits that the draft before it has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spd.formats.block import BlockConfig
from spd.kernels.sampling.sampling import NEGATIVE_INFINITY
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.builder import LayerBuilder

Draw = Callable[[Tensor, int], Tensor]
"""Draws the tokens [S, 1] of a step of drafting from logits [S, 1, V]."""


class Refiner(Protocol):
    """Changes the logits of each draft by the token before it."""

    def draft(self, logits: Tensor, hidden: Tensor, anchor: Tensor, draw: Draw) -> Tensor:
        """Return k drafts, int64 [S, k], of logits [S, k, V] of the last k of R rows.

        hidden: the states [S, R, hidden] of the block's first R rows. anchor: int64 [S, 1], the
        newest token, before the first draft.
        """
        ...


class MarkovHead:
    """DSpark's bias; see `spd.formats.block`."""

    def __init__(
        self, block: BlockConfig, tables: BlockTensors, build: LayerBuilder, ids: Tensor | None
    ) -> None:
        """ids: the target's id of each of the drafter's, int64 [N]; None if they are the same."""
        assert block.markov is not None
        self.kind = block.markov.kind
        self.rank = block.markov.rank
        self.ids = ids
        self.embedding = tables["markov_embedding"]
        self.output = build.head(tables.matrix("markov_output"), block.draft_vocab_size)
        self.mix = tables.get("markov_mix")
        self.mix_bias = tables.get("markov_mix_bias")

    def draft(self, logits: Tensor, hidden: Tensor, anchor: Tensor, draw: Draw) -> Tensor:
        """Return the drafts; see `Refiner`."""
        count = logits.shape[1]
        first = hidden.shape[1] - count
        state = self.embedding.new_zeros(hidden.shape[0], self.rank)
        if first:
            _, state = self._mix_state(anchor, hidden[:, 0], state)
        token = anchor
        tokens = []
        for step in range(count):
            mixed, state = self._mix_state(token, hidden[:, first + step], state)
            row = self._add_bias(
                logits[:, step], self.output.logits(mixed.contiguous(), len(mixed))
            )
            token = draw(row.unsqueeze(1), step)
            tokens.append(token)
        return torch.cat(tokens, 1)

    def _mix_state(self, token: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input [S, r] of the output matrix for drafts behind tokens [S, 1], and the
        next state [S, r].
        """
        embedded = self.embedding[token[:, 0]]
        if self.kind == "vanilla":
            return embedded, state
        assert self.mix is not None
        if self.kind == "gated":
            gate = F.linear(torch.cat((hidden, embedded), -1), self.mix, self.mix_bias)
            return gate.sigmoid() * embedded, state
        joined = F.linear(torch.cat((state, embedded, hidden), -1), self.mix, self.mix_bias)
        gate, candidate, output = joined.chunk(3, -1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1.0 - gate) * candidate.tanh()

    def _add_bias(self, logits: Tensor, bias: Tensor) -> Tensor:
        """Return logits [S, V] plus the bias [S, N] of the drafter's ids."""
        if self.ids is None:
            return logits + bias
        return logits.index_add(1, self.ids, bias)


class CandidateSelector:
    """DFlash 2's choice among the likeliest ids of each row; see `spd.formats.block`."""

    def __init__(self, block: BlockConfig, tables: BlockTensors) -> None:
        assert block.selector is not None
        self.top_k = block.selector.top_k
        self.predecessors = tables["predecessors"]
        self.successors = tables["successors"]
        self.projection = tables["selector_projection"]

    def draft(self, logits: Tensor, hidden: Tensor, anchor: Tensor, draw: Draw) -> Tensor:
        """Return the drafts; see `Refiner`."""
        count = logits.shape[1]
        values, candidates = logits.topk(self.top_k, -1)
        projected = F.linear(hidden[:, -count:], self.projection)
        token = anchor
        tokens = []
        for step in range(count):
            ids = candidates[:, step]
            context = self.predecessors[token[:, 0]] * projected[:, step]
            scores = (self.successors[ids] @ context.unsqueeze(-1)).squeeze(-1).float()
            row = torch.full_like(logits[:, step], NEGATIVE_INFINITY)
            row = row.scatter(1, ids, values[:, step] + scores)
            token = draw(row.unsqueeze(1), step)
            tokens.append(token)
        return torch.cat(tokens, 1)
