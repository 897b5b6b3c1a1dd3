"""Acceptance imposed for measurements: the speed of a drafter that random weights do not have."""

from __future__ import annotations

import torch
from torch import Tensor

DRAWS = 8192
"""Uniform draws, looked up by position: the same acceptance for the same text lengths."""


def conditional_rate(length: float, k: int) -> float:
    """Return the constant chance p that one more draft is accepted: p + ... + p**k = length - 1.

    length: tokens a round on average, above 1 and up to k + 1.
    """
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        accepted = sum(middle**i for i in range(1, k + 1))
        if accepted < length - 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class ImposedAcceptance:
    """Accepts each leading draft with one fixed chance, by a table of draws on the device.

    Speed is measured so without real weights: every kernel of a round runs, and the text means nothing.
    """

    def __init__(self, length: float, k: int, device: str) -> None:
        draws = torch.rand(DRAWS, generator=torch.Generator().manual_seed(0))
        self.accepts = (draws < conditional_rate(length, k)).to(device)

    def accepted(self, length: Tensor, num_drafts: Tensor, k: int) -> Tensor:
        """How many leading drafts to accept: int64 [S], for slots at length [S] with num_drafts [S]."""
        rows = torch.arange(k, device=length.device)
        chosen = self.accepts[(length.unsqueeze(-1) + rows) % DRAWS]
        real = rows < num_drafts.unsqueeze(-1)
        return (chosen & real).long().cumprod(dim=-1).sum(dim=-1)
