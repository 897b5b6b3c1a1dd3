"""Logical pages and checkpoints: allocate, share by chained hash, free. No torch here.

Pages 0 and 1 are reserved: page 0 takes rows that must not be kept, page 1 stays zero and pads
gathers. A page is published under a hash of everything that decided its contents: the tokens before
it, its own tokens, and which program wrote each position. A last page that is not full is kept for one
a sequence that goes on after just what it holds: that one writes on in it, so it is never shared.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from heapq import nsmallest
from typing import NamedTuple

from spd.runtime.round.limits import NUM_RESERVED
from spd.runtime.round.spans import Run, kinds_in

ROOT = b"spd page"  # what the first page of all is chained to


class TextHashes:
    """Chained SHA-256 of what stands before positions of a text: its tokens, and what wrote each of them."""

    def __init__(
        self,
        tokens: Sequence[int],
        runs: Sequence[Run],
        page_size: int,
        known: list[bytes] | None = None,
    ) -> None:
        """known: hashes at the ends of its first full pages, to which those that are asked for are added."""
        self.tokens = tokens
        self.runs = runs
        self.page_size = page_size
        self.known = [] if known is None else known

    def before(self, end: int) -> bytes:
        """The hash of everything before position `end`."""
        page, rest = divmod(end, self.page_size)
        for start in range(len(self.known) * self.page_size, end - rest, self.page_size):
            self.known.append(self._chained(start, start + self.page_size))
        return self._chained(end - rest, end) if rest else self.known[page - 1] if page else ROOT

    def pages(self, end: int) -> list[bytes]:
        """The hash at the end of every full page within the first `end` positions."""
        count = end // self.page_size
        self.before(count * self.page_size)
        return self.known[:count]

    def _chained(self, start: int, stop: int) -> bytes:
        """Of positions `start` to `stop` of one page, and of all before."""
        state = hashlib.sha256(self.known[start // self.page_size - 1] if start else ROOT)
        state.update(",".join(map(str, self.tokens[start:stop])).encode())
        state.update(repr(kinds_in(self.runs, start, stop)).encode())
        return state.digest()


class Tail(NamedTuple):
    """A page that is not full: how many positions it holds, and their chained hash."""

    page: int
    positions: int
    digest: bytes


class PageTable:
    """Owns the page numbers of one pool: free, in use (counted), or kept for sharing."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = set(range(NUM_RESERVED, num_pages))
        self._users: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._tails: dict[bytes, Tail] = {}  # by the hash of what stands before
        self._key_of: dict[int, bytes] = {}  # in one of these two
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # published or tails, unused; oldest first

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones and idle ones, which could have been found."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, the lowest free ones: in a pool that is hardly used they are consecutive.

        Raises MemoryError when fewer are available; nothing is taken then.
        """
        if count > self.num_available:
            raise MemoryError(f"{count} pages wanted, {self.num_available} available")
        while len(self._free) < count:
            self.forget(next(iter(self._idle)))
        pages = nsmallest(count, self._free)
        self._free.difference_update(pages)
        self._users |= dict.fromkeys(pages, 1)
        return pages

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Published pages for the longest known prefix of `hashes`, taken into use."""
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
        """Let others find a used page by its hash; the first page under a hash stays the one."""
        if digest not in self._page_of and not self.is_published(page):
            self._page_of[digest] = page
            self._key_of[page] = digest

    def keep_tail(self, before: bytes, tail: Tail) -> None:
        """Keep a used page for a sequence that goes on from it; the latest of those after the same pages."""
        if self.is_published(tail.page):
            return
        if before in self._tails:
            self.forget(self._tails[before].page)
        self._tails[before] = tail
        self._key_of[tail.page] = before

    def take_tail(self, text: TextHashes, start: int, end: int) -> Tail | None:
        """The kept page that goes on at `start`, if all that it holds is the text's own, and before `end`.

        It is in use from then on, and not found again.
        """
        tail = self._tails.get(text.before(start))
        if tail is None or tail.page not in self._idle or start + tail.positions > end:
            return None
        if tail.digest != text.before(start + tail.positions):
            return None
        del self._idle[tail.page]
        self._users[tail.page] = 1
        del self._tails[self._key_of.pop(tail.page)]
        return tail

    def is_published(self, page: int) -> bool:
        """Whether others may find this page, or go on in it."""
        return page in self._key_of

    def release(self, pages: Sequence[int]) -> None:
        """Give up one use of each page; the last use frees it, or keeps it idle if published."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                del self._users[page]
                if self.is_published(page):
                    self._idle[page] = None
                else:
                    self._free.add(page)

    def forget(self, page: int) -> None:
        """Let a page be found no more, if it could be: what it was published for is not in it."""
        if (key := self._key_of.pop(page, None)) is not None:
            full = self._page_of.get(key) == page
            del (self._page_of if full else self._tails)[key]
        if page in self._idle:
            del self._idle[page]
            self._free.add(page)

    def forget_all(self) -> None:
        """Let no page be found any more."""
        for page in list(self._key_of):
            self.forget(page)


class Checkpoint(NamedTuple):
    """States as of position `end`, and what stands of its page, in one of the places."""

    place: int
    end: int
    digest: bytes  # of all that stands before `end`


class Checkpoints:
    """Owns the numbers of `places` places for recurrent states.

    Pages hold every position, a state only one: a sequence that finds another's pages goes on from the last
    checkpoint within them. It is found under the hash of everything up to exactly its position, which no
    chunk contains. The least recently used place is taken for another.
    """

    def __init__(self, places: int) -> None:
        self._free = list(range(places))
        self._kept: OrderedDict[bytes, Checkpoint] = (
            OrderedDict()
        )  # by digest, least recently used first

    def find(self, text: TextHashes, most: int) -> Checkpoint | None:
        """The last checkpoint of a text up to position `most`; all others are older now."""
        there = (kept for kept in self._kept.values() if kept.end <= most)
        for kept in sorted(there, key=lambda kept: -kept.end):
            if kept.digest == text.before(kept.end):
                self._kept.move_to_end(kept.digest)
                return kept
        return None

    def keep(self, text: TextHashes, end: int) -> int | None:
        """The place to copy the states as of `end` to; None where a copy is kept already."""
        digest = text.before(end)
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return None
        place = self._free.pop() if self._free else self._kept.popitem(last=False)[1].place
        self._kept[digest] = Checkpoint(place, end, digest)
        return place

    def forget_all(self) -> None:
        """Let none be found any more."""
        self._free += [kept.place for kept in self._kept.values()]
        self._kept.clear()
