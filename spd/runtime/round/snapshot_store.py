"""Snapshots of what slots go on with: recurrent states, convolution inputs and pages, kept on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.proposer import Proposer


class SnapshotStore:
    """Numbered places for what goes on behind a position, of the target and of what drafts: checkpoints.

    That is the states as of it, the latest inputs of convolutions, and the page that it stands in, which is
    the trash page where it stands at the end of one. Places are in pinned memory beside a GPU, are made when
    they are first used, and are written over. Copies are enqueued in order, and nothing waits for them.
    """

    def __init__(self, runners: Sequence[ModelRunner], proposer: Proposer | None) -> None:
        self.runners = runners
        self.proposer = proposer
        self.places: dict[int, list[Tensor]] = {}

    def _parts(self, slot: int, end: int, page: int) -> Iterator[Tensor]:
        """Views of everything, in one order, of shapes that are always the same."""
        for runner in self.runners:
            yield from runner.cache.parts(slot, end, page)
        if self.proposer is not None:
            yield from self.proposer.page_parts(page)

    @torch.inference_mode()
    def save(self, place: int, slot: int, end: int, page: int) -> None:
        """Copy what a slot goes on with behind position `end`: no state may have taken in what is beyond."""
        for runner in self.runners:
            runner.settle(slot, end)
        if self.proposer is not None:
            self.proposer.leave(slot, end, page)
        parts = list(self._parts(slot, end, page))
        if place not in self.places:
            pinned = parts[0].is_cuda
            self.places[place] = [
                torch.empty_like(part, device="cpu", pin_memory=pinned) for part in parts
            ]
        for copy, part in zip(self.places[place], parts, strict=True):
            copy.copy_(part, non_blocking=True)

    @torch.inference_mode()
    def load(self, place: int, slot: int, end: int, page: int) -> None:
        """Give a slot, and a page of its own, what was saved behind position `end`."""
        for copy, part in zip(self.places[place], self._parts(slot, end, page), strict=True):
            part.copy_(copy, non_blocking=True)
