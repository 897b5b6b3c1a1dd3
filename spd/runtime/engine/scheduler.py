"""The scheduler: which sequences run, and on which pages. No torch here.

Sequences are served in the order of their arrival. Each one waits, is prefilled, decodes and ends.
One is prefilled at a time, so that a prompt finds the pages that the one before it wrote. Where
pages run short the latest to arrive is preempted: it goes back to the head of the queue, keeps its
tokens, and its cache is written again by the same programs. So the first of all is never preempted.
"""

from __future__ import annotations

from collections import abc, deque
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from spd.errors import UsageError
from spd.runtime.engine.page_table import ROOT, PageTable, SnapshotPool, Tail, TextHashes
from spd.runtime.engine.sequence import NO_SLOT, Sequence
from spd.runtime.round.spans import ProgramRun, reusable_prefix, runs_below

if TYPE_CHECKING:
    from spd.runtime.round.round_queue import PendingRound

IDLE_PASSES = 16
"""Prefill passes of a step, at most, where no sequence decodes when it begins."""
BUSY_PASSES = 4
"""Prefill passes of a step, at most, while more sequences wait than decode."""
SNAPSHOT_INTERVAL = 4096
"""A prefill saves a snapshot of the recurrent states at every multiple of so many positions."""


class EnqueuedRound(NamedTuple):
    """A round in flight: enqueued, and not yet read."""

    pending: PendingRound
    sequences: abc.Sequence[Sequence]
    pages: list[int]
    """Pages released since it was enqueued. The round may still touch them.

    They are free afterwards.
    """
    drafted_k: int = 0
    """Drafts a slot that were drafted for it; a grammar may have added to those of some slots."""


