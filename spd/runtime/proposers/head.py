"""What drafting by heads that read their target's states has in common; caches share its page numbers.

Stream 0 is what the target makes for its head (see `ModelOutput`); module m makes stream m + 1 of stream m.
The state of stream m at position t depends on tokens up to t, as does a module's cache entry in slot t,
made of token t and the state at t - 1: both belong to the page of t, and go with its hash. States stand in
rings, one a slot and stream, so that a pass over the last tokens finds what it needs however many rounds
ago it was made; a page keeps its last states, so that a request that finds it can go on from there.

A draft pass runs module m over the tokens that the round may have committed and the m drafts after them:
what stays in the caches was made of the target's states. Exactly k forwards draft k tokens where the head
has no more modules than that; beyond the last module its own states go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spd.kernels.round.window import RoundWindow, Rows
from spd.runtime.layers.base import HeadStates
from spd.runtime.proposers.base import ArbitratedLookup, ModelProposer
from spd.runtime.round.kv_cache import zero_rows
from spd.runtime.round.limits import state_depth
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart, SlotView
from spd.runtime.round.sampler import Sampler


class HeadProposer(ModelProposer):
    """Drafts with one runner a module; `limit` positions at most. An EAGLE-3 head is one module."""

    reads_target_states = True
    slot_attributes = (*ModelProposer.slot_attributes, "rings")

    def __init__(
        self,
        sampler: Sampler,
        runners: Sequence[ModelRunner],
        limit: int,
        beside: ArbitratedLookup | None = None,
    ) -> None:
        super().__init__(sampler, runners, limit, beside)
        state = self.state
        first = runners[0]
        self.depth = state_depth(first.chunk, state.max_draft, len(runners))
        ring = (state.slots, self.depth + 1, first.model.hidden_size)
        page = (first.cache.num_pages, first.model.hidden_size)
        self.rings, self.page_states = (
            [torch.zeros(shape, dtype=first.dtype, device=state.device) for _ in self.runners]
            for shape in (ring, page)
        )

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        """Take the states at the end of what a slot begins with: positions up to `start`."""
        for ring, pages in zip(self.rings, self.page_states, strict=True):
            ring[slot].zero_()  # rows before the first pair read something, which must be finite
            if start:
                ring[slot, (start - 1) % self.depth] = pages[
                    view.pages[(start - 1) // self.paging.page_size]
                ]

    def leave(self, slot: int, end: int, page: int) -> None:
        """Keep the states at the end of a page that is not full beside it, as full ones have theirs."""
        for ring, pages in zip(self.rings, self.page_states, strict=True):
            pages[page] = ring[slot, (end - 1) % self.depth]

    def page_parts(self, page: int) -> list[Tensor]:
        """A page's last states."""
        return [states[page] for states in self.page_states]

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Write the modules' entries from the target's states; a ring has room for those of a part."""
        own = [part.below(self.paging.limit) for part in parts if part.begin < self.paging.limit]
        made = [
            seen for part, seen in zip(parts, states, strict=True) if part.begin < self.paging.limit
        ]
        for module, runner in enumerate(self.runners):
            rings = []
            for part, seen in zip(own, made, strict=True):
                rows = runner.prompt_rows(part)
                ring = self._keep(module, seen[:, : part.end - part.begin], rows, part.slot)
                rings.append(HeadStates(ring, self.depth))
            made = [output.states for output in runner.write(own, rings)]

    def _keep(self, stream: int, states: Tensor, rows: Rows, slot: int | None = None) -> Tensor:
        """Write a stream's states [S, W, hidden] of valid rows; returns the slots' rings."""
        ring = self.rings[stream] if slot is None else self.rings[stream][slot : slot + 1]
        self.kernels.keep_states(
            states, rows, ring, self.page_states[stream], self.paging.page_size
        )
        return ring

    def capture(self, window: RoundWindow, states: Tensor) -> None:
        """Keep the target's states [S, R, hidden] of a round's rows; rejected ones are overwritten."""
        self._keep(0, states, window)

    def _run(
        self, module: int, rows: Rows, views: Sequence[SlotView], made: Tensor | None = None
    ) -> Tensor:
        """The states that a module makes of rows; the next module reads them, or the last one itself."""
        rings = HeadStates(self.rings[module], self.depth) if made is None else HeadStates(made, 1)
        states = self.runners[module].forward(rows, self.state.page_table, views, rings).states
        if module + 1 < len(self.runners):
            self._keep(module + 1, states, rows)
        return states

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages, and their states, that may hold values that are not finite."""
        super().zero_pages(pages)
        for page_states in self.page_states:
            zero_rows(page_states, pages)
