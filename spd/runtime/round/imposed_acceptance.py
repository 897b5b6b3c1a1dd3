"""Acceptance imposed for measurements: the speed that a good drafter would give random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.seeded import seeded_generator

DRAWS = 8192
"""Entries of the table of draws, indexed by position, so that equal lengths have equal acceptance."""


def conditional_rate(length: float, k: int) -> float:
    """Return the constant probability p that one more draft is accepted: p + ... + p**k = length -
    1.

    length: mean tokens a round, above 1 and up to k + 1.
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
    """Accepts each leading draft with a fixed probability, by a table of draws on the device.

    So speed can be measured without real weights: every kernel of a round runs, and the text has no
    meaning.
    """

    def __init__(self, length: float, k: int, device: str) -> None:
        draws = torch.rand(DRAWS, generator=seeded_generator())
        self.accepts = (draws < conditional_rate(length, k)).to(device)

    def accepted(self, length: Tensor, num_drafts: Tensor, k: int) -> Tensor:
        """Return how many leading drafts to accept, int64 [S]; length and num_drafts: int64 [S]."""
        rows = torch.arange(k, device=length.device)
        accepts = self.accepts[(length.unsqueeze(-1) + rows) % DRAWS]
        is_draft = rows < num_drafts.unsqueeze(-1)
        return (accepts & is_draft).long().cumprod(dim=-1).sum(dim=-1)
