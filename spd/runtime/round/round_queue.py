# mypy: disable-error-code="no-untyped-call"
"""Rounds on their way: enqueued by the host, read some rounds later, never waited for in between.

What a round emitted is copied to pinned memory on a stream of its own. A ring of `RING_DEPTH` rows
separates the round that writes from the ones being read, so the host has to read a round before it
enqueues the `RING_DEPTH`-th after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.round.commit import first_sample
from spd.kernels.round.window import BEGAN, COMMITTED, ENDED, VERIFIED
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.limits import CATCH_UP
from spd.runtime.round.round import Logprobs, Round
from spd.runtime.round.rows import EMPTY_SLOT, SlotView
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.state import RING_DEPTH, RoundState

Fetched = tuple[Tensor, Tensor, Logprobs | None, Tensor | None]
"""A row of the ring, its times, log-probabilities, and next drafts int64 [S, 1 + k]: their number first."""


@dataclass(frozen=True)
class HostLogprobs:
    """Log-probabilities in host values: of the samples [S][R]; the likeliest, values and ids [S][R][N]."""

    own: list[list[float]]
    values: list[list[list[float]]]
    ids: list[list[list[int]]]


class RoundResult(NamedTuple):
    """What one round emitted, in host values."""

    rows: list[list[int]]
    """Of the ring, one a slot; see `read_emission`."""
    first_sample: int
    """The column of those rows where the samples begin."""
    logprobs: HostLogprobs | None
    k: int
    draft_forwards: int
    next_drafts: list[list[int]] | None
    """What each slot's drafter proposed for the round after, where that was asked for."""
    seconds: tuple[float, float, float]
    """Draft, verify, rest, by the device's clock; a GPU counts sampling as verification."""
    gap: float
    """Seconds without a round before it, by the same clock; 0 for the first."""


class Ticket(NamedTuple):
    """A round enqueued and not yet read."""

    k: int
    draft_forwards: int
    """Forward passes of the drafting loop."""
    fetch: Callable[[], Fetched]
    queue: RoundQueue

    def read(self) -> RoundResult:
        """Wait until the round has run, and return what it emitted. Rounds are read in order."""
        ring, times, logprobs, drafts = self.fetch()
        marks: list[int] = times.tolist()
        began, verified, committed, ended = (marks[c] for c in (BEGAN, VERIFIED, COMMITTED, ENDED))
        verified = verified if began <= verified <= committed else committed
        gap = max(0, began - self.queue.ended) if self.queue.ended else 0
        self.queue.ended = ended
        scores = None if logprobs is None else HostLogprobs(*(tensor.tolist() for tensor in logprobs))
        return RoundResult(
            ring.tolist(),
            first_sample(ring.shape[1]),
            scores,
            self.k,
            self.draft_forwards,
            None if drafts is None else [row[1 : 1 + row[0]] for row in drafts.tolist()],
            (1e-9 * (ended - committed), 1e-9 * (verified - began), 1e-9 * (committed - verified)),
            1e-9 * gap,
        )


class HostCopies:
    """Copies of the ring in pinned memory, made on a stream of their own. CUDA only."""

    def __init__(self, state: RoundState) -> None:
        self.state = state
        self.stream = torch.cuda.Stream(device=state.device)
        self.ring = torch.empty_like(state.ring, device="cpu").pin_memory()
        self.times = torch.empty_like(state.times, device="cpu").pin_memory()

    def start(self, row: int, logprobs: Logprobs | None, drafts: Tensor | None) -> Callable[[], Fetched]:
        """Copy a ring row once everything enqueued so far has run; the result waits for the copy.

        `drafts` is not written again.
        """
        # A graph's outputs are overwritten by its next replay, which does not wait for this stream.
        kept = [t.clone() for t in logprobs or ()] + ([] if drafts is None else [drafts])
        ran = torch.cuda.Event()
        ran.record()
        copied = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ran)
            self.ring[row].copy_(self.state.ring[row], non_blocking=True)
            self.times[row].copy_(self.state.times[row], non_blocking=True)
            on_host = [torch.empty_like(t, device="cpu", pin_memory=True) for t in kept]
            for source, target in zip(kept, on_host, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self.stream)
            copied.record()

        def fetch() -> Fetched:
            copied.synchronize()
            scores = None if logprobs is None else (on_host[0], on_host[1], on_host[2])
            return self.ring[row], self.times[row], scores, None if drafts is None else on_host[-1]

        return fetch


class RoundQueue:
    """Runs rounds in order, captured or eager, and hands out a ticket for each."""

    def __init__(self, round_: Round, captured: CapturedRounds | None) -> None:
        self.round, self.captured = round_, captured
        self.state = round_.state
        self.copies = HostCopies(self.state) if self.state.device != "cpu" else None
        self.rows = list(zip(self.state.ring.unbind(), self.state.times.unbind(), strict=True))
        """Of the ring, with their times."""
        self.last_views = [EMPTY_SLOT] * self.state.slots
        """Of each occupied slot, those of the last round that it took part in: it may sit out the next."""
        self.launched = 0
        self.behind = 0
        """Tokens that the proposer's cache misses at most, beside the first missed round's drafts."""
        self.ended = 0
        """When the round that was read last had run, in nanoseconds by the device's clock."""

    def restart(self) -> None:
        """After a round that broke off: the next one writes the row of the ring that will be read for it."""
        self.state.counter.fill_(self.launched)
        self.behind = 0

    def catch_up(self, views: Sequence[SlotView]) -> None:
        """Bring the proposer's cache up, before others may find what is on its pages."""
        self._remember(views)
        proposer, views = self.round.proposer, self.last_views
        if proposer is not None and self.behind and any(view.bound for view in views):
            with torch.inference_mode():
                proposer.catch_up(self.behind, views)
        self.behind = 0

    def _remember(self, views: Sequence[SlotView]) -> None:
        """Take the views of all slots that have some."""
        known = zip(views, self.last_views, strict=True)
        self.last_views = [view if view.bound else last for view, last in known]

    def launch(
        self, k: int, views: Sequence[SlotView], needs: SamplerClass, num_logprobs: int | None, next_k: int
    ) -> Ticket:
        """Enqueue one round; see `Round.run`."""
        proposer, forwards = self.round.proposer, 0
        if proposer is not None:
            self._remember(views)
            keeps_up = proposer.keeps_up(next_k)
            forwards = next_k if keeps_up and proposer.draws else 0
            if keeps_up or (self.behind and self.behind + k >= CATCH_UP):
                self.catch_up(views)
            if not keeps_up:
                self.behind += 1 + (k if self.behind else 0)
        if self.captured is not None:
            shape = RoundShape(k, next_k, needs, num_logprobs, self.captured.slots_for(views))
            logprobs = self.captured.run(shape, views)
        else:
            logprobs = self.round.run(k, views, needs, num_logprobs, next_k)
        row = self.launched % RING_DEPTH
        self.launched += 1
        drafts = None
        if needs.grammar:
            state = self.state
            drafts = torch.cat((state.num_drafts.unsqueeze(-1), state.draft[:, :next_k]), dim=1)
        if self.copies is not None:
            return Ticket(k, forwards, self.copies.start(row, logprobs, drafts), self)
        emitted = (*self.rows[row], logprobs, drafts)
        return Ticket(k, forwards, lambda: emitted, self)
