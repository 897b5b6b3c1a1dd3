"""Slots as the scheduler sees them: sequences in, calls of the device side out."""

from __future__ import annotations

from collections.abc import Sequence as Listed

import torch
from torch import Tensor

from spd.runtime.device_side import DeviceSide
from spd.runtime.grammar import mask_width
from spd.runtime.plan import EnginePlan
from spd.runtime.rows import EMPTY_SLOT, SlotView
from spd.runtime.sequence import Sequence
from spd.runtime.spans import Run


def free_rows(rows: int, vocab_size: int) -> Tensor:
    """Masks on the host that allow everything: int32 [rows, words]."""
    return torch.full((rows, mask_width(vocab_size)), -1, dtype=torch.int32)


class Slots:
    """Writes slots' rows as the scheduler decides; everything is enqueued, nothing is waited for."""

    def __init__(self, device: DeviceSide, plan: EnginePlan) -> None:
        self.device, self.parts, self.plan = device, device.parts, plan

    def place(self, sequence: Sequence) -> None:
        """Write the row of a sequence that was given a slot; it stays silent until it is prefilled."""
        sequence.placed = True
        self.device.place(
            sequence.slot,
            sequence.tokens(),
            len(sequence.request.prompt_ids),
            sequence.request.params,
            sequence.length_limit,
            sequence.stop_ids,
            sequence.request.draft_max,
            sequence.prefilled,
            sequence.pages,
            bool(sequence.prepared),
        )

    def show_pages(self, sequence: Sequence) -> None:
        """Upload a sequence's page numbers."""
        self.device.show_pages(sequence.slot, sequence.pages)

    def prefill(self, sequence: Sequence, runs: Listed[Run]) -> int:
        """Enqueue the next pass over the prompt, at most one chunk; returns where it ended."""
        start, end = sequence.prefilled, sequence.prefill_end
        run = next((run for run in runs if run.start <= start < run.end), None)
        if run is None:
            return end
        rows = self.plan.chunk if run.kind == "chunk" else self.parts.runner.tail_rows
        stop = min(start + rows, run.end)
        self.device.write(sequence.slot, SlotView(sequence.length, sequence.pages), start, stop, runs)
        return stop

    def passes(self, rows: int) -> float:
        """What writing so many rows of one prompt takes: a pass, or a part of one that others share."""
        return rows / self.plan.chunk if self.parts.runner.merges else float(rows > 0)

    def arm(self, sequence: Sequence, drafts: Listed[int] = ()) -> None:
        """Let a slot take part from the next round on, with masks for its drafts where a grammar wants them.

        Raises GrammarError for a grammar that cannot go on.
        """
        if sequence.grammar is not None:
            rows = free_rows(len(drafts) + 1, self.parts.sampler.vocab_size)
            legal = sequence.grammar.masks(drafts, rows)
            # Where drafts are tested by their probability the one that a mask forbids has to fail its test:
            # cut away unseen, it would count as a block that came to a fair end.
            legal = legal if self.plan.verify == "coupled" else len(drafts)
            self.device.allow(sequence.slot, rows, list(drafts), legal)
        sequence.active = True
        self.device.set_active(sequence.slot, True)

    def silence(self, sequence: Sequence) -> None:
        """Keep a slot out of rounds until it is armed again."""
        sequence.active = False
        self.device.set_active(sequence.slot, False)

    def vacate(self, sequence: Sequence, running: Listed[Sequence]) -> None:
        """Silence a slot of those running, once its pages hold what others will find there."""
        views = [EMPTY_SLOT] * self.plan.slots
        for other in running:
            views[other.slot] = SlotView(other.bound, other.pages)
        self.device.retire(sequence.slot, views, sequence.prefill_end)
