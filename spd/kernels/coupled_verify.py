"""Coupled verification: a draft token is accepted exactly where it equals the target's own draw."""

from __future__ import annotations

import torch
from torch import Tensor


def coupled_verify(draft: Tensor, sampled: Tensor, num_drafts: Tensor) -> Tensor:
    """How many leading drafts equal the target's samples: int64 [S].

    draft [S, k]; sampled [S, k + 1], the target's token for each row of the window; num_drafts [S],
    how many of the k are real. The token sampled[s, accepted[s]] is the recovered or bonus token.
    Source: Daliri, Musco & Suresh 2024 (drafter-invariant speculation).
    """
    k = draft.shape[1]
    real = torch.arange(k, device=draft.device) < num_drafts.unsqueeze(-1)
    return ((draft == sampled[:, :k]) & real).long().cumprod(dim=-1).sum(dim=-1)