class Scheduler:
    """Owns the waiting queue, the slots, and the pages of each sequence.

    `page_size` is in positions, `block` in pages: a sequence grows by whole blocks while there are
    enough pages. A sequence of `ctx` positions must fit into the pool alone. Models with recurrent
    states reuse a prefix from `snapshots` only.
    """

    def __init__(
        self,
        slots: int,
        pages: PageTable,
        page_size: int,
        block: int,
        ctx: int,
        *,
        shares_prefixes: bool,
        snapshots: SnapshotPool | None = None,
        root: bytes = ROOT,
    ) -> None:
        """block: pages of a full block of attention. ctx: positions of the longest sequence.

        shares_prefixes: True if sequences may begin with pages that others wrote. root: the hash of
        all texts before their first position.
        """
        self.waiting: deque[Sequence] = deque()
        self.slots: list[Sequence | None] = [None] * slots
        self.pages = pages
        self.page_size = page_size
        self.block = block
        self.ctx = ctx
        self.shares_prefixes = shares_prefixes
        self.snapshots = snapshots
        self.root = root
        self.prefilling: Sequence | None = None
        self.by_id: dict[str, Sequence] = {}
        """Waiting and running sequences, by the ids of their requests."""
        self._epoch = 0
        """The number of the latest stay in a slot; each stay has its own."""
        self.in_flight: deque[EnqueuedRound] = deque()  # oldest first

    # -- the queue -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises UsageError if its request id waits or runs already."""
        request_id = sequence.request.id
        if request_id in self.by_id:
            raise UsageError(f"request id {request_id!r} is already running")
        self.by_id[request_id] = sequence
        self.waiting.append(sequence)

    def running(self) -> list[Sequence]:
        """Return the sequences in slots, in slot order."""
        return [sequence for sequence in self.slots if sequence is not None]

    def decoding(self) -> list[Sequence]:
        """Return the sequences that take part in the next round, in slot order."""
        return [sequence for sequence in self.slots if sequence is not None and sequence.is_active]

    @property
    def has_decoding(self) -> bool:
        """True if a sequence has its prompt written, whose decoding each prefill pass delays."""
        return any(occupant not in (None, self.prefilling) for occupant in self.slots)

    @property
    def more_could_join(self) -> bool:
        """True if more sequences could begin to decode than decode now."""
        prefilling = self.prefilling is not None
        free = self.slots.count(None)
        return min(len(self.waiting), free) + prefilling > len(self.slots) - free - prefilling

    # -- prefill ---------------------------------------------------------------------------------

    def take_next_to_prefill(self, lookahead: int) -> Sequence | None:
        """Return the sequence whose prompt is written next; None where there is none.

        That is the one being prefilled, or else the first of the queue, which is given a slot and
        pages for all its tokens and `lookahead` more, if there are so many.
        """
        if self.prefilling is None and self.waiting:
            sequence = self.waiting[0]
            if None in self.slots and self._take_pages(sequence, lookahead):
                self.waiting.popleft()
                self._epoch += 1
                sequence.slot = self.slots.index(None)
                sequence.epoch = self._epoch
                sequence.is_admitted = False
                self.slots[sequence.slot] = self.prefilling = sequence
        return self.prefilling

    def _text_hashes(self, sequence: Sequence) -> TextHashes:
        """Return the hashes of a sequence's text; those of full pages are kept in the sequence."""
        return TextHashes(
            sequence.tokens(),
            self.prefill_runs(sequence),
            self.page_size,
            sequence.page_hashes,
            self.root,
        )

    def _take_pages(self, sequence: Sequence, lookahead: int) -> bool:
        """Give a sequence published pages for its cached prefix, and new pages for the remaining
        tokens.

        Returns False, with no page taken, if too few are available.
        """
        size = self.page_size
        end = sequence.prefill_end
        text = self._text_hashes(sequence)
        snapshots = self.snapshots
        sharing = self.shares_prefixes and not sequence.scores_prompt
        shared = self.pages.match_prefix(text.page_hashes(end)) if sharing else []
        matched = len(shared) * size
        cached = self._uncut_prefix(text.runs, matched)
        stops = {cached, end}
        snapshot = None
        tail = None
        if snapshots is not None:
            chunks_end = max((run.end for run in text.runs if run.kind == "chunk"), default=0)
            stops.add(chunks_end)
            # Looked up to mark it as used: a longer prompt may have no other snapshot to start from.
            snapshots.find_latest(text, chunks_end)
            snapshot = (
                snapshots.find_latest(text, min(end, matched + size - 1)) if sharing else None
            )
            cached = 0 if snapshot is None else snapshot.end // size * size
        self.pages.release(shared[cached // size :])
        sequence.pages = shared[: cached // size]
        if snapshots is None and sharing:
            tail = self.pages.take_tail(text, cached, end)
            if tail is not None:
                sequence.pages.append(tail.page)
        if not self.grow(sequence, sequence.length + lookahead):
            if tail is not None:
                self.pages.store_tail(text.prefix_hash(cached), tail)
            self.pages.release(sequence.pages[::-1])
            sequence.pages = []
            return False
        sequence.prefilled = cached + (0 if tail is None else tail.num_positions)
        if snapshots is not None:
            sequence.snapshot = None if snapshot is None else snapshot.place
            sequence.prefilled = 0 if snapshot is None else snapshot.end
            sequence.snapshot_stops = self._snapshot_stops(sequence, stops)
        return True

    def _uncut_prefix(self, runs: abc.Sequence[ProgramRun], matched: int) -> int:
        """Return the longest prefix of `matched` positions whose end cuts neither a page nor a
        chunk.

        The chunks of a later span may start inside a page.
        """
        cached = matched
        while True:
            uncut = reusable_prefix(runs, cached) // self.page_size * self.page_size
            if uncut >= cached:
                return cached
            cached = uncut

    def _snapshot_stops(self, sequence: Sequence, ends: set[int]) -> tuple[int, ...]:
        """Return where a prefill pauses for a snapshot: at `ends` and at the ends of messages.

        A message ends where two prompt spans meet, with no generated turn between them, as after
        the system message.
        """
        position = 0
        for (kind, length), (following, _) in pairwise(sequence.request.spans):
            position += length
            if kind == following == "prompt":
                ends.add(position)
        return tuple(
            sorted(end for end in ends if sequence.prefilled < end <= sequence.prefill_end)
        )

    def reserve_due_snapshot(self, sequence: Sequence, start: int) -> int | None:
        """Reserve and return the place for a snapshot at the end of the positions written from
        `start` on; None if none is due there.
        """
        end = sequence.prefilled
        crosses_interval = end // SNAPSHOT_INTERVAL > start // SNAPSHOT_INTERVAL
        is_due = end > start and (end in sequence.snapshot_stops or crosses_interval)
        return self.reserve_snapshot_place(sequence, end) if is_due else None

    def reserve_snapshot_place(self, sequence: Sequence, end: int) -> int | None:
        """Reserve and return the place to copy a sequence's states as of `end` to.

        None where the model has no states, or a copy of these is stored already.
        """
        if self.snapshots is None or not end:
            return None
        return self.snapshots.reserve_place(self._text_hashes(sequence), end)

    def prefill_runs(self, sequence: Sequence) -> list[ProgramRun]:
        """Return which program writes, or wrote, each position of a prefill.

        After the prompt it is tiles.
        """
        return runs_below(sequence.runs, sequence.prefill_end)

    def mark_written(self, sequence: Sequence, end: int) -> None:
        """Record that the cache is enqueued to be written up to `end`, and publish the full pages.

        At the end of the prompt the sequence stops being the one that is prefilled.
        """
        first = sequence.prefilled // self.page_size
        sequence.prefilled = end
        last = end // self.page_size
        hashes = sequence.page_hashes if self.shares_prefixes else []
        for page, digest in zip(sequence.pages[first:last], hashes[first:last], strict=False):
            self.pages.publish(page, digest)
        if end == sequence.prefill_end:
            self.prefilling = None

    def invalidate_cache(self) -> None:
        """Unpublish every page and drop every snapshot, after a write that failed at an unknown
        place.
        """
        self.pages.unpublish_all()
        if self.snapshots is not None:
            self.snapshots.clear()

    # -- pages -----------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, positions: int) -> bool:
        """Allocate pages until a sequence has room for `positions` positions.

        Returns False, with nothing allocated, if there are too few.
        """
        required = -(-min(positions, self.ctx) // self.page_size)
        missing = required - len(sequence.pages)
        if missing <= 0:
            return True
        count = -(-required // self.block) * self.block - len(sequence.pages)  # to a full block
        if count > self.pages.num_available:
            count = missing
        if count > self.pages.num_available:
            return False
        sequence.pages += self.pages.allocate(count)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slot and pages, and send it back to the head of the queue.

        No round with it may be in flight.
        """
        assert not sequence.in_flight
        self._vacate_slot(sequence, publish=True)
        sequence.slot = NO_SLOT
        sequence.prefilled = 0
        sequence.page_hashes = []
        sequence.metrics.preemptions += 1
        self.waiting.appendleft(sequence)

    def retire(self, sequence: Sequence) -> list[int]:
        """Remove an ended sequence from its slot or the queue, and release its pages.

        After an "error" none of them is published: the pages that no other sequence shares are
        returned, for the caller to zero.
        """
        del self.by_id[sequence.request.id]
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
            return []
        failed = sequence.finish_reason == "error"
        private_pages = []
        if failed:
            private_pages = [page for page in sequence.pages if not self.pages.is_published(page)]
        self._vacate_slot(sequence, publish=not failed)
        return private_pages

    def _vacate_slot(self, sequence: Sequence, *, publish: bool) -> None:
        """Free a sequence's slot, and its pages once no round in flight can touch them.

        publish: True if the pages of committed tokens are published, and the tail is stored.
        """
        if publish and self.shares_prefixes and sequence is not self.prefilling:
            text = self._text_hashes(sequence)
            end = sequence.prefill_end
            for page, digest in zip(sequence.pages, text.page_hashes(end), strict=False):
                self.pages.publish(page, digest)
            tail_positions = end % self.page_size
            if tail_positions and self.snapshots is None:
                tail_page = sequence.pages[end // self.page_size]
                tail = Tail(tail_page, tail_positions, text.prefix_hash(end))
                self.pages.store_tail(text.prefix_hash(end - tail_positions), tail)
        if sequence is self.prefilling:
            self.prefilling = None
        sequence.is_active = False
        # Last page first: later pages of a chain are useless without the earlier ones.
        pages = sequence.pages[::-1]
        sequence.pages = []
        self.slots[sequence.slot] = None
        if self.in_flight:
            self.in_flight[-1].pages.extend(pages)
        else:
            self.pages.release(pages)

    def release_oldest_round(self) -> None:
        """Drop the oldest round in flight, which has run or failed, and release its pages."""
        self.pages.release(self.in_flight.popleft().pages)
