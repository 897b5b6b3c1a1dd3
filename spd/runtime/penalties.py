"""Token counts of each slot's history, and the penalties and biases that read them."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenCounts:
    """Which tokens a slot's prompt holds and how often each was generated; [S, V], on the device."""

    def __init__(self, slots: int, vocab_size: int, device: str) -> None:
        self.in_prompt = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self.generated = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)

    def admit(self, slot: int, prompt: Tensor) -> None:
        """Start a row over with the prompt [n]."""
        self.in_prompt[slot] = False
        self.in_prompt[slot, prompt] = True
        self.generated[slot] = 0

    def commit(self, tokens: Tensor, kept: Tensor) -> None:
        """Count tokens [S, n] where kept [S, n]."""
        self.generated.scatter_add_(1, tokens, kept.to(torch.int32))

    def rows(self, draft: Tensor) -> Tensor:
        """Counts for every row of a window, as if the earlier drafts [S, k] were accepted: [S, k + 1, V]."""
        k = draft.shape[1]
        counts = self.generated.unsqueeze(1).repeat(1, k + 1, 1)
        for i in range(k):
            counts[:, i + 1 :].scatter_add_(
                2, draft[:, i, None, None].expand(-1, k - i, 1), counts.new_ones(draft.shape[0], k - i, 1)
            )
        return counts


def apply_penalties(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Penalised logits [S, R, V] from counts [S, R, V], in_prompt [S, V] and one strength a slot [S].

    Repetition divides positive and multiplies negative logits of tokens seen in prompt or output
    (Keskar et al. 2019); presence and frequency subtract for generated tokens only.
    """
    seen = (counts > 0) | in_prompt.unsqueeze(1)
    strength = repetition.view(-1, 1, 1)
    repeated = torch.where(logits > 0, logits / strength, logits * strength)
    logits = torch.where(seen, repeated, logits)
    logits = logits - frequency.view(-1, 1, 1) * counts
    return logits - presence.view(-1, 1, 1) * (counts > 0)
