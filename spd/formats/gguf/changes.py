"""What llama.cpp's converter does to weights, described: `runtime.load` undoes it. No arithmetic here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadPairs:
    """Rows of each head stand in the pairs that turn together: half [i], then half [i + D / 2]."""

    heads: int


@dataclass(frozen=True)
class Shifted:
    """Numbers are stored larger by 1: norms whose scales are distances from 1."""


@dataclass(frozen=True)
class Decay:
    """Stored is -exp of what is meant: the logarithm of a decay."""


@dataclass(frozen=True)
class TiledHeads:
    """Value heads of a recurrent layer stand as [per key, keys, width]; meant is [keys, per key, width].

    They stand behind `first` rows, or of columns (dim 1) behind none.
    """

    keys: int
    per_key: int
    width: int
    first: int = 0
    dim: int = 0


@dataclass(frozen=True)
class LatentHeads:
    """Two tensors, keys transposed [H, rank, K] and values [H, V, rank], that are one head by head."""


@dataclass(frozen=True)
class Interleaved:
    """Two tensors, rows of which stand in turn, a row of each: gates and inputs."""


@dataclass(frozen=True)
class KeyHeadMajor:
    """Two tensors that a fused one was cut into: queries, keys and values below each other, and gates.

    Meant: for each of `keys` key heads its query, its key, its values and its gates.
    """

    keys: int
    key_dim: int


Change = HeadPairs | Shifted | Decay | TiledHeads | LatentHeads | Interleaved | KeyHeadMajor
