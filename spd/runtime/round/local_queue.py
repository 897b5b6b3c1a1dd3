# mypy: disable-error-code="no-untyped-call"
"""The queue of rounds on this process's device, which runs them in order without waiting between
them.

A round's emission is copied to pinned memory on a separate stream, and read some rounds later. The
ring's `RING_DEPTH` rows separate the running round from the rounds that are read, so the host has
to read a round before it enqueues the `RING_DEPTH`-th round after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spd.kernels.round.window import BEGAN, COMMITTED, ENDED, VERIFIED
from spd.runtime.round.cpu_load import AdaptiveThreads
from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.limits import CATCH_UP_TOKENS, PAGE_SIZE, TRASH_PAGE
from spd.runtime.round.out_of_memory import is_out_of_memory, release_memory
from spd.runtime.round.prompt_scores import PromptScores, UnreadPromptScores
from spd.runtime.round.round import Logprobs, Round
from spd.runtime.round.round_queue import HostLogprobs, RoundResult, SlotAdmission
from spd.runtime.round.rows import EMPTY_SLOT, PromptPart, SlotView
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.snapshot_store import SnapshotStore
from spd.runtime.round.state import RING_DEPTH, RoundState
from spd.runtime.round.transfer import to_device

Fetched = tuple[Tensor, Tensor, Logprobs | None, Tensor | None]
"""A row of the ring, its times, log-probabilities, and next drafts int64 [S, 1 + k], their number first."""


class PendingSnapshot(NamedTuple):
    """A snapshot that is to be saved, as `SnapshotStore.save` takes it."""

    place: int
    """Where the store keeps it."""
    slot: int
    end: int
    """The position as of which the states are saved."""
    page: int
    """The partly filled page at that position; the trash page where there is none."""


class LocalPendingRound(NamedTuple):
    """A round that is enqueued and not yet read."""

    k: int
    """Drafts of a slot that it verifies."""
    draft_forwards: int
    """Forward passes of the drafting loop."""
    fetch: Callable[[], Fetched]
    """Waits until the round's results are on the host, and returns them."""
    queue: LocalRoundQueue
    """The queue that runs it, and knows when the round read before ended."""

    def read(self) -> RoundResult:
        """Wait until the round has run, and return its emission. Rounds are read in order."""
        ring, times, logprobs, drafts = self.fetch()
        marks: list[int] = times.tolist()
        began = marks[BEGAN]
        verified = marks[VERIFIED]
        committed = marks[COMMITTED]
        ended = marks[ENDED]
        if not began <= verified <= committed:  # not marked
            verified = committed
        gap = max(0, began - self.queue.last_ended) if self.queue.last_ended else 0
        self.queue.last_ended = ended
        host_logprobs = None
        if logprobs is not None:
            sampled, values, ids = logprobs
            host_logprobs = HostLogprobs(sampled.tolist(), values.tolist(), ids.tolist())
        next_drafts = None
        if drafts is not None:
            next_drafts = [row[1 : 1 + row[0]] for row in drafts.tolist()]
        seconds = (
            1e-9 * (ended - committed),
            1e-9 * (verified - began),
            1e-9 * (committed - verified),
        )
        return RoundResult(
            rows=ring.tolist(),
            logprobs=host_logprobs,
            k=self.k,
            draft_forwards=self.draft_forwards,
            next_drafts=next_drafts,
            seconds=seconds,
            gap=1e-9 * gap,
        )


class HostCopies:
    """Copies of the ring in pinned memory, made on a separate stream. CUDA only."""

    def __init__(self, state: RoundState) -> None:
        self.state = state
        self.stream = torch.cuda.Stream(device=state.device)
        self.ring = torch.empty_like(state.ring, device="cpu").pin_memory()
        self.times = torch.empty_like(state.times, device="cpu").pin_memory()

    def start(
        self, row: int, logprobs: Logprobs | None, drafts: Tensor | None
    ) -> Callable[[], Fetched]:
        """Enqueue the copy of a ring row; return a function that waits for it and returns the
        copies.

        The copy runs once everything that is enqueued so far has run.
        """
        # The log-probabilities are a graph's outputs. Its next replay overwrites them without waiting for
        # this copy, unlike `drafts`.
        sources = [tensor.clone() for tensor in logprobs or ()]
        if drafts is not None:
            sources.append(drafts)
        round_done = torch.cuda.current_stream().record_event()
        copy_done = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(round_done)
            self.ring[row].copy_(self.state.ring[row], non_blocking=True)
            self.times[row].copy_(self.state.times[row], non_blocking=True)
            targets = [
                torch.empty_like(source, device="cpu", pin_memory=True) for source in sources
            ]
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self.stream)
            copy_done.record()

        def fetch() -> Fetched:
            """Wait for the copies and return them."""
            copy_done.synchronize()
            host_logprobs = None if logprobs is None else (targets[0], targets[1], targets[2])
            host_drafts = None if drafts is None else targets[-1]
            return self.ring[row], self.times[row], host_logprobs, host_drafts

        return fetch


