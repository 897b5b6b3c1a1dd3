"""The device side of a slot: its row of the state, its prompt's cache, its page table."""

from __future__ import annotations

from collections.abc import Sequence as Listed

import torch
from torch import Tensor

from spd.runtime.assembly import Assembly
from spd.runtime.grammar import mask_width
from spd.runtime.memory import CATCH_UP, TAIL_ROWS
from spd.runtime.model_runner import SlotView
from spd.runtime.plan import EnginePlan
from spd.runtime.sequence import Sequence
from spd.runtime.spans import Run, extend_tile
from spd.runtime.transfer import to_device


def free_rows(rows: int, vocab_size: int) -> Tensor:
    """Masks on the host that allow everything: int32 [rows, words]."""
    return torch.full((rows, mask_width(vocab_size)), -1, dtype=torch.int32)


class Slots:
    """Writes slots' rows as the scheduler decides; everything is enqueued, nothing is waited for."""

    def __init__(self, parts: Assembly, plan: EnginePlan) -> None:
        self.parts, self.plan = parts, plan
        self._ids: Tensor | None = None
        """Of the sequence that is being prefilled: int64 [length]."""

    def place(self, sequence: Sequence) -> None:
        """Write the row of a sequence that was given a slot; it stays silent until it is prefilled."""
        params, state = sequence.request.params, self.parts.state
        sequence.placed = True
        self._ids = to_device(sequence.tokens(), torch.long, self.plan.device)
        prompt = len(sequence.request.prompt_ids)
        state.admit(
            sequence.slot,
            self._ids,
            sequence.length_limit,
            prompt + params.min_tokens,
            sequence.stop_ids,
            self.plan.draft_ctx,
            sequence.request.draft_max,
            active=False,
        )
        self.parts.sampler.admit(sequence.slot, params, self._ids[:prompt], self._ids[prompt:])
        if self.parts.proposer is not None:
            view = SlotView(sequence.length, sequence.pages)
            self.parts.proposer.admit(sequence.slot, sequence.prefilled, view)
        self.show_pages(sequence)

    def show_pages(self, sequence: Sequence) -> None:
        """Upload a sequence's page numbers."""
        table = self.parts.state.page_table
        table[sequence.slot] = self.parts.runner.page_row(sequence.pages, table.shape[1])

    @torch.inference_mode()
    def prefill(self, sequence: Sequence, runs: Listed[Run]) -> int:
        """Enqueue the next pass over the prompt, at most one chunk; returns where it ended."""
        start, end = sequence.prefilled, sequence.prefill_end
        run = next((run for run in runs if run.start <= start < run.end), None)
        if run is None:
            return end
        assert self._ids is not None
        rows = self.plan.chunk if run.kind == "chunk" else TAIL_ROWS[self.plan.kernels]
        stop = min(start + rows, run.end)
        self._write(sequence, self._ids[None], start, stop, runs)
        return stop

    @torch.inference_mode()
    def refill_draft(self, sequence: Sequence, positions: int) -> None:
        """Write the drafter's cache of the last committed positions again, which it missed.

        Who captures states keeps those of silent slots too, and has missed nothing.
        """
        proposer, end = self.parts.proposer, sequence.prefill_end
        start = max(len(sequence.request.prompt_ids), end - positions)
        if proposer is None or proposer.captures or start >= end:
            return
        ids = to_device(sequence.tokens(), torch.long, self.plan.device)
        runs = extend_tile(sequence.runs, end)
        view = SlotView(sequence.length, sequence.pages)
        proposer.prefill(sequence.slot, ids[None], start, end, runs, view, ())

    def _write(self, sequence: Sequence, ids: Tensor, start: int, end: int, runs: Listed[Run]) -> None:
        view = SlotView(sequence.length, sequence.pages)
        hidden = self.parts.runner.prefill(ids, start, end, runs, view)
        if self.parts.proposer is not None:
            self.parts.proposer.prefill(sequence.slot, ids, start, end, runs, view, hidden)

    def arm(self, sequence: Sequence, drafts: Listed[int] = ()) -> None:
        """Let a slot take part from the next round on, with masks for its drafts where a grammar wants them.

        Raises GrammarError for a grammar that cannot go on.
        """
        if sequence.grammar is not None:
            state, slot = self.parts.state, sequence.slot
            rows = free_rows(len(drafts) + 1, self.parts.sampler.vocab_size)
            legal = sequence.grammar.masks(drafts, rows)
            self.parts.sampler.allow(slot, rows)
            if drafts:  # rounds that it did not take part in may have overwritten them
                state.draft[slot, : len(drafts)] = to_device(drafts, torch.long, self.plan.device)
            # Where drafts are tested by their probability the one that a mask forbids has to fail its test:
            # cut away unseen, it would count as a block that came to a fair end.
            state.num_drafts[slot].fill_(legal if self.plan.verify == "coupled" else len(drafts))
            if sequence.caught_up < self.parts.queue.catch_ups:
                self.refill_draft(sequence, CATCH_UP + 1)
        sequence.active = True
        self.parts.state.set_active(sequence.slot, True)

    def silence(self, sequence: Sequence) -> None:
        """Keep a slot out of rounds until it is armed again."""
        sequence.active = False
        sequence.caught_up = self.parts.queue.catch_ups
        self.parts.state.set_active(sequence.slot, False)

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        self.parts.runner.cache.clear(pages)
        if self.parts.proposer is not None:
            self.parts.proposer.clear(pages)
