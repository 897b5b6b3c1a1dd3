"""What a head that drafts reads and keeps: pairs of a token and the state before it, and rings of states.

The states of S slots stand in rings [S, >= depth, H]: the one at position p has place p mod depth. A ring
that is written has one place more, which takes what must not be kept. A page's last state is kept beside
its keys and values, so that whoever finds the page by its hash can go on from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.rms_norm import rms_norm


def head_input(
    token_ids: Tensor,
    table: Tensor,
    states: Tensor,
    depth: int,
    positions: Tensor,
    width: int,
    token_norm: Tensor,
    hidden_norm: Tensor,
    epsilon: float,
    masked: int,
    hidden_first: bool,
    *,
    keeps_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The norms of each row's embedding and of the state one position before it, side by side: [T, 2 * H].

    Where keeps_state the state itself [T, H] comes second, else None.

    T rows, `width` for each of S slots, then rows of no slot, whose results are any finite numbers.
    token_ids int64 [T] in table [V, H]; states: rings of `depth`; positions int64 [T], those of rows that
    matter from 1 on; the embedding is zero in rows at position `masked` (-1: nowhere); token_norm and
    hidden_norm [H]. The state comes first where hidden_first, else the embedding.
    """
    rows = torch.arange(token_ids.shape[0], device=token_ids.device)
    slots = (rows // width).clamp(max=states.shape[0] - 1)
    state = states[slots, (positions - 1) % depth]
    hidden = rms_norm(state, hidden_norm, epsilon)
    token = table[token_ids].masked_fill((positions == masked).unsqueeze(-1), 0)
    token = rms_norm(token, token_norm, epsilon)
    pairs = torch.cat((hidden, token) if hidden_first else (token, hidden), dim=-1)
    return pairs, state if keeps_state else None


def keep_states(
    rows: Tensor,
    positions: Tensor,
    valid: Tensor,
    kv_slots: Tensor,
    states: Tensor,
    page_states: Tensor,
    page_size: int,
) -> None:
    """Write valid rows [S, W, H] into the rings states [S, depth + 1, H], and pages' last ones, in place.

    positions int64, valid bool [S, W], valid positions of a slot less than depth apart; kv_slots int64
    [S, W] as the round's windows have them; page_states [P, H] takes the row whose slot is its page's last.
    Rows that are not valid may write the rings' last place and page 0.
    """
    depth = states.shape[1] - 1
    slots = torch.arange(rows.shape[0], device=rows.device).unsqueeze(-1).expand_as(positions)
    states[slots, torch.where(valid, positions % depth, depth)] = rows
    ends = valid & (kv_slots % page_size == page_size - 1)
    page_states[torch.where(ends, kv_slots // page_size, 0)] = rows
