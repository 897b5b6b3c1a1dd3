"""The round's state: static tensors, one row a slot, owned by the device.

The host writes a row when it admits or retires a request; between that, only the round does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.runtime.page_table import ZERO_PAGE
from spd.runtime.request import MAX_STOP_IDS

NUM_STOP_IDS = MAX_STOP_IDS + 8


class RoundState:
    """Static tensors of S slots; every field's first dimension is the slot."""

    def __init__(self, slots: int, max_len: int, max_draft: int, pages: int, device: str) -> None:
        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full((slots, *shape), fill, dtype=torch.long, device=device)

        self.slots, self.max_len, self.max_draft, self.device = slots, max_len, max_draft, device
        self.tokens = integers(max_len + max_draft + 1)
        self.length = integers(fill=1)
        self.prompt_length = integers(fill=1)
        self.length_limit = integers(fill=1)
        self.min_length = integers()
        self.draft = integers(max(1, max_draft))
        self.num_drafts = integers()
        self.draft_limit = integers(fill=max_len)
        self.page_table = integers(pages, fill=ZERO_PAGE)
        self.stop_ids = integers(NUM_STOP_IDS, fill=-1)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)

    def admit(
        self,
        slot: int,
        prompt: Tensor,
        length_limit: int,
        min_length: int,
        stop_ids: list[int],
        draft_limit: int,
    ) -> None:
        """Write a row: prompt int64 [n]; length_limit and min_length are absolute lengths."""
        count = prompt.shape[0]
        self.tokens[slot, :count] = prompt
        self.length[slot] = count
        self.prompt_length[slot] = count
        self.length_limit[slot] = length_limit
        self.min_length[slot] = min_length
        self.num_drafts[slot] = 0
        self.draft_limit[slot] = draft_limit
        self.stop_ids[slot] = -1
        if stop_ids:
            self.stop_ids[slot, : len(stop_ids)] = torch.tensor(stop_ids, device=self.device)
        self.active[slot] = True

    def retire(self, slot: int) -> None:
        """Silence a slot: its rows are masked from the next round on."""
        self.active[slot] = False
        self.num_drafts[slot] = 0

    def is_stop(self, tokens: Tensor) -> Tensor:
        """Whether tokens [S, n] are among their slot's stop ids."""
        return (tokens.unsqueeze(-1) == self.stop_ids.unsqueeze(1)).any(dim=-1)
