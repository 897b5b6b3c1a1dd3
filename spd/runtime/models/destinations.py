"""Tensors to allocate, each of one or several of a checkpoint's, whole or one rank's part. No torch here.

A block says of each of its tensors which rows or columns belong to a rank; what it does not speak of,
every rank holds whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spd.errors import IncompatibleError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """The part of a stored tensor that a rank takes: ranges of its rows (dim 0) or columns (dim 1)."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, tensor: Any) -> tuple[Any, ...]:
        """The ranges of a tensor, as views."""
        return tuple(tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges)


Cuts = Mapping[str, Cut]


class Rows(NamedTuple):
    """The rows that a rank takes of a matrix: ranges of a `total`."""

    total: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def below(cls, *pieces: Rows) -> Rows:
        """Those of several pieces below each other."""
        ranges = []
        first = 0
        for piece in pieces:
            ranges += [(first + start, first + stop) for start, stop in piece.ranges]
            first += piece.total
        return cls(first, tuple(ranges))

    @property
    def taken(self) -> int:
        """How many they are."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def cut(self) -> Cut | None:
        """None where all are taken."""
        return None if self.taken == self.total else Cut(0, self.ranges)


@dataclass(frozen=True)
class Shard:
    """Rank number `rank` of `size`; of the only one nothing is cut."""

    rank: int
    size: int

    def share(self, count: int, what: str) -> int:
        """How many of `count` things each rank has. Raises IncompatibleError where they cannot."""
        if count % self.size:
            why = f"{count:,} {what} cannot be divided among {self.size} ranks"
            raise IncompatibleError(why, code="tensor_parallel")
        return count // self.size

    def rows(self, *counts: int) -> Rows:
        """The rows of this rank, which has so many of each of some pieces below each other."""
        spans = ((self.size * own, ((self.rank * own, (self.rank + 1) * own),)) for own in counts)
        return Rows.below(*(Rows(*span) for span in spans))

    def columns(self, count: int) -> Cut | None:
        """The columns of this rank, which has `count`."""
        return None if self.size == 1 else Cut(1, self.rows(count).ranges)

    def of_keys(self, count: int) -> Shard:
        """The part of `count` key heads: with more ranks than key heads several ranks hold the same one."""
        shared = self.size > count and self.size % count == 0
        return Shard(self.rank * count // self.size, count) if shared else self

    def ids(self, vocab_size: int) -> tuple[int, int]:
        """The token ids of this rank: equally many, but for the last ranks, which may have fewer."""
        width = -(-vocab_size // self.size)
        return min(self.rank * width, vocab_size), min((self.rank + 1) * width, vocab_size)


WHOLE = Shard(0, 1)


class Part(NamedTuple):
    """A checkpoint's tensor, and what is taken of it: all, or a part of this shape."""

    name: str
    shape: Shape
    cut: Cut | None = None


@dataclass(frozen=True)
class Destination:
    """One tensor to allocate: the named checkpoint tensors below each other, rows counted together.

    Names stand inside the layer (`self_attn.q_proj.weight`). With `exact` it is float32 whatever the rest
    of the model is. `wide` matrices have the run's dtype whatever other matrices are kept in: what reads
    them knows no other weights.
    """

    parts: tuple[Part, ...]
    exact: bool = False
    wide: bool = False

    @classmethod
    def of(
        cls, parts: Mapping[str, Shape], *, exact: bool = False, cut: Cut | None = None
    ) -> Destination:
        """From names and shapes in order, of each the same part."""
        return cls(tuple(Part(name, shape, cut) for name, shape in parts.items()), exact)

    @property
    def shape(self) -> Shape:
        """Of the whole."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def multiplied(self) -> bool:
        """Whether it is a matrix that may be kept in eight bits, as far as its readers are concerned."""
        return len(self.shape) == 2 and not self.exact and not self.wide


def fused(
    name: str,
    block: str,
    rows: Mapping[str, int | Rows],
    columns: int,
    *,
    biased: bool = False,
    cut: Cut | None = None,
) -> dict[str, Destination]:
    """A fused matrix of projections with the given rows, and NAME_bias if there is one. cut: of columns."""
    own = {each: WHOLE.rows(n) if isinstance(n, int) else n for each, n in rows.items()}
    weight = (
        Part(f"{block}.{each}.weight", (n.taken, columns), cut or n.cut) for each, n in own.items()
    )
    found = {name: Destination(tuple(weight))}
    if biased:
        bias = (Part(f"{block}.{each}.bias", (n.taken,), n.cut) for each, n in own.items())
        found[f"{name}_bias"] = Destination(tuple(bias))
    return found


@dataclass(frozen=True)
class BlockNorms:
    """The norms of the stream around a block; a name is None where there is no norm."""

    before: str | None
    after: str | None = None
    """The norm of the block's result, before it is added to the stream."""
    after_epsilon: float | None = None
    """Its epsilon where it differs from the others'."""
    are_centred: bool = False
    """True if the checkpoint stores scales as their distance from 1, those of heads too."""

    def destinations(self, hidden_size: int) -> dict[str, Destination]:
        """Return where their scales [hidden_size] go."""
        names = {"norm": self.before, "post_norm": self.after}
        return {
            key: Destination.of({f"{name}.weight": (hidden_size,)}, exact=self.are_centred)
            for key, name in names.items()
            if name
        }


ATTENTION_NORMS = BlockNorms(before="input_layernorm")
MLP_NORMS = BlockNorms(before="post_attention_layernorm")
"""The norms of a layer's two blocks, as most families have them."""
