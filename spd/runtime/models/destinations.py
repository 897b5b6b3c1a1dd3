"""Tensors to allocate, each of one or several of a checkpoint's, whole or in part. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spd.runtime.models.shards import Cut, Cuts

Shape = tuple[int, ...]
NOTHING: Cuts = MappingProxyType({})


@dataclass(frozen=True)
class Destination:
    """One tensor to allocate: the named checkpoint tensors below each other, rows counted together.

    Names stand inside the layer (`self_attn.q_proj.weight`). With `exact` it is float32 whatever the rest
    of the model is. `wide` matrices have the run's dtype whatever other matrices are kept in: who reads them
    knows no other weights. A part that is cut has the shape of what is taken.
    """

    parts: tuple[tuple[str, Shape], ...]
    exact: bool = False
    cuts: tuple[tuple[str, Cut], ...] = ()
    wide: bool = False

    @classmethod
    def of(cls, parts: Mapping[str, Shape], *, exact: bool = False, cuts: Cuts = NOTHING) -> Destination:
        """From names and shapes in order."""
        return cls(tuple(parts.items()), exact, tuple(cuts.items()))

    @property
    def shape(self) -> Shape:
        """Of the whole."""
        shapes = [shape for _, shape in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def multiplied(self) -> bool:
        """Whether it is a matrix that may be kept in eight bits, as far as its readers are concerned."""
        return len(self.shape) == 2 and not self.exact and not self.wide


def fused(
    block: str, rows: Mapping[str, int], columns: int, *, biased: bool = False, cuts: Cuts = NOTHING
) -> list[Destination]:
    """A fused matrix of projections with the given numbers of rows, and its fused bias if there is one.

    cuts: of the projections that are taken in part; a bias follows its rows.
    """
    weight = Destination.of(
        {f"{block}.{name}.weight": (count, columns) for name, count in rows.items()},
        cuts={f"{block}.{name}.weight": cut for name, cut in cuts.items()},
    )
    if not biased:
        return [weight]
    bias = Destination.of(
        {f"{block}.{name}.bias": (count,) for name, count in rows.items()},
        cuts={f"{block}.{name}.bias": cut for name, cut in cuts.items() if cut.dim == 0},
    )
    return [weight, bias]


def named(name: str, matrix: list[Destination]) -> dict[str, Destination]:
    """A matrix under its name, its bias under NAME_bias."""
    return dict(zip((name, f"{name}_bias"), matrix, strict=False))