class LocalRoundQueue:
    """Writes slots and prompts, and runs rounds in order, captured or eager.

    With several ranks the same calls are made on each of them, in the same order: their arguments
    are plain values that do not depend on a rank.
    """

    def __init__(
        self,
        round_: Round,
        captured: CapturedRounds | None,
        snapshots: SnapshotStore,
        threads: AdaptiveThreads,
        draft_limit: int,
        *,
        is_only_rank: bool,
    ) -> None:
        """captured: captured or recorded rounds; None: every round is eager.

        draft_limit: length up to which tokens are drafted. is_only_rank: True without other ranks.
        """
        self.round = round_
        self.captured = captured
        self.snapshots = snapshots
        self.threads = threads
        self.state = round_.state
        self.runner = round_.runner
        self.sampler = round_.sampler
        self.proposer = round_.proposer
        self.draft_limit = draft_limit
        self.is_only_rank = is_only_rank
        self.host_copies = HostCopies(self.state) if self.state.device != "cpu" else None
        self.rows = list(zip(self.state.ring.unbind(), self.state.times.unbind(), strict=True))
        """The rows of the ring, with their times."""
        self.last_views = [EMPTY_SLOT] * self.state.slots
        """Each occupied slot's view in the last round that it took part in: it may sit out the next."""
        self.launched = 0
        """Rounds enqueued so far."""
        self.missing_tokens = 0
        """Upper bound of the tokens that the proposer's cache lacks, besides one round's drafts."""
        self.last_ended = 0
        """When the round read last had run, in nanoseconds by the device's clock."""
        self.scores: dict[int, UnreadPromptScores] = {}
        """Scores of the prompts that are being written, by slot, where they are requested."""
        self._prompt_ids: Tensor | None = None
        """The ids of the prompt that is being written, int64 [length]."""
        self.unwritten: list[PromptPart] = []
        """Parts of prompts that the next `flush` writes, in one pass where the kernels allow that."""
        self.unsaved: list[PendingSnapshot] = []
        """Snapshots that the next `flush` saves once these parts are written."""

    @property
    def is_writing(self) -> bool:
        """True while parts of prompts, or snapshots after them, wait to be written."""
        return bool(self.unwritten or self.unsaved)

    # -- slots -----------------------------------------------------------------------------------

    def admit(self, admission: SlotAdmission) -> None:
        """Write a slot's row; it stays inactive."""
        slot = admission.slot
        prefilled = admission.prefilled
        proposer = self.proposer
        reads_page_states = prefilled and proposer is not None and proposer.reads_target_states
        if admission.snapshot is not None or reads_page_states:
            self.flush()  # unwritten parts may write the pages that the slot starts from
        if admission.snapshot is not None:
            page = page_at(admission.pages, prefilled)
            self.snapshots.load(admission.snapshot, slot, prefilled, page)
        self.scores.pop(slot, None)
        ids = to_device(admission.tokens, torch.long, self.state.device)
        self._prompt_ids = ids
        self.state.admit(
            slot,
            ids,
            admission.length_limit,
            admission.prompt_length + admission.params.min_tokens,
            admission.stop_ids,
            self.draft_limit,
            admission.draft_max,
        )
        prompt_length = admission.prompt_length
        self.sampler.admit(slot, admission.params, ids[:prompt_length], ids[prompt_length:])
        self.runner.admit(slot, prefilled)
        if proposer is not None:
            proposer.admit(slot, prefilled, SlotView(len(ids), admission.pages))
        self.upload_pages(slot, admission.pages)

    def upload_pages(self, slot: int, pages: list[int]) -> None:
        """Write a slot's page numbers into its row of the device's page table."""
        table = self.state.page_table
        table[slot] = self.runner.page_row(pages, table.shape[1])

    def set_masks(self, slot: int, rows: Tensor, drafts: list[int], legal: int) -> None:
        """Set masks int32 [R, words] of a slot's next round, and its drafts, of which `legal` are allowed."""
        self.sampler.set_masks(slot, rows)
        if drafts:  # rounds without the slot may have overwritten them
            self.state.draft[slot, : len(drafts)] = to_device(drafts, torch.long, self.state.device)
        self.state.num_drafts[slot].fill_(legal)

    def resume(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        """Let a slot continue that a stop id has stopped; from now on it stops at these ids."""
        self.state.set_stop_ids(slot, stop_ids)
        self.missing_tokens = max(self.missing_tokens, 1)  # its last token was not fed

    def set_active(self, slot: int, active: bool) -> None:
        """Let a slot take part in rounds from the next one on, or keep it out of them."""
        self.state.set_active(slot, active)

    def retire(self, slot: int, pages: list[int], end: int, place: int | None) -> None:
        """Write what a slot's pages lack up to `end`, the drafter's too, and deactivate it.

        Its request has ended, or will be admitted again. place: where a snapshot of its recurrent
        states is saved; None: only the drafter's states at the end of a partly filled page are.
        """
        self.flush()
        self._catch_up()
        page = page_at(pages, end)
        if place is not None:
            self.snapshots.save(place, slot, end, page)
        elif page != TRASH_PAGE and self.proposer is not None:
            self.proposer.save_tail(slot, end, page)
        self.state.retire(slot)
        self.last_views[slot] = EMPTY_SLOT

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages, which may hold values that are not finite, of the target's and drafters'
        caches.
        """
        self.flush()
        self.runner.cache.zero_pages(pages)
        if self.proposer is not None:
            self.proposer.zero_pages(pages)

    def remember_text(self, ids: list[int]) -> None:
        """Add a text's token ids to the pool that prompt lookup drafts from, where there is one."""
        if self.round.lookup is not None:
            self.round.lookup.remember_text(ids)

    # -- prompts ---------------------------------------------------------------------------------

    def queue_prompt_part(
        self,
        slot: int,
        pages: list[int],
        start: int,
        end: int,
        chunked: bool,
        num_likeliest: int | None = None,
    ) -> None:
        """Write the caches of positions `start` to `end` of the prompt admitted last, at `flush` at
        latest.

        slot, pages: where that prompt was admitted. chunked: True for the program of full chunks,
        False for that of few rows. num_likeliest: how many likeliest tokens to score at each
        position, besides the prompt's token; None: no scores.
        """
        ids = self._prompt_ids
        assert ids is not None
        part = PromptPart(
            slot=slot,
            token_ids=ids[None],
            begin=start,
            end=end,
            view=SlotView(len(ids), pages),
            chunked=chunked,
        )
        rows = part.padded_rows + sum(unwritten.padded_rows for unwritten in self.unwritten)
        has_part = any(unwritten.slot == slot for unwritten in self.unwritten)
        if rows > self.runner.chunk or has_part:
            self.flush()
        self.unwritten.append(part)
        if num_likeliest is not None:
            self.scores.setdefault(slot, UnreadPromptScores(num_likeliest))

    def queue_snapshot(self, place: int, slot: int, pages: list[int], end: int) -> None:
        """Queue a snapshot of a slot's states as of position `end`, which `flush` saves to
        `place`.
        """
        self.unsaved.append(PendingSnapshot(place, slot, end, page_at(pages, end)))

    @torch.inference_mode()
    def flush(self) -> None:
        """Write all queued parts of prompts, in all caches, then save all queued snapshots.

        On a GPU this only enqueues the passes and copies.
        """
        if self.unwritten:
            outputs = self.runner.write_prompt_parts(self.unwritten)
            for part, output in zip(self.unwritten, outputs, strict=True):
                scores = self.scores.get(part.slot)
                if scores is not None:
                    scores.add_part(self.runner, part, output.hidden)
            if self.proposer is not None:
                self.proposer.prefill(self.unwritten, [output.states for output in outputs])
        for pending in self.unsaved:
            self.snapshots.save(pending.place, pending.slot, pending.end, pending.page)
        # Not before: after an exception all of it is still unwritten.
        self.unwritten = []
        self.unsaved = []

    def take_prompt_scores(self, slot: int) -> PromptScores:
        """Write what is queued, wait for the scores of a slot's prompt, and return and drop
        them.
        """
        self.flush()
        scores = self.scores.pop(slot, None)
        return UnreadPromptScores(0).fetch() if scores is None else scores.fetch()

    # -- rounds ----------------------------------------------------------------------------------

    def launch(
        self,
        k: int,
        views: Sequence[SlotView],
        needs: SamplingSteps,
        num_logprobs: int | None,
        next_k: int,
        chained: int = 0,
    ) -> LocalPendingRound:
        """Enqueue one round with the arguments of `Round.run`, after all that is still queued.

        On a CPU the round has run when this returns. Sets the number of threads before, and lets
        the proposer catch up where it drafts and its cache lacks tokens.
        """
        self.threads.adapt_thread_count()
        if self.is_writing:
            self.flush()
        proposer = self.proposer
        forwards = 0
        if proposer is not None:
            self.last_views = [
                view if view.bound else last_view
                for view, last_view in zip(views, self.last_views, strict=True)
            ]
            model_drafts = chained or self.round.count_model_drafts(next_k)
            if model_drafts:
                forwards = 1 if proposer.drafts_at_once else model_drafts
            missing = self.missing_tokens
            if model_drafts or (missing and missing + k >= CATCH_UP_TOKENS):
                self._catch_up()
            if not model_drafts:
                self.missing_tokens += 1 + (k if self.missing_tokens else 0)
        if self.captured is not None:
            shape = RoundShape(
                k=k,
                next_k=next_k,
                needs=needs,
                num_logprobs=num_logprobs,
                slots=self.captured.slots_to_run(views),
                chained=chained,
            )
            logprobs = self.captured.run(shape, views)
        else:
            logprobs = self.round.run(k, views, needs, num_logprobs, next_k, chained)
        row = self.launched % RING_DEPTH
        self.launched += 1
        drafts = None
        if needs.grammar:
            drafts = torch.cat(
                (self.state.num_drafts.unsqueeze(-1), self.state.draft[:, :next_k]), dim=1
            )
        if self.host_copies is not None:
            fetch = self.host_copies.start(row, logprobs, drafts)
            return LocalPendingRound(k, forwards, fetch, self)
        ring, times = self.rows[row]
        fetched = (ring, times, logprobs, drafts)
        return LocalPendingRound(k, forwards, lambda: fetched, self)

    @torch.inference_mode()
    def _catch_up(self) -> None:
        """Write the tokens that the proposer's cache lacks, before it drafts or its pages are
        shared.
        """
        proposer = self.proposer
        views = self.last_views
        if proposer is not None and self.missing_tokens and any(view.bound for view in views):
            proposer.catch_up(self.missing_tokens, views)
        self.missing_tokens = 0

    def capture(self, shape: RoundShape) -> bool:
        """Capture a round while nothing runs; return False if memory ran out, and all captures were
        dropped.

        With several ranks the error is raised instead, since the others do not know of it.
        """
        captured = self.captured
        assert captured is not None
        try:
            captured.capture(shape, [EMPTY_SLOT] * self.state.slots)
        except Exception as error:
            if not (self.is_only_rank and is_out_of_memory(error)):
                raise
            captured.captured.clear()
            captured.pool_graph = None
            captured.only_on_demand = True
            release_memory(error)
            return False
        return True

    def drop_enqueued(self) -> None:
        """Drop queued parts and snapshots after a round that failed, and set the device's counters
        anew.

        The next round then writes the row of the ring that will be read for it, and no program
        takes itself for the last of those that share a product.
        """
        self.runner.model.zero_counters()
        if self.proposer is not None:
            self.proposer.zero_counters()
        self.unwritten = []
        self.unsaved = []
        self.state.counter.fill_(self.launched)
        self.missing_tokens = 0

    def close(self) -> None:
        """Do nothing: this process owns all that it uses."""


def page_at(pages: Sequence[int], end: int) -> int:
    """Return the page that is partly full after `end` positions; the trash page where none is."""
    return pages[end // PAGE_SIZE] if end % PAGE_SIZE else TRASH_PAGE
