"""Logical pages and snapshots: allocation, sharing by chained hash, release. No torch here.

Pages 0 and 1 are reserved: page 0 takes rows that must not be kept, page 1 stays zero and pads
gathers. A full page is published under a hash of everything that decided its contents: the tokens
before it, its own tokens, and the program that wrote each position. A last page that is not full, a
tail, is stored for one sequence that continues after exactly its positions: that sequence writes
into it, so it is never shared.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from heapq import nsmallest
from typing import NamedTuple

from spd.runtime.round.limits import NUM_RESERVED_PAGES
from spd.runtime.round.spans import ProgramRun, kinds_in

ROOT = b"spd page"
"""The hash before the first position; the form of a page's entries stands behind it."""


class TextHashes:
    """Chained SHA-256 hashes of a text's prefixes: their tokens, and the program that wrote each."""

    def __init__(
        self,
        tokens: Sequence[int],
        runs: Sequence[ProgramRun],
        page_size: int,
        computed: list[bytes] | None = None,
        root: bytes = ROOT,
    ) -> None:
        """computed: hashes at the ends of the first full pages.

        Further ones are appended in place. root: see `ROOT`.
        """
        self.tokens = tokens
        self.runs = runs
        self.page_size = page_size
        self.root = root
        self.computed = [] if computed is None else computed

    def prefix_hash(self, end: int) -> bytes:
        """Return the hash of everything before position `end`."""
        page, tail_positions = divmod(end, self.page_size)
        full_end = end - tail_positions
        for start in range(len(self.computed) * self.page_size, full_end, self.page_size):
            self.computed.append(self._chained_hash(start, start + self.page_size))
        if tail_positions:
            return self._chained_hash(full_end, end)
        return self.computed[page - 1] if page else self.root

    def page_hashes(self, end: int) -> list[bytes]:
        """Return the hash at the end of every full page within the first `end` positions, in
        order.
        """
        count = end // self.page_size
        self.prefix_hash(count * self.page_size)
        return self.computed[:count]

    def _chained_hash(self, start: int, stop: int) -> bytes:
        """Return the hash of a page's positions from its first, `start`, to `stop`.

        It is chained to the previous page's hash, which `computed` must hold.
        """
        state = hashlib.sha256(self.computed[start // self.page_size - 1] if start else self.root)
        state.update(",".join(map(str, self.tokens[start:stop])).encode())
        state.update(repr(kinds_in(self.runs, start, stop)).encode())
        return state.digest()


class Tail(NamedTuple):
    """A page that is not full, the number of its positions, and the hash of the text up to their end."""

    page: int
    num_positions: int
    digest: bytes


class PageTable:
    """Owns the page numbers of one pool: free, in use (counted), or idle and published."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = set(range(NUM_RESERVED_PAGES, num_pages))
        self._users: dict[int, int] = {}
        """Uses of each page that is in use."""
        self._page_of: dict[bytes, int] = {}
        """Published full pages, by hash."""
        self._tails: dict[bytes, Tail] = {}
        """Stored tails, by the hash of the text before them."""
        self._key_of: dict[int, bytes] = {}
        """The key of each page in one of these two."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published pages and tails that are not in use, the oldest first."""

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free ones, and idle ones, which are then unpublished."""
        return len(self._free) + len(self._idle)

    @property
    def num_usable(self) -> int:
        """Pages that are not reserved."""
        return self.num_pages - NUM_RESERVED_PAGES

    @property
    def num_used(self) -> int:
        """Pages that sequences use."""
        return self.num_usable - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages, the lowest free ones: in a pool with few uses they are consecutive.

        Raises MemoryError if fewer are available; nothing is allocated then.
        """
        if count > self.num_available:
            raise MemoryError(f"{count} pages wanted, {self.num_available} available")
        while len(self._free) < count:
            self.unpublish(next(iter(self._idle)))
        pages = nsmallest(count, self._free)
        self._free.difference_update(pages)
        self._users |= dict.fromkeys(pages, 1)
        return pages

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the published pages of the longest prefix of `hashes`, and count a use of each."""
        pages: list[int] = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._users[page] = self._users.get(page, 0) + 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Publish a page in use under a hash, unless another page has that hash already."""
        if digest not in self._page_of and not self.is_published(page):
            self._page_of[digest] = page
            self._key_of[page] = digest

    def store_tail(self, prefix_hash: bytes, tail: Tail) -> None:
        """Store a page in use for a sequence that continues from it, in place of an earlier tail.

        prefix_hash: the hash of the text before the page.
        """
        if self.is_published(tail.page):
            return
        if prefix_hash in self._tails:
            self.unpublish(self._tails[prefix_hash].page)
        self._tails[prefix_hash] = tail
        self._key_of[tail.page] = prefix_hash

    def take_tail(self, text: TextHashes, start: int, end: int) -> Tail | None:
        """Return the stored tail at `start` if all its positions are the text's, and before `end`.

        The page is then in use and no longer stored.
        """
        tail = self._tails.get(text.prefix_hash(start))
        if tail is None or tail.page not in self._idle or start + tail.num_positions > end:
            return None
        if tail.digest != text.prefix_hash(start + tail.num_positions):
            return None
        del self._idle[tail.page]
        self._users[tail.page] = 1
        del self._tails[self._key_of.pop(tail.page)]
        return tail

    def is_published(self, page: int) -> bool:
        """True if this page is published or a stored tail."""
        return page in self._key_of

    def release(self, pages: Sequence[int]) -> None:
        """Give up one use of each page; without a use it is free, or idle if published."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                del self._users[page]
                if self.is_published(page):
                    self._idle[page] = None
                else:
                    self._free.add(page)

    def unpublish(self, page: int) -> None:
        """Remove a page from the published pages and the tails; an idle one becomes free."""
        key = self._key_of.pop(page, None)
        if key is not None:
            is_full = self._page_of.get(key) == page
            del (self._page_of if is_full else self._tails)[key]
        if page in self._idle:
            del self._idle[page]
            self._free.add(page)

    def unpublish_all(self) -> None:
        """Remove all pages from the published ones and the tails; idle ones become free."""
        for page in list(self._key_of):
            self.unpublish(page)


class StateSnapshot(NamedTuple):
    """Recurrent states as of position `end`, with its page up to there, in one place of the store."""

    place: int
    end: int
    digest: bytes
    """The hash of the text before `end`."""


class SnapshotPool:
    """Owns the numbers of `places` places for snapshots of recurrent states.

    Pages hold every position, a state only one: a sequence that finds another's pages starts from
    the last snapshot within them. A snapshot is found under the hash of everything before its
    position, which no chunk contains. The place that was used least recently is reused first.
    """

    def __init__(self, places: int) -> None:
        self._free = list(range(places))
        self._snapshots: OrderedDict[bytes, StateSnapshot] = OrderedDict()
        """By digest, the least recently used first."""

    def find_latest(self, text: TextHashes, limit: int) -> StateSnapshot | None:
        """Return a text's last snapshot up to position `limit`, and mark it as the latest used;
        None where there is none.
        """
        candidates = [snapshot for snapshot in self._snapshots.values() if snapshot.end <= limit]
        for snapshot in sorted(candidates, key=lambda snapshot: -snapshot.end):
            if snapshot.digest == text.prefix_hash(snapshot.end):
                self._snapshots.move_to_end(snapshot.digest)
                return snapshot
        return None

    def reserve_place(self, text: TextHashes, end: int) -> int | None:
        """Register a snapshot of the states as of `end`, and return the place to copy them to.

        The least recently used snapshot gives way. None where these states are stored already.
        """
        digest = text.prefix_hash(end)
        if digest in self._snapshots:
            self._snapshots.move_to_end(digest)
            return None
        if self._free:
            place = self._free.pop()
        else:
            _, oldest = self._snapshots.popitem(last=False)
            place = oldest.place
        self._snapshots[digest] = StateSnapshot(place, end, digest)
        return place

    def clear(self) -> None:
        """Drop all snapshots."""
        self._free += [snapshot.place for snapshot in self._snapshots.values()]
        self._snapshots.clear()
