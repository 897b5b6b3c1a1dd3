"""Descriptions of the tensors to allocate, and of the checkpoint tensors that fill each.

No torch here.

A block describes which rows or columns of its tensors belong to a rank; all other tensors are whole
on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from spd.errors import IncompatibleError
from spd.formats.names import EMBEDDING, HEAD

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """The part of a stored tensor that a rank takes: ranges of its rows (dim 0) or columns (dim 1)."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def slices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the ranges of a tensor, as views."""
        return tuple(tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges)


Cuts = Mapping[str, Cut]


class HeadTile(NamedTuple):
    """The order of a matrix's columns, [per key, keys, width], for heads [keys, per key, width]."""

    per_key: int
    """Heads of a key head."""
    width: int
    """Columns of a head."""

    def stored_cut(self, cut: Cut, columns: int) -> Cut:
        """Return the columns where a cut of heads is stored, out of so many columns of all heads.

        A cut has all heads of its key heads.
        """
        step = columns // self.per_key
        ranges = tuple(
            (number * step + first // self.per_key, number * step + end // self.per_key)
            for number in range(self.per_key)
            for first, end in cut.ranges
        )
        return Cut(cut.dim, ranges)


class Rows(NamedTuple):
    """The rows of a matrix that a rank takes: ranges of `total` rows."""

    total: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def concatenate(cls, pieces: Iterable[Rows]) -> Rows:
        """Return the rows of several pieces, one after the other."""
        ranges: list[tuple[int, int]] = []
        first = 0
        for piece in pieces:
            ranges += [(first + start, first + stop) for start, stop in piece.ranges]
            first += piece.total
        return cls(first, tuple(ranges))

    @property
    def num_rows(self) -> int:
        """Return the number of rows that the rank takes."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def cut(self) -> Cut | None:
        """Return the ranges as a cut, None where the rank takes all rows."""
        return None if self.num_rows == self.total else Cut(0, self.ranges)


@dataclass(frozen=True)
class Shard:
    """Rank number `rank` of `size`; with one rank nothing is cut."""

    rank: int
    size: int

    def count_per_rank(self, count: int, description: str) -> int:
        """Return how many of `count` equal parts each rank has: `count` / `size`.

        Raises IncompatibleError where they cannot be divided; description: the parts' name in its
        message.
        """
        if count % self.size:
            message = f"{count:,} {description} cannot be divided among {self.size} ranks"
            raise IncompatibleError(message, code="tensor_parallel")
        return count // self.size

    def rows(self, *counts: int) -> Rows:
        """Return this rank's rows of a matrix of several pieces.

        counts: this rank's rows of each piece.
        """
        return Rows.concatenate(
            Rows(self.size * count, ((self.rank * count, (self.rank + 1) * count),))
            for count in counts
        )

    def columns(self, count: int) -> Cut | None:
        """Return the cut of this rank's `count` columns, None with one rank."""
        return None if self.size == 1 else Cut(1, self.rows(count).ranges)

    def shard_of_keys(self, count: int) -> Shard:
        """Return the shard of `count` key heads: with more ranks than key heads several ranks hold
        the same one.
        """
        shared = self.size > count and self.size % count == 0
        return Shard(self.rank * count // self.size, count) if shared else self

    def id_range(self, vocab_size: int) -> tuple[int, int]:
        """Return the range of this rank's token ids: equally many, but for the last ranks, which
        may have fewer.
        """
        width = -(-vocab_size // self.size)
        return min(self.rank * width, vocab_size), min((self.rank + 1) * width, vocab_size)


UNSHARDED = Shard(0, 1)


class SourceTensor(NamedTuple):
    """A checkpoint's tensor, and the part of this shape that is taken of it."""

    name: str
    shape: Shape
    cut: Cut | None = None


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor to allocate: the rows of its sources, one after the other.

    Names of sources are inside the layer (`self_attn.q_proj.weight`).
    """

    sources: tuple[SourceTensor, ...]
    is_float32: bool = False
    """True if it is float32 whatever the dtype of the run is."""
    is_unquantized: bool = False
    """True if it has the run's dtype however other matrices are stored: its kernels read no codes.
    """
    is_stacked: bool = False
    """True for matrices of experts, whose kernels read codes of one form."""

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, Shape], *, is_float32: bool = False, cut: Cut | None = None
    ) -> ParameterSpec:
        """Return the parameter of sources by name and shape, in order, each cut alike."""
        sources = tuple(SourceTensor(name, shape, cut) for name, shape in shapes.items())
        return cls(sources, is_float32)

    @property
    def shape(self) -> Shape:
        """Return the shape of the tensor to allocate."""
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])

    @property
    def size(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)

    @property
    def is_quantizable(self) -> bool:
        """True if it is a matrix that may be stored in codes."""
        return len(self.shape) == 2 and not self.is_float32 and not self.is_unquantized

    @property
    def is_vocabulary(self) -> bool:
        """True if it is an embedding or a head that the checkpoint stores under the usual name."""
        return self.sources[0].name in (EMBEDDING, HEAD)


def fused_parameters(
    name: str,
    block: str,
    rows: Mapping[str, int | Rows],
    columns: int,
    *,
    biased: bool = False,
    cut: Cut | None = None,
) -> dict[str, ParameterSpec]:
    """Return the fused matrix `name` of projections with these rows, and NAME_bias if it is biased.

    cut: this rank's columns.
    """
    rows_by_name = {
        projection: UNSHARDED.rows(count) if isinstance(count, int) else count
        for projection, count in rows.items()
    }
    weights = tuple(
        SourceTensor(f"{block}.{projection}.weight", (part.num_rows, columns), cut or part.cut)
        for projection, part in rows_by_name.items()
    )
    parameters = {name: ParameterSpec(weights)}
    if biased:
        biases = tuple(
            SourceTensor(f"{block}.{projection}.bias", (part.num_rows,), part.cut)
            for projection, part in rows_by_name.items()
        )
        parameters[f"{name}_bias"] = ParameterSpec(biases)
    return parameters


@dataclass(frozen=True)
class BlockNorms:
    """The norms of the stream around a block; a name is None where there is no norm."""

    before: str | None
    after: str | None = None
    """The norm of the block's result, before it is added to the stream."""
    after_epsilon: float | None = None
    """The epsilon of the norm after the block, where it differs from other norms'."""
    are_centred: bool = False
    """True if the checkpoint stores scales minus 1, those of heads too."""

    def parameters(self, hidden_size: int) -> dict[str, ParameterSpec]:
        """Return the parameters of their scales [hidden_size]."""
        names = {"norm": self.before, "post_norm": self.after}
        return {
            key: ParameterSpec.from_shapes(
                {f"{name}.weight": (hidden_size,)}, is_float32=self.are_centred
            )
            for key, name in names.items()
            if name
        }


ATTENTION_NORMS = BlockNorms(before="input_layernorm")
"""The norms of a layer's attention block in most families."""
MLP_NORMS = BlockNorms(before="post_attention_layernorm")
"""The norms of a layer's MLP block in most families."""
