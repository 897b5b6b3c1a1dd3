"""Drafting by heads that read their target's states, with caches that share its page numbers.

Stream 0 is the target's states for its head (see `ModelOutput`); module m computes stream m + 1
from stream m. The state of stream m at position t depends on the tokens up to t. So does a module's
cache entry at position t, which is computed from token t and the state at t - 1. Both therefore
belong to the page of t and to its hash. States are stored in rings, one for each slot and stream,
so that a pass over the last tokens has all states that it needs, from whichever round. A page
stores its last states, so that a request that reuses the page can continue from there.

A draft pass runs module m over the tokens that the round may have committed and the m drafts after
them, so all entries that stay in the caches are computed from the target's states. Exactly k
forwards draft k tokens if the head has no more than k modules; after the last module, its own
states take the target's place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spd.kernels.round.window import RoundWindow, Rows
from spd.runtime.layers.base import HeadStates
from spd.runtime.proposers.base import ModelProposer
from spd.runtime.round.kv_cache import zero_rows
from spd.runtime.round.limits import state_ring_depth
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart, SlotView
from spd.runtime.round.sampler import Sampler


class HeadProposer(ModelProposer):
    """Drafts by one runner for each module, up to `limit` positions.

    An EAGLE-3 head is one module.
    """

    reads_target_states = True
    slot_attributes = (*ModelProposer.slot_attributes, "rings")

    def __init__(
        self,
        sampler: Sampler,
        runners: Sequence[ModelRunner],
        limit: int,
        *,
        has_lookup: bool = False,
    ) -> None:
        super().__init__(sampler, runners, limit, has_lookup=has_lookup)
        state = self.state
        first = runners[0]
        self.depth = state_ring_depth(first.chunk, state.max_draft, len(runners))
        hidden_size = first.model.hidden_size
        ring_shape = (state.slots, self.depth + 1, hidden_size)
        page_shape = (first.cache.num_pages, hidden_size)
        self.rings: list[Tensor] = []
        """The ring of each stream's states, [S, depth + 1, hidden]."""
        self.page_states: list[Tensor] = []
        """The last state of each page, by stream, [pages, hidden]."""
        for _ in self.runners:
            self.rings.append(torch.zeros(ring_shape, dtype=first.dtype, device=state.device))
            self.page_states.append(torch.zeros(page_shape, dtype=first.dtype, device=state.device))

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        """Load the states of position `start` - 1 from its page."""
        for ring, page_states in zip(self.rings, self.page_states, strict=True):
            ring[slot].zero_()  # the first rows read states before it, which must be finite
            if start:
                page = view.pages[(start - 1) // self.paging.page_size]
                ring[slot, (start - 1) % self.depth] = page_states[page]

    def save_tail(self, slot: int, end: int, page: int) -> None:
        """Store the states of position `end` - 1 as the last states of its page, which is not full."""
        for ring, pages in zip(self.rings, self.page_states, strict=True):
            pages[page] = ring[slot, (end - 1) % self.depth]

    def page_views(self, page: int) -> list[Tensor]:
        """Return views of a page's last states."""
        return [states[page] for states in self.page_states]

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Write the modules' cache entries from the target's states.

        A ring has room for one part's.
        """
        limit = self.paging.limit
        head_parts = [part.below(limit) for part in parts if part.begin < limit]
        stream = [
            part_states
            for part, part_states in zip(parts, states, strict=True)
            if part.begin < limit
        ]
        for module, runner in enumerate(self.runners):
            rings = []
            for part, part_states in zip(head_parts, stream, strict=True):
                rows = runner.prompt_rows(part)
                valid_states = part_states[:, : part.end - part.begin]
                ring = self._store_stream(module, valid_states, rows, part.slot)
                rings.append(HeadStates(ring, self.depth))
            stream = [output.states for output in runner.write_prompt_parts(head_parts, rings)]

    def _store_stream(
        self, stream: int, states: Tensor, rows: Rows, slot: int | None = None
    ) -> Tensor:
        """Write a stream's states [S, W, hidden] of valid rows; return the slots' rings."""
        ring = self.rings[stream] if slot is None else self.rings[stream][slot : slot + 1]
        self.kernels.keep_states(
            hidden=states,
            rows=rows,
            rings=ring,
            page_states=self.page_states[stream],
            page_size=self.paging.page_size,
        )
        return ring

    def store_target_states(self, window: RoundWindow, states: Tensor) -> None:
        """Store the target's states [S, R, hidden] of a round's rows.

        Rejected ones are overwritten.
        """
        self._store_stream(0, states, window)

    def _run_module(
        self, module: int, rows: Rows, views: Sequence[SlotView], previous: Tensor | None = None
    ) -> Tensor:
        """Return the states that a module computes of rows, and store them for the next module."""
        head_states = HeadStates(self.rings[module], self.depth)
        if previous is not None:
            head_states = HeadStates(previous, 1)
        output = self.runners[module].forward(rows, self.state.page_table, views, head_states)
        if module + 1 < len(self.runners):
            self._store_stream(module + 1, output.states, rows)
        return output.states

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages and their states, which may hold values that are not finite."""
        super().zero_pages(pages)
        for page_states in self.page_states:
            zero_rows(page_states, pages)
