"""Inputs of a head that drafts: pairs of a token and the state before it, and rings of states.

The states of S slots are stored in rings [S, >= depth, H]: the one at position p at index p mod
depth. A ring that is written has one more entry, for rows that must not be stored. A page's last
state is stored with its keys and values, so that a request that finds the page by its hash can
continue from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spd.kernels.linear.norm_gate import rms_norm
from spd.kernels.round.window import Rows


@dataclass(frozen=True)
class HeadStates:
    """Rings [S, >= depth, H] of the states of S slots, which a head reads together with tokens."""

    rings: Tensor
    depth: int


class HeadRows(Protocol):
    """T rows, `width` for each of S slots, then padding rows, whose results are any finite
    numbers."""

    @property
    def positions(self) -> Tensor:
        """Return positions int64 [T], at least 1 in rows that are read."""
        ...

    @property
    def width(self) -> int: ...

    @property
    def states(self) -> HeadStates | None: ...


@dataclass(frozen=True)
class PairNorms:
    """The norms of a head's input pairs."""

    token: Tensor  # [H] scales of the embedding's norm
    hidden: Tensor  # [H] scales of the state's norm
    epsilon: float
    masked: int = -1  # the position whose embedding is zero; -1: none
    hidden_first: bool = False


def head_input(
    token_ids: Tensor, table: Tensor, batch: HeadRows, norms: PairNorms, keeps_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute `Kernels.head_input` by torch."""
    assert batch.states is not None
    rings = batch.states.rings
    depth = batch.states.depth
    rows = torch.arange(token_ids.shape[0], device=token_ids.device)
    slots = (rows // batch.width).clamp(max=rings.shape[0] - 1)
    state = rings[slots, (batch.positions - 1) % depth]
    hidden = rms_norm(state, norms.hidden, norms.epsilon)
    token = table[token_ids].masked_fill((batch.positions == norms.masked).unsqueeze(-1), 0)
    token = rms_norm(token, norms.token, norms.epsilon)
    pairs = torch.cat((hidden, token) if norms.hidden_first else (token, hidden), dim=-1)
    return pairs, state if keeps_state else None


def keep_states(
    hidden: Tensor, rows: Rows, rings: Tensor, page_states: Tensor, page_size: int
) -> None:
    """Compute `Kernels.keep_states` by torch."""
    depth = rings.shape[1] - 1
    slots = (
        torch.arange(hidden.shape[0], device=hidden.device).unsqueeze(-1).expand_as(rows.positions)
    )
    rings[slots, torch.where(rows.valid, rows.positions % depth, depth)] = hidden
    ends = rows.valid & (rows.kv_slots % page_size == page_size - 1)
    page_states[torch.where(ends, rows.kv_slots // page_size, 0)] = hidden
