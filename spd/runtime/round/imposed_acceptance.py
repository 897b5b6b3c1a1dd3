"""Acceptance imposed for measurements: the speed that a good drafter would give random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.seeded import seeded_generator

NUM_DRAWS = 8192
"""Entries of the table of draws, indexed by position, so that equal lengths have equal acceptance."""


def conditional_rate(length: float, k: int) -> float:
    """Return the probability p of accepting each next draft at which a round of k drafts commits
    `length` tokens on average: p + ... + p**k = length - 1.

    length: above 1 and up to k + 1.
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
        """length: mean tokens that a round of k drafts is to commit; see `conditional_rate`."""
        draws = torch.rand(NUM_DRAWS, generator=seeded_generator())
        self.accepts = (draws < conditional_rate(length, k)).to(device)
        """True where a draft at this position, modulo the table's size, is accepted."""

    def count_accepted(self, length: Tensor, num_drafts: Tensor, k: int) -> Tensor:
        """Return how many leading drafts of each slot to accept, int64 [S].

        length: tokens of each slot, num_drafts: its drafts, both int64 [S]. k: the most drafts.
        """
        rows = torch.arange(k, device=length.device)
        accepts = self.accepts[(length.unsqueeze(-1) + rows) % NUM_DRAWS]
        is_draft = rows < num_drafts.unsqueeze(-1)
        return (accepts & is_draft).long().cumprod(dim=-1).sum(dim=-1)
