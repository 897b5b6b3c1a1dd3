"""What llama.cpp's converter does to weights, described: `runtime.load` undoes it. No arithmetic here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PermutedHeads:
    """Rows of each head stand in the pairs that turn together: half [i], then half [i + D / 2]."""

    heads: int


@dataclass(frozen=True)
class ShiftedNorm:
    """Numbers are stored larger by 1: norms whose scales are distances from 1."""


@dataclass(frozen=True)
class NegatedExp:
    """Stored is -exp of what is meant: the logarithm of a decay."""


@dataclass(frozen=True)
class TiledHeads:
    """Value heads of a recurrent layer stand as [per key, keys, width]; meant is [keys, per key, width].

    They stand behind `first` rows, or are all columns (dim 1).
    """

    keys: int
    per_key: int
    width: int
    first: int = 0
    dim: int = 0


@dataclass(frozen=True)
class Concatenated:
    """Several tensors are one, below each other."""


@dataclass(frozen=True)
class Interleaved:
    """Several tensors are one: along the dimension before `dim` an element of each in turn."""

    dim: int


@dataclass(frozen=True)
class LatentHeads:
    """Two tensors, keys transposed [H, rank, K] and values [H, V, rank], are one head by head."""


@dataclass(frozen=True)
class KeyHeadMajor:
    """Two tensors, queries, keys and values below each other and gates, are one key head by key head.

    Of each of `keys` key heads there are a query and a key of `key_dim` rows, its values and its gates.
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
"""Changes by what they are done to, before a model's sizes are known."""
