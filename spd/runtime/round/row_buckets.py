"""Which numbers of rows give the same bits on this machine, found by trying, once, at load.

Libraries choose their arithmetic by shape: another instruction, another blocking, a scalar tail. Rows
are therefore only ever computed in buckets that were seen to agree, bit for bit and at every row
position, with the widest bucket, on the model's own first layers and head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

WIDEST = 32
TILES = (2 * WIDEST, 3 * WIDEST, 4 * WIDEST)
"""Rows of one product in place of tiles of the widest bucket: weights are read once for all of them."""
CANDIDATES = (2, 4, 5, 6, 8, 12, 16)
"""Not 1: a single row is a matrix-vector product, which libraries sum in another order. 5 and 6: products of
up to 6 rows pass over packed bfloat16 weights once, of 7 and 8 twice (oneDNN 3.12)."""
PROBED_LAYERS = 4
FASTER = 0.95
"""A wider bucket is taken for fewer rows if it needs at most so much of their own bucket's time."""
TIMED, TIMED_WIDEST = 4, 8
"""How often each bucket of at most so many rows is timed, in turn with the others. The least time counts:
whatever else runs on the machine adds to one."""

Window = Callable[[int, int, int, int], tuple[Tensor, Tensor]]
"""(position of row 0, first row, rows, context) to hidden states and logits of those rows."""


@torch.inference_mode()
def admitted_buckets(window: Window, start: int, block: int) -> tuple[int, ...]:
    """Row counts, ascending, whose results equal the widest bucket's; the widest is always last.

    `window` runs rows of one fixed text, at the same positions whichever window they come in; here from
    position `start` on, within a context of one or two blocks.
    """
    hidden, logits = window(start, 0, WIDEST, block)

    def agrees(width: int) -> bool:
        for first in range(0, WIDEST - width + 1, width):
            narrow, scores = window(start, first, width, (1 + first // width % 2) * block)
            end = first + width
            if not torch.equal(narrow, hidden[first:end]) or not torch.equal(scores, logits[first:end]):
                return False
        return True

    return (*filter(agrees, CANDIDATES), WIDEST)


def seconds_of(
    window: Window,
    buckets: Sequence[int],
    start: int,
    block: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """The least seconds that the rows of each narrow bucket took; see `admitted_buckets`."""
    best = {width: math.inf for width in buckets if width <= TIMED_WIDEST}
    for _ in range(TIMED):
        for width in best:
            began = clock()
            window(start, 0, width, block)
            best[width] = min(best[width], clock() - began)
    return best


def worth_running(buckets: Sequence[int], seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Of the buckets those that no larger one outruns, as far as their seconds are known.

    For models of one rank only: ranks that work together have to come to the same numbers.
    """
    kept: list[int] = []
    fastest = math.inf
    for width in sorted(buckets, reverse=True):
        needed = seconds.get(width)
        if needed is None or fastest > FASTER * needed:
            kept.append(width)
        fastest = min(fastest, needed or math.inf)
    return tuple(reversed(kept))


class Rounding(Protocol):
    """A product that tells what its rounding takes away; see `Linear`."""

    weight: Tensor

    def product(self, x: Tensor, tile: int) -> Tensor:
        """x [T, K] to [T, N]."""
        ...

    def lost(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Of y [T, N], the product of x."""
        ...


@torch.inference_mode()
def summed_alike(product: Rounding, widths: Sequence[int]) -> tuple[int, ...]:
    """The widths whose rows are summed in the order of the widest bucket's.

    Another order shows in one rounded result of ten thousand, but in one of ten of what rounding took away.
    """
    size, dtype = product.weight.shape[1], product.weight.dtype
    x = torch.randn(WIDEST, size, generator=torch.Generator().manual_seed(0)).to(product.weight.device, dtype)
    whole = product.product(x, WIDEST)
    lost = product.lost(x, whole)
    if lost is None:
        return tuple(widths)

    def alike(width: int) -> bool:
        for rows in (slice(width), slice(WIDEST - width, WIDEST)):
            own = product.lost(x[rows], whole[rows])
            if own is None or not torch.equal(own, lost[rows]):
                return False
        return True

    return tuple(filter(alike, widths))


@torch.inference_mode()
def admitted_tile(rows: Callable[[int, int, int], tuple[Tensor, Tensor]]) -> int:
    """The most rows, of `TILES`, whose products equal those of tiles of the widest bucket, as all fewer do.

    rows: (first, number of rows, rows a product) to hidden states and logits of those rows of a fixed text.
    """
    hidden, logits = rows(0, TILES[-1], WIDEST)
    for number, tile in enumerate(TILES):
        for first in range(0, TILES[-1] - tile + 1, tile):
            wide, scores = rows(first, tile, tile)
            end = first + tile
            if not torch.equal(wide, hidden[first:end]) or not torch.equal(scores, logits[first:end]):
                return TILES[number - 1] if number else WIDEST
    return TILES[-1]


@torch.inference_mode()
def alike_threads(counts: Sequence[int], passes: Callable[[], list[Tensor]]) -> tuple[int, ...]:
    """The numbers of threads, of `counts`, with which `passes` gives the bits of the largest."""

    def with_threads(count: int) -> list[Tensor]:
        torch.set_num_threads(count)
        return passes()

    *fewer, most = counts
    try:
        found = {count: with_threads(count) for count in (*fewer, most)}
    finally:
        torch.set_num_threads(most)
    return (*(n for n in fewer if all(map(torch.equal, found[n], found[most]))), most)


def bucket_for(rows: int, buckets: tuple[int, ...], tile: int = WIDEST) -> int:
    """The smallest padded number of rows: a bucket, or whole tiles of the widest and a bucket.

    Beyond the widest bucket, rows of wider tiles are whole multiples of it: no other number was tried.
    """
    whole, rest = divmod(rows, WIDEST)
    if rest and whole and tile > WIDEST:
        return (whole + 1) * WIDEST
    return whole * WIDEST + (next(b for b in buckets if b >= rest) if rest else 0)
