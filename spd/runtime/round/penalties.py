"""Token counts of each slot's history, for the penalties that read them."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor


class TokenCounts:
    """Which tokens a slot's prompt holds and how often each was generated; [S, V], on the device."""

    def __init__(self, slots: int, vocab_size: int, device: str) -> None:
        self.in_prompt = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self.generated = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)

    def first(self, count: int) -> TokenCounts:
        """Those of the first `count` slots: parts of the same tensors."""
        part = copy(self)
        part.in_prompt, part.generated = self.in_prompt[:count], self.generated[:count]
        return part

    def admit(self, slot: int, prompt: Tensor, generated: Tensor | None = None) -> None:
        """Start a row over with the prompt [n], and what was generated [m] before it was interrupted."""
        self.in_prompt[slot] = False
        self.in_prompt[slot, prompt] = True
        self.generated[slot] = 0
        if generated is not None and generated.shape[0]:
            ones = torch.ones_like(generated, dtype=torch.int32)
            self.generated[slot].scatter_add_(0, generated, ones)
