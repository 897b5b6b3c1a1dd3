"""Which numbers of rows give the same bits on this machine, found by trying, once, at load.

Libraries choose their arithmetic by shape: another instruction, another blocking, a scalar tail. Rows
are therefore only ever computed in buckets that were seen to agree, bit for bit and at every row
position, with the widest bucket, on the model's own first layers and head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

WIDEST = 32
CANDIDATES = (2, 4, 5, 6, 8, 12, 16)
"""Not 1: a single row is a matrix-vector product, which libraries sum in another order. 5 and 6: products of
up to 6 rows pass over packed bfloat16 weights once, of 7 and 8 twice (oneDNN 3.12)."""
PROBED_LAYERS = 4
FASTER = 0.97
"""A wider bucket is taken for fewer rows if it needs at most so much of their own bucket's time."""

Window = Callable[[int, int, int, int], tuple[Tensor, Tensor]]
"""(position of row 0, first row, rows, context) to hidden states and logits of those rows."""


@torch.inference_mode()
def admitted_buckets(window: Window, start: int, block: int) -> dict[int, float]:
    """Row counts, ascending, whose results equal the widest bucket's, with the least seconds that one took.

    `window` runs rows of one fixed text, at the same positions whichever window they come in; here from
    position `start` on, within a context of one or two blocks. The widest is always last.
    """
    best: dict[int, float] = {}

    def timed(first: int, width: int, context: int) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        found = window(start, first, width, context)
        best[width] = min(best.get(width, float("inf")), time.perf_counter() - began)
        return found

    timed(0, WIDEST, block)  # the first run of a size prepares it
    hidden, logits = timed(0, WIDEST, block)

    def agrees(width: int) -> bool:
        for first in range(0, WIDEST - width + 1, width):
            narrow, scores = timed(first, width, (1 + first // width % 2) * block)
            end = first + width
            if not torch.equal(narrow, hidden[first:end]) or not torch.equal(scores, logits[first:end]):
                return False
        return True

    return {width: best[width] for width in (*filter(agrees, CANDIDATES), WIDEST)}


def worth_running(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Of the row counts by their seconds, those that no larger one outruns; the largest is always there.

    For models of one rank only: ranks that work together have to come to the same numbers.
    """
    kept: list[int] = []
    fastest = float("inf")
    for width in sorted(seconds, reverse=True):
        if fastest > FASTER * seconds[width]:
            kept.append(width)
        fastest = min(fastest, seconds[width])
    return tuple(reversed(kept))


def bucket_for(rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest padded number of rows: a bucket, or whole tiles of the widest and a bucket."""
    whole, rest = divmod(rows, WIDEST)
    return whole * WIDEST + (next(b for b in buckets if b >= rest) if rest else 0)
