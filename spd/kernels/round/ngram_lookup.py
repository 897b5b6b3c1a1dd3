"""Prompt lookup: propose what followed the longest earlier occurrence of the current suffix."""

from __future__ import annotations

import torch

from spd.kernels.round.window import RoundTensors


def ngram_lookup(
    state: RoundTensors,
    k: int,
    ngram_min: int,
    ngram_max: int,
    bound: int,
    keep_drafts: bool = False,
) -> None:
    """Compute `Kernels.ngram_lookup` by torch."""
    active = state.active
    draft = state.draft
    num_drafts = state.num_drafts
    tokens = state.tokens[:, : max(1, bound)]
    width = tokens.shape[1]
    ends = torch.arange(width, device=tokens.device)
    last = (state.length - 1).unsqueeze(-1)
    matching = (ends < last) & active.unsqueeze(-1)
    suffix = torch.zeros_like(tokens)
    for back in range(min(ngram_max, width)):
        current = tokens.gather(1, (last - back).clamp(0, width - 1))
        shifted = (
            tokens if back == 0 else torch.nn.functional.pad(tokens, (back, 0), value=-1)[:, :width]
        )
        matching = matching & (shifted == current)
        suffix += matching
    # The longest suffix first, then the most recent end: one number orders both.
    best = (suffix * (width + 1) + ends).argmax(dim=-1, keepdim=True)
    matched = suffix.gather(1, best).squeeze(-1)
    matched = torch.where(matched >= ngram_min, matched, 0)
    is_replaced = (matched > 0) & active if keep_drafts else torch.ones_like(active)
    has_match = (matched > 0).unsqueeze(-1)
    rows = torch.arange(k, device=tokens.device)
    period = torch.where(has_match, last - best, 1)
    follow = tokens.gather(1, (best + 1 + rows % period).clamp(max=width - 1))
    drafts = torch.where(has_match, follow, 0)
    draft[:, :k] = torch.where(is_replaced.unsqueeze(-1), drafts, draft[:, :k])
    num_drafts.copy_(torch.where(is_replaced, k * (matched > 0), num_drafts))
    state.match.copy_(torch.where(active, matched, state.match))
