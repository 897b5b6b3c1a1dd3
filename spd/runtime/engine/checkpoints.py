"""Checkpoints of recurrent states: which place holds the states as of which position. No torch here.

Pages hold every position, a state only one: a sequence that finds another's pages goes on from the last
checkpoint within them. A checkpoint is found under the chained hash of the tokens before it and of what wrote
them, up to exactly its position, which no chunk contains. There are so many places; the least recently used
one is taken for another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from spd.runtime.engine.page_table import chained_hash, hash_before
from spd.runtime.round.spans import Run

INTERVAL = 4096
"""Positions of a prompt after which there is a checkpoint, whatever stands there."""


class Checkpoint(NamedTuple):
    """States as of position `end`, and what stands of its page, in one of the places."""

    place: int
    end: int
    before: bytes
    """The hash of the full pages before."""
    digest: bytes
    """Chained to it, of the rest."""


class Checkpoints:
    """Owns the numbers of `places` places; `page_size` in positions."""

    def __init__(self, places: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(places))
        self._kept: OrderedDict[bytes, Checkpoint] = OrderedDict()  # by digest, least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def _digest(self, tokens: Sequence[int], runs: Sequence[Run], before: bytes, end: int) -> bytes:
        rest = end % self.page_size
        return chained_hash(before, tokens, runs, end - rest, end) if rest else before

    def find(
        self, tokens: Sequence[int], runs: Sequence[Run], hashes: Sequence[bytes], most: int
    ) -> Checkpoint | None:
        """The last checkpoint of these tokens up to position `most`; hashes: of full pages that are there."""
        for kept in sorted(self._kept.values(), key=lambda each: -each.end):
            page = kept.end // self.page_size
            if kept.end > most or page > len(hashes) or kept.before != hash_before(hashes, page):
                continue
            if kept.digest == self._digest(tokens, runs, kept.before, kept.end):
                return kept
        return None

    def use(self, checkpoint: Checkpoint) -> int:
        """The place that it is copied from; all others are older now."""
        self._kept.move_to_end(checkpoint.digest)
        return checkpoint.place

    def keep(
        self, tokens: Sequence[int], runs: Sequence[Run], hashes: Sequence[bytes], end: int
    ) -> int | None:
        """The place to copy the states as of `end` to; None where a copy is kept already.

        hashes: of all full pages before.
        """
        before = hash_before(hashes, end // self.page_size)
        digest = self._digest(tokens, runs, before, end)
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return None
        place = self._free.pop() if self._free else self._kept.popitem(last=False)[1].place
        self._kept[digest] = Checkpoint(place, end, before, digest)
        return place

    def forget(self, place: int) -> None:
        """A copy is not going to be made: none may find it."""
        for kept in [kept for kept in self._kept.values() if kept.place == place]:
            del self._kept[kept.digest]
            self._free.append(place)
