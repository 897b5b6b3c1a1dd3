# mypy: disable-error-code="no-untyped-call"
"""The queue of rounds on this process's device: enqueued in order, and never waited for in between.

What a round emitted is copied to pinned memory on a stream of its own, and read some rounds later. A ring of
`RING_DEPTH` rows separates the round that writes from the ones being read, so the host has to read a round
before it enqueues the `RING_DEPTH`-th after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.round.window import BEGAN, COMMITTED, ENDED, VERIFIED
from spd.runtime.round.cpu_load import AdaptiveThreads
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.limits import CATCH_UP, PAGE_SIZE, TRASH_PAGE
from spd.runtime.round.out_of_memory import is_out_of_memory, release_memory
from spd.runtime.round.prompt_scores import PromptScores, ScoreRows
from spd.runtime.round.round import Logprobs, Round
from spd.runtime.round.round_queue import HostLogprobs, RoundResult, SlotAdmission
from spd.runtime.round.rows import EMPTY_SLOT, PromptPart, SlotView
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.snapshot_store import SnapshotStore
from spd.runtime.round.state import RING_DEPTH, RoundState
from spd.runtime.round.transfer import to_device

Fetched = tuple[Tensor, Tensor, Logprobs | None, Tensor | None]
"""A row of the ring, its times, log-probabilities, and next drafts int64 [S, 1 + k]: their number first."""


class LocalPendingRound(NamedTuple):
    """A round enqueued and not yet read."""

    k: int
    draft_forwards: int  # forward passes of the drafting loop
    fetch: Callable[[], Fetched]
    queue: LocalRoundQueue

    def read(self) -> RoundResult:
        """Wait until the round has run, and return what it emitted. Rounds are read in order."""
        ring, times, logprobs, drafts = self.fetch()
        marks: list[int] = times.tolist()
        began, verified, committed, ended = (marks[c] for c in (BEGAN, VERIFIED, COMMITTED, ENDED))
        verified = verified if began <= verified <= committed else committed
        gap = max(0, began - self.queue.ended) if self.queue.ended else 0
        self.queue.ended = ended
        scores = (
            None if logprobs is None else HostLogprobs(*(tensor.tolist() for tensor in logprobs))
        )
        return RoundResult(
            ring.tolist(),
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

    def start(
        self, row: int, logprobs: Logprobs | None, drafts: Tensor | None
    ) -> Callable[[], Fetched]:
        """Copy a ring row once everything enqueued so far has run; the result waits for the copy."""
        # A graph's outputs, not `drafts`, are overwritten by its next replay, which does not wait for this.
        kept = [t.clone() for t in logprobs or ()] + ([] if drafts is None else [drafts])
        ran = torch.cuda.current_stream().record_event()
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


class LocalRoundQueue:
    """Writes slots' rows and prompts, and runs rounds in order, captured or eager, with a ticket for each.

    With several ranks the calls are made on every one of them, in the same order: they take plain values,
    which may not depend on what only one rank knows.
    """

    def __init__(
        self,
        round_: Round,
        captured: CapturedRounds | None,
        states: SnapshotStore,
        threads: AdaptiveThreads,
        reach: int,
        *,
        alone: bool,
    ) -> None:
        """reach: positions up to which is drafted; alone: whether this is the only rank."""
        self.round = round_
        self.captured = captured
        self.states = states
        self.threads = threads
        self.state = round_.state
        self.runner = round_.runner
        self.sampler = round_.sampler
        self.proposer = round_.proposer
        self.reach = reach
        self.alone = alone
        self.copies = HostCopies(self.state) if self.state.device != "cpu" else None
        self.rows = list(zip(self.state.ring.unbind(), self.state.times.unbind(), strict=True))
        """Of the ring, with their times."""
        self.last_views = [EMPTY_SLOT] * self.state.slots
        """Of each occupied slot, those of the last round that it took part in: it may sit out the next."""
        self.launched = 0
        self.behind = 0
        """Tokens that the proposer's cache misses at most, beside the first missed round's drafts."""
        self.ended = (
            0  # when the round that was read last had run, in nanoseconds by the device's clock
        )
        self.scores: dict[int, ScoreRows] = {}
        """Scores of the prompts that are being written, by slot, where they are asked for."""
        self._ids: Tensor | None = None  # of the prompt that is being written: int64 [length]
        self.unwritten: list[PromptPart] = []
        """Parts of prompts that are written together, in one pass where the kernels allow that."""
        self.unsaved: list[
            tuple[int, int, int, int]
        ] = []  # what `save` is to copy once they are written

    @property
    def is_writing(self) -> bool:
        """True while parts of prompts, or checkpoints behind them, wait to be written."""
        return bool(self.unwritten or self.unsaved)

    # -- slots -----------------------------------------------------------------------------------

    def admit(self, admission: SlotAdmission) -> None:
        """Write a slot's row; it stays inactive."""
        slot = admission.slot
        prefilled = admission.prefilled
        proposer = self.proposer
        reads_kept_states = prefilled and proposer is not None and proposer.reads_target_states
        if admission.snapshot is not None or reads_kept_states:
            self.flush()  # the slot begins with what unwritten parts keep on its pages
        if admission.snapshot is not None:
            page = page_of(admission.pages, prefilled)
            self.states.load(admission.snapshot, slot, prefilled, page)
        self.scores.pop(slot, None)
        ids = to_device(admission.tokens, torch.long, self.state.device)
        self._ids = ids
        self.state.admit(
            slot,
            ids,
            admission.length_limit,
            admission.prompt_length + admission.params.min_tokens,
            admission.stop_ids,
            self.reach,
            admission.draft_max,
        )
        prompt_length = admission.prompt_length
        self.sampler.admit(slot, admission.params, ids[:prompt_length], ids[prompt_length:])
        self.runner.admit(slot, prefilled)
        if proposer is not None:
            proposer.admit(slot, prefilled, SlotView(len(ids), admission.pages))
        self.upload_pages(slot, admission.pages)

    def upload_pages(self, slot: int, pages: list[int]) -> None:
        """Upload a slot's page numbers."""
        table = self.state.page_table
        table[slot] = self.runner.page_row(pages, table.shape[1])

    def set_masks(self, slot: int, rows: Tensor, drafts: list[int], legal: int) -> None:
        """Masks int32 [R, words] for a slot's next round, and its drafts, of which `legal` are allowed."""
        self.sampler.set_masks(slot, rows)
        if drafts:  # rounds that it did not take part in may have overwritten them
            self.state.draft[slot, : len(drafts)] = to_device(drafts, torch.long, self.state.device)
        self.state.num_drafts[slot].fill_(legal)

    def resume(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        """Have a slot that a stop id has silenced stop at these from now on: it is to go on."""
        self.state.stop_at(slot, stop_ids)
        self.behind = max(self.behind, 1)  # nothing was drafted for it since

    def set_active(self, slot: int, active: bool) -> None:
        """Let a slot take part in rounds from the next one on, or keep it out of them."""
        self.state.set_active(slot, active)

    def retire(self, slot: int, pages: list[int], held: int, place: int | None) -> None:
        """Silence a slot, once its pages hold what others find there: up to position `held`.

        place: of the checkpoint that its states go to.
        """
        self.flush()
        self._catch_up()
        page = page_of(pages, held)
        if place is not None:
            self.states.save(place, slot, held, page)
        elif page != TRASH_PAGE and self.proposer is not None:
            self.proposer.leave(slot, held, page)
        self.state.retire(slot)
        self.last_views[slot] = EMPTY_SLOT

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        self.flush()
        self.runner.cache.zero_pages(pages)
        if self.proposer is not None:
            self.proposer.zero_pages(pages)

    # -- prompts ---------------------------------------------------------------------------------

    def write(
        self,
        slot: int,
        pages: list[int],
        start: int,
        end: int,
        chunked: bool,
        scored: int | None = None,
    ) -> None:
        """Write the caches of positions of the prompt that was placed last, at the latest in `flush`.

        scored: how many likeliest tokens to keep behind each position, beside the prompt's own; None: none.
        """
        assert self._ids is not None
        part = PromptPart(
            slot, self._ids[None], start, end, SlotView(len(self._ids), pages), chunked
        )
        rows = sum(each.filled for each in (*self.unwritten, part))
        if rows > self.runner.chunk or any(each.slot == slot for each in self.unwritten):
            self.flush()
        self.unwritten.append(part)
        if scored is not None:
            self.scores.setdefault(slot, ScoreRows(scored))

    def save(self, place: int, slot: int, pages: list[int], end: int) -> None:
        """Copy a slot's states as of position `end`, at the latest in `flush`, to a checkpoint's place."""
        self.unsaved.append((place, slot, end, page_of(pages, end)))

    @torch.inference_mode()
    def flush(self) -> None:
        """Enqueue what is still to be written of prompts."""
        if self.unwritten:
            outputs = self.runner.write(self.unwritten)
            for part, output in zip(self.unwritten, outputs, strict=True):
                if (scores := self.scores.get(part.slot)) is not None:
                    scores.add(self.runner, part, output.hidden)
            if self.proposer is not None:
                self.proposer.prefill(self.unwritten, [output.states for output in outputs])
        for each in self.unsaved:
            self.states.save(*each)
        # and not before: what broke off is still to be written
        self.unwritten = []
        self.unsaved = []

    def prompt_scores(self, slot: int) -> PromptScores:
        """Return, and forget, the scores of a slot's prompt; waits until they are computed."""
        self.flush()
        scores = self.scores.pop(slot, None)
        return ScoreRows(0).fetch() if scores is None else scores.fetch()

    # -- rounds ----------------------------------------------------------------------------------

    def launch(
        self,
        k: int,
        views: Sequence[SlotView],
        needs: SamplingSteps,
        num_logprobs: int | None,
        next_k: int,
    ) -> LocalPendingRound:
        """Enqueue one round; see `Round.run`."""
        self.threads.follow()
        if self.is_writing:
            self.flush()
        proposer = self.proposer
        forwards = 0
        if proposer is not None:
            known = zip(views, self.last_views, strict=True)
            self.last_views = [view if view.bound else last for view, last in known]
            keeps_up = 0 < next_k <= proposer.max_model_drafts
            forwards = next_k if keeps_up and proposer.samples_drafts else 0
            if keeps_up or (self.behind and self.behind + k >= CATCH_UP):
                self._catch_up()
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
            drafts = torch.cat(
                (self.state.num_drafts.unsqueeze(-1), self.state.draft[:, :next_k]), dim=1
            )
        if self.copies is not None:
            return LocalPendingRound(k, forwards, self.copies.start(row, logprobs, drafts), self)
        emitted = (*self.rows[row], logprobs, drafts)
        return LocalPendingRound(k, forwards, lambda: emitted, self)

    @torch.inference_mode()
    def _catch_up(self) -> None:
        """Bring the proposer's cache up, before it drafts or others may find what is on its pages."""
        proposer = self.proposer
        views = self.last_views
        if proposer is not None and self.behind and any(view.bound for view in views):
            proposer.catch_up(self.behind, views)
        self.behind = 0

    def capture(self, shape: RoundShape) -> bool:
        """Capture a round while nothing runs. False: memory ran out, and all are let go.

        Raises what was raised where other ranks would not know of that.
        """
        captured = self.captured
        assert captured is not None
        try:
            captured.capture(shape, [EMPTY_SLOT] * self.state.slots)
        except Exception as error:
            if not (self.alone and is_out_of_memory(error)):
                raise
            captured.captured.clear()
            captured.pool = None
            captured.lazily = True
            release_memory(error)
            return False
        return True

    def restart(self) -> None:
        """After a round that broke off: the next one writes the row of the ring that will be read for it."""
        self.unwritten = []
        self.unsaved = []
        self.state.counter.fill_(self.launched)
        self.behind = 0

    def close(self) -> None:
        """Let go of what is not this process's own: nothing."""


def page_of(pages: Sequence[int], held: int) -> int:
    """The page that goes on behind `held` positions; the trash page where none does."""
    return pages[held // PAGE_SIZE] if held % PAGE_SIZE else TRASH_PAGE
