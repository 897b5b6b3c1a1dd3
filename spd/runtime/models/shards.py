"""Which part of a model one of several ranks holds. No torch here.

A block says of each of its tensors which rows or columns belong to a rank; what it does not speak of,
every rank holds whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spd.errors import IncompatibleError

LEAST_IDS = 16
"""Token ids a rank at least: fewer would not be worth a product."""


@dataclass(frozen=True)
class Cut:
    """The part of a stored tensor that a rank takes: ranges of its rows (dim 0) or columns (dim 1)."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, tensor: Any) -> tuple[Any, ...]:
        """The ranges of a tensor, as views."""
        return tuple(tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges)

    def indices(self, dim: int, size: int) -> list[int]:
        """Where the part's elements along `dim` stand in the whole, of `size`."""
        if dim != self.dim:
            return list(range(size))
        return [i for start, stop in self.ranges for i in range(start, stop)]


Cuts = Mapping[str, Cut]


@dataclass(frozen=True)
class Shard:
    """Rank number `rank` of `size`."""

    rank: int
    size: int

    def share(self, count: int, what: str) -> int:
        """How many of `count` things each rank has. Raises IncompatibleError where they cannot."""
        if count % self.size:
            raise IncompatibleError(
                f"{count:,} {what} cannot be divided among {self.size} ranks", code="tensor_parallel"
            )
        return count // self.size

    def rows(self, count: int, width: int = 1) -> Cut:
        """The rows of this rank, which has `count` things of `width` rows each."""
        return Cut(0, ((self.rank * count * width, (self.rank + 1) * count * width),))

    def columns(self, count: int) -> Cut:
        """The columns of this rank, which has `count`."""
        return Cut(1, ((self.rank * count, (self.rank + 1) * count),))

    def key_heads(self, count: int) -> tuple[int, int]:
        """The first of `count` key heads that this rank's query heads read, and how many they read.

        With more ranks than key heads several ranks hold the same one.
        """
        if self.size > count and self.size % count == 0:
            return self.rank * count // self.size, 1
        own = self.share(count, "key and value heads")
        return self.rank * own, own

    def ids(self, vocab_size: int) -> tuple[int, int]:
        """The token ids of this rank: equally many, but for the last ranks, which may have fewer."""
        if vocab_size < LEAST_IDS * self.size:
            raise IncompatibleError(
                f"{vocab_size:,} token ids are too few for {self.size} ranks", code="tensor_parallel"
            )
        width = -(-vocab_size // self.size)
        return min(self.rank * width, vocab_size), min((self.rank + 1) * width, vocab_size)
