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
from copy import copy

import torch
from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.round.window import DraftWindow, Places, RoundWindow
from spd.runtime.layers.base import HeadStates
from spd.runtime.proposers.base import Proposer
from spd.runtime.round.kv_cache import zero_rows
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart, Rows, SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.state import RoundState


class HeadProposer(Proposer):
    """Drafts with one runner a module; `limit` positions at most. An EAGLE-3 head is one module."""

    captures = True
    draws = True
    forwards_a_draft = 1

    def __init__(
        self,
        method: str,
        state: RoundState,
        kernels: Kernels,
        runners: Sequence[ModelRunner],
        sampler: Sampler,
        limit: int,
        depth: int,
    ) -> None:
        self.method = method
        self.state, self.kernels, self.sampler, self.limit = state, kernels, sampler, limit
        self.runners, self.depth = list(runners), depth
        first = self.runners[0]
        self.page_size = first.cache.page_size
        self.places = Places(self.page_size, limit, first.trash_slot)
        ring = (state.slots, depth + 1, first.model.hidden_size)
        page = (first.cache.num_pages, first.model.hidden_size)
        self.rings, self.page_states = (
            [torch.zeros(shape, dtype=first.dtype, device=state.device) for _ in self.runners]
            for shape in (ring, page)
        )

    def first(self, state: RoundState, sampler: Sampler) -> HeadProposer:
        """See `Proposer`: its rings are a slot's own."""
        part = copy(self)
        part.state, part.sampler, part.rings = state, sampler, [ring[: state.slots] for ring in self.rings]
        return part

    # -- prompts -----------------------------------------------------------------------------------

    def admit(self, slot: int, start: int, view: SlotView) -> None:
        """Take the states at the end of what a slot begins with: positions up to `start`."""
        for ring, pages in zip(self.rings, self.page_states, strict=True):
            ring[slot].zero_()  # rows before the first pair read something, which must be finite
            if start:
                ring[slot, (start - 1) % self.depth] = pages[view.pages[(start - 1) // self.page_size]]

    def leave(self, slot: int, end: int, page: int) -> None:
        """Keep the states at the end of a page that is not full beside it, as full ones have theirs."""
        for ring, pages in zip(self.rings, self.page_states, strict=True):
            pages[page] = ring[slot, (end - 1) % self.depth]

    def prefill(self, parts: Sequence[PromptPart], states: Sequence[Tensor]) -> None:
        """Write the modules' entries from the target's states; a ring has room for those of a part."""
        own = [part.below(self.limit) for part in parts if part.begin < self.limit]
        made = [seen for part, seen in zip(parts, states, strict=True) if part.begin < self.limit]
        for module, runner in enumerate(self.runners):
            rings = []
            for part, seen in zip(own, made, strict=True):
                rows = runner.prompt_rows(
                    part.token_ids, part.begin, part.end, runner.page_table_of(part.view)
                )
                ring = self._keep(module, seen[:, : part.end - part.begin], rows, part.slot)
                rings.append(HeadStates(ring, self.depth))
            made = runner.write(own, rings)

    def _keep(self, stream: int, states: Tensor, rows: Rows, slot: int | None = None) -> Tensor:
        """Write a stream's states [S, W, hidden] of valid rows; returns the slots' rings."""
        ring = self.rings[stream] if slot is None else self.rings[stream][slot : slot + 1]
        self.kernels.keep_states(states, rows, ring, self.page_states[stream], self.page_size)
        return ring

    # -- rounds ------------------------------------------------------------------------------------

    def capture(self, window: RoundWindow, states: Tensor) -> None:
        """Keep the target's states [S, R, hidden] of a round's rows; rejected ones are overwritten."""
        self._keep(0, states, window)

    def _window(self, width: int, ahead: int, slots: Tensor) -> DraftWindow:
        """The last `width` committed tokens of slots bool [S], from where the prefill ended, and drafts."""
        first = self.state.prompt_length - 1
        rows: DraftWindow = self.kernels.committed_window(self.state, width, slots, self.places, first, ahead)
        return rows

    def _run(self, module: int, rows: DraftWindow, views: Sequence[SlotView]) -> Tensor:
        """States [S, W, hidden] that a module makes of rows, kept for the next module's."""
        states = HeadStates(self.rings[module], self.depth)
        made = self.runners[module].forward(rows, self.state.page_table, views, states).states
        if module + 1 < len(self.runners):
            self._keep(module + 1, made, rows)
        return made

    def catch_up(self, tokens: int, views: Sequence[SlotView]) -> None:
        """Write the entries of all that was committed, the first round's drafts among it."""
        rows = self._window(tokens + self.state.max_draft + 1, 0, self.state.occupied)
        for module in range(len(self.runners)):
            self._run(module, rows, views)

    def draft(self, k: int, window: RoundWindow, views: Sequence[SlotView], needs: SamplerClass) -> None:
        """Propose k tokens a slot: a module each, then the last one again with its own states."""
        # After the prefill the last prompt token is fed too, though the round committed one token only.
        width, took_part = max(2, window.draft.shape[1] + 1), window.valid[:, 0].contiguous()
        following: Rows | None = None
        made = torch.empty(0)
        for step in range(max(k, len(self.runners))):
            if step < len(self.runners):
                made = self._run(step, self._window(width, step, took_part), views)[:, -1:]
            else:
                assert following is not None
                runner = self.runners[-1]
                made = runner.forward(following, self.state.page_table, views, HeadStates(made, 1)).states
            if step < k:
                following = self._propose(step, made, k, needs)

    def _propose(self, step: int, states: Tensor, k: int, needs: SamplerClass) -> Rows:
        """Draw one draft from states [S, 1, hidden]; returns the row that would draw the next."""
        drawn = self.sampler.draw_draft(self.runners[min(step, len(self.runners) - 1)], states, step, needs)
        rows: Rows = self.kernels.draft_step(self.state, drawn, step, k, self.places)
        return rows

    def clear(self, pages: list[int]) -> None:
        """Zero pages, and their states, that may hold values that are not finite."""
        for runner, page_states in zip(self.runners, self.page_states, strict=True):
            runner.cache.clear(pages)
            zero_rows(page_states, pages)
