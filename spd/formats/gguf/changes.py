"""Changes that llama.cpp's converter makes to weights; `runtime.load` undoes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PermutedHeads:
    """Rows of each head are stored in pairs that rotate together: row i, then row i + D / 2."""

    heads: int


@dataclass(frozen=True)
class ShiftedNorm:
    """Scales of norms are stored larger by 1: the model's are distances from 1."""


@dataclass(frozen=True)
class NegatedExp:
    """The logarithm x of a decay is stored as -exp(x)."""


@dataclass(frozen=True)
class TiledHeads:
    """Value heads of a recurrent layer [keys, per key, width] are stored as [per key, keys, width].

    They follow `first` rows, or are all columns (dim 1).
    """

    keys: int
    """Key heads."""
    per_key: int
    """Value heads of a key head."""
    width: int
    """Rows or columns of a value head."""
    first: int = 0
    dim: int = 0


@dataclass(frozen=True)
class Concatenated:
    """Several tensors form one: their rows follow each other."""


@dataclass(frozen=True)
class Interleaved:
    """Several tensors form one: along the dimension before `dim`, an element of each in turn."""

    dim: int


@dataclass(frozen=True)
class LatentHeads:
    """Two tensors, keys transposed [H, rank, K] and values [H, V, rank], form one, head by head."""


@dataclass(frozen=True)
class KeyHeadMajor:
    """Two tensors, of queries, keys and values and of gates, form one, key head by key head.

    Each of `keys` key heads has a query and a key of `key_dim` rows, its values and its gates.
    """

    keys: int
    key_dim: int


Change = (
    PermutedHeads
    | ShiftedNorm
    | NegatedExp
    | TiledHeads
    | Concatenated
    | Interleaved
    | LatentHeads
    | KeyHeadMajor
)

ChangeName = Literal[
    "query_pairs",
    "key_pairs",
    "decay",
    "tiled_decay",
    "tiled_values",
    "tiled_heads",
    "tiled_columns",
    "tiled_channels",
    "below",
    "interleaved",
    "latent_heads",
    "key_head_major",
]
"""Names of changes, for tables that do not know a model's sizes."""
