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
    behind: int = 0,
) -> None:
    """Compute `Kernels.ngram_lookup` by torch."""
    active = state.active
    draft = state.draft
    num_drafts = state.num_drafts
    if behind:
        active = active & (state.match == 0) & (num_drafts == behind)
        columns = state.length.unsqueeze(-1) + torch.arange(behind, device=draft.device)
        state.tokens.scatter_(1, columns, draft[:, :behind])
    tokens = state.tokens[:, : max(1, bound) + behind]
    width = tokens.shape[1]
    ends = torch.arange(width, device=tokens.device)
    last = (state.length - 1 + behind).unsqueeze(-1)
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
    is_kept = keep_drafts or behind > 0
    is_replaced = (matched > 0) & active if is_kept else torch.ones_like(active)
    has_match = (matched > 0).unsqueeze(-1)
    rows = torch.arange(k - behind, device=tokens.device)
    period = torch.where(has_match, last - best, 1)
    follow = tokens.gather(1, (best + 1 + rows % period).clamp(max=width - 1))
    drafts = torch.where(has_match, follow, 0)
    draft[:, behind:k] = torch.where(is_replaced.unsqueeze(-1), drafts, draft[:, behind:k])
    num_drafts.copy_(torch.where(is_replaced, k * (matched > 0), num_drafts))
    match = -behind * (matched > 0) if behind else matched
    state.match.copy_(torch.where(active, match, state.match))
