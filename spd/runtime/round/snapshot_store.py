"""Snapshots of slots on the host: recurrent states, convolution inputs and the last page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.proposer import Proposer


class SnapshotStore:
    """Snapshots by place number, each with all that the target and the drafter need at one
    position.

    That is the states as of the position, the latest inputs of convolutions, and the position's
    page (the trash page where the position is the end of a page). With a GPU they are in pinned
    memory. A place is allocated when it is first used, and then overwritten. Copies are enqueued in
    order, and nothing waits for them.
    """

    def __init__(self, runners: Sequence[ModelRunner], proposer: Proposer | None) -> None:
        self.runners = runners
        self.proposer = proposer
        self.places: dict[int, list[Tensor]] = {}

    def _views(self, slot: int, end: int, page: int) -> Iterator[Tensor]:
        """Yield views of all that a snapshot contains, always in one order and of the same shapes."""
        for runner in self.runners:
            yield from runner.cache.continuation_views(slot, end, page)
        if self.proposer is not None:
            yield from self.proposer.page_views(page)

    @torch.inference_mode()
    def save(self, place: int, slot: int, end: int, page: int) -> None:
        """Bring a slot's states to position `end` and enqueue their copy to the host at `place`.

        page: the partly filled page at that position; the trash page where there is none. No state
        may include tokens beyond `end`.
        """
        for runner in self.runners:
            runner.settle(slot, end)
        if self.proposer is not None:
            self.proposer.save_tail(slot, end, page)
        views = list(self._views(slot, end, page))
        if place not in self.places:
            pinned = views[0].is_cuda
            self.places[place] = [
                torch.empty_like(view, device="cpu", pin_memory=pinned) for view in views
            ]
        for host_copy, view in zip(self.places[place], views, strict=True):
            host_copy.copy_(view, non_blocking=True)

    @torch.inference_mode()
    def load(self, place: int, slot: int, end: int, page: int) -> None:
        """Enqueue the copy of the snapshot at `place`, as of position `end`, into a slot and a
        page.
        """
        for host_copy, view in zip(self.places[place], self._views(slot, end, page), strict=True):
            view.copy_(host_copy, non_blocking=True)
