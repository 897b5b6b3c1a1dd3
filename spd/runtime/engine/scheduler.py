"""Which sequences run, on which pages: first come, first served; the last to come gives way. No torch here.

A sequence waits, is prefilled (one at a time, so that a prompt finds what the one before it wrote),
decodes, and ends. Where pages run short the latest to arrive goes back to the head of the line; its
tokens stay, and its cache is written again by the same programs. So the first of all always goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Listed
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from spd.errors import UsageError
from spd.runtime.engine.page_table import Checkpoints, PageTable, Tail, TextHashes
from spd.runtime.engine.sequence import NO_SLOT, Sequence
from spd.runtime.round.spans import Run, reusable_prefix, runs_below

if TYPE_CHECKING:
    from spd.runtime.round.round_queue import PendingRound

INTERVAL = 4096  # positions of a prompt after which there is a checkpoint, whatever stands there


class EnqueuedRound(NamedTuple):
    """A round on its way: enqueued, and not yet read."""

    ticket: PendingRound
    sequences: Listed[Sequence]
    pages: list[
        int
    ]  # given up since it was enqueued: it may touch them, and they are free afterwards


class Scheduler:
    """Owns the waiting line, the slots, and which sequence holds which pages.

    `page_size` in positions, `block` in pages: a sequence grows by whole blocks while there are enough.
    A sequence that holds `ctx` positions must fit into the pool alone. Models that keep states go on from
    `checkpoints` only.
    """

    def __init__(
        self,
        slots: int,
        pages: PageTable,
        page_size: int,
        block: int,
        ctx: int,
        *,
        sharing: bool,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.slots: list[Sequence | None] = [None] * slots
        self.pages = pages
        self.page_size = page_size
        self.block = block
        self.ctx = ctx
        self.sharing = sharing
        self.checkpoints = checkpoints
        self.prefilling: Sequence | None = None
        self.by_id: dict[str, Sequence] = {}  # waiting and running ones, by their requests' ids
        self._epoch = 0  # of the latest stay in a slot: no other has the same
        self.in_flight: deque[EnqueuedRound] = deque()  # oldest first

    # -- the line --------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; ids are unique among waiting and running ones."""
        name = sequence.request.id
        if name in self.by_id:
            raise UsageError(f"request id {name!r} is already running")
        self.by_id[name] = sequence
        self.waiting.append(sequence)

    def running(self) -> list[Sequence]:
        """Sequences in slots, in slot order."""
        return [sequence for sequence in self.slots if sequence is not None]

    def decoding(self) -> list[Sequence]:
        """Sequences that take part in the next round, in slot order."""
        return [sequence for sequence in self.slots if sequence is not None and sequence.active]

    @property
    def busy(self) -> bool:
        """Whether a prompt is written already: a sequence that waits while another is prefilled stalls."""
        return any(occupant not in (None, self.prefilling) for occupant in self.slots)

    @property
    def more_could_join(self) -> bool:
        """Whether more would decode if their prompts were written than decode now."""
        written = self.prefilling is not None
        free = self.slots.count(None)
        return min(len(self.waiting), free) + written > len(self.slots) - free - written

    # -- prefill ---------------------------------------------------------------------------------

    def next_to_prefill(self, lookahead: int) -> Sequence | None:
        """The sequence whose cache is being written: the one at work, or the first of the line.

        The latter only with a free slot and pages for all its tokens and `lookahead` more.
        """
        if self.prefilling is None and self.waiting:
            sequence = self.waiting[0]
            if None in self.slots and self._take_pages(sequence, lookahead):
                self.waiting.popleft()
                self._epoch += 1
                sequence.slot = self.slots.index(None)
                sequence.epoch = self._epoch
                sequence.placed = False
                self.slots[sequence.slot] = self.prefilling = sequence
        return self.prefilling

    def _text(self, sequence: Sequence) -> TextHashes:
        return TextHashes(
            sequence.tokens(), self.prefill_runs(sequence), self.page_size, sequence.hashes
        )

    def _take_pages(self, sequence: Sequence, lookahead: int) -> bool:
        """Shared pages for what is known of its tokens, own ones for the rest; nothing if too few."""
        size = self.page_size
        end = sequence.prefill_end
        text = self._text(sequence)
        kept = self.checkpoints
        sharing = self.sharing and not sequence.scores_prompt
        shared = self.pages.match(text.pages(end)) if sharing else []
        found = cached = len(shared) * size
        # Back to where neither a page nor a chunk is cut: a later span's chunks may start inside a page.
        while (whole := reusable_prefix(text.runs, cached) // size * size) < cached:
            cached = whole
        stops = {cached, end}
        checkpoint = None
        tail = None
        if kept is not None:
            stops.add(
                whole := max((run.end for run in text.runs if run.kind == "chunk"), default=0)
            )
            kept.find(text, whole)  # it stays, for a longer prompt may have no other to go on from
            checkpoint = kept.find(text, min(end, found + size - 1)) if sharing else None
            cached = 0 if checkpoint is None else checkpoint.end // size * size
        self.pages.release(shared[cached // size :])
        sequence.pages = shared[: cached // size]
        if (
            kept is None
            and sharing
            and (tail := self.pages.take_tail(text, cached, end)) is not None
        ):
            sequence.pages.append(tail.page)
        if not self.grow(sequence, sequence.length + lookahead):
            if tail is not None:
                self.pages.keep_tail(text.before(cached), tail)
            self.pages.release(sequence.pages[::-1])
            sequence.pages = []
            return False
        sequence.prefilled = cached + (0 if tail is None else tail.positions)
        if kept is not None:
            sequence.checkpoint, sequence.prefilled = checkpoint[:2] if checkpoint else (None, 0)
            sequence.stops = self._stops(sequence, stops)
        return True

    def _stops(self, sequence: Sequence, ends: set[int]) -> tuple[int, ...]:
        """Where a prefill pauses for a checkpoint: at these ends and at that of a message.

        A message ends where two parts of the prompt meet that no turn has generated, as the system's does.
        """
        position = 0
        for (kind, length), (following, _) in pairwise(sequence.request.spans):
            position += length
            if kind == following == "prompt":
                ends.add(position)
        return tuple(
            sorted(end for end in ends if sequence.prefilled < end <= sequence.prefill_end)
        )

    def due(self, sequence: Sequence, start: int) -> int | None:
        """The place for a checkpoint at the end of what was written from `start` on; None if none is due."""
        end = sequence.prefilled
        is_due = end > start and (end in sequence.stops or end // INTERVAL > start // INTERVAL)
        return self.checkpoint(sequence, end) if is_due else None

    def checkpoint(self, sequence: Sequence, end: int) -> int | None:
        """The place to copy its states as of `end` to; None where none are kept, or these already."""
        if self.checkpoints is None or not end:
            return None
        return self.checkpoints.keep(self._text(sequence), end)

    def prefill_runs(self, sequence: Sequence) -> list[Run]:
        """Which program writes, or wrote, which position that a prefill covers: tiles, after the prompt."""
        return runs_below(sequence.runs, sequence.prefill_end)

    def wrote(self, sequence: Sequence, end: int) -> None:
        """Its cache is to be written up to position `end`; full pages are there for others from now on."""
        first = sequence.prefilled // self.page_size
        sequence.prefilled = end
        last = end // self.page_size
        hashes = sequence.hashes if self.sharing else []
        for page, digest in zip(sequence.pages[first:last], hashes[first:last], strict=False):
            self.pages.publish(page, digest)
        if end == sequence.prefill_end:
            self.prefilling = None

    def forget(self) -> None:
        """Writing broke off, and where is not known: no page and no checkpoint is found any more."""
        self.pages.forget_all()
        if self.checkpoints is not None:
            self.checkpoints.forget_all()

    # -- pages -----------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, positions: int) -> bool:
        """Give a sequence pages for `positions` positions; False, and nothing given, if there are too few."""
        exact = -(-min(positions, self.ctx) // self.page_size)
        missing = exact - len(sequence.pages)
        if missing <= 0:
            return True
        whole = -(-exact // self.block) * self.block - len(sequence.pages)
        wanted = whole if whole <= self.pages.num_available else missing
        if wanted > self.pages.num_available:
            return False
        sequence.pages += self.pages.allocate(wanted)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Send a sequence back to the head of the line. No round with it may be on its way."""
        assert not sequence.in_flight
        self._vacate(sequence, publish=True)
        sequence.slot = NO_SLOT
        sequence.prefilled = 0
        sequence.hashes = []
        sequence.metrics.preemptions += 1
        self.waiting.appendleft(sequence)

    def retire(self, sequence: Sequence) -> list[int]:
        """End a sequence. An "error" shares nothing: its own pages are returned, for the caller to clear."""
        del self.by_id[sequence.request.id]
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
            return []
        failed = sequence.finish_reason == "error"
        own = (
            [page for page in sequence.pages if not self.pages.is_published(page)] if failed else []
        )
        self._vacate(sequence, publish=not failed)
        return own

    def _vacate(self, sequence: Sequence, *, publish: bool) -> None:
        """Free a slot and its pages; publish those that hold committed tokens only."""
        if publish and self.sharing and sequence is not self.prefilling:
            text = self._text(sequence)
            end = sequence.prefill_end
            for page, digest in zip(sequence.pages, text.pages(end), strict=False):
                self.pages.publish(page, digest)
            if (held := end % self.page_size) and self.checkpoints is None:
                last = Tail(sequence.pages[end // self.page_size], held, text.before(end))
                self.pages.keep_tail(text.before(end - held), last)
        if sequence is self.prefilling:
            self.prefilling = None
        sequence.active = False
        # Last page first: the end of a chain is of no use without its beginning.
        pages, sequence.pages = sequence.pages[::-1], []
        self.slots[sequence.slot] = None
        if self.in_flight:
            self.in_flight[-1].pages.extend(pages)
        else:
            self.pages.release(pages)

    def finish_round(self) -> None:
        """The oldest round on its way has run, or broke off: it touches no page any more."""
        self.pages.release(self.in_flight.popleft().pages)
