"""Which numbers of rows give the same bits on this machine, found by trying, once, at load.

Libraries choose their arithmetic by shape: another instruction, another blocking, a scalar tail. Rows
are therefore only ever computed in buckets that were seen to agree, bit for bit and at every row
position, with the widest bucket, on the model's own first layers and head.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

WIDEST = 32
CANDIDATES = (2, 4, 5, 6, 8, 12, 16)
"""Not 1: a single row is a matrix-vector product, which libraries sum in another order. 5 and 6: products of
up to 6 rows pass over packed bfloat16 weights once, of 7 and 8 twice (oneDNN 3.12)."""
PROBED_LAYERS = 4
WORTHWHILE = 1.25
"""A candidate stays until a wider one is this many times as fast: less may be chance."""

Window = Callable[[int, int, int, int], tuple[Tensor, Tensor]]
"""(position of row 0, first row, rows, context) to hidden states and logits of those rows."""


@torch.inference_mode()
def admitted_buckets(window: Window, start: int, block: int) -> tuple[int, ...]:
    """Row counts, ascending, whose results equal the widest bucket's; the widest is always last.

    `window` runs rows of one fixed text, at the same positions whichever window they come in; here from
    position `start` on, within a context of one or two blocks. A candidate that took longer than a wider
    one is left out, so that its rows are padded to that: times choose among equals, never the bits.
    """
    hidden, logits = window(start, 0, WIDEST, block)

    def least_seconds(width: int) -> float | None:
        """Of one window, where all agree with the widest; None where one does not."""
        least = float("inf")
        for first in range(0, WIDEST - width + 1, width):
            began = perf_counter()
            narrow, scores = window(start, first, width, (1 + first // width % 2) * block)
            least = min(least, perf_counter() - began)
            end = first + width
            if not torch.equal(narrow, hidden[first:end]) or not torch.equal(scores, logits[first:end]):
                return None
        return least

    seconds = {width: least for width in CANDIDATES if (least := least_seconds(width)) is not None}

    def pays(width: int) -> bool:
        return all(seconds[width] <= WORTHWHILE * seconds[wider] for wider in seconds if wider > width)

    return (*filter(pays, seconds), WIDEST)


def bucket_for(rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest padded number of rows: a bucket, or whole tiles of the widest and a bucket."""
    whole, rest = divmod(rows, WIDEST)
    return whole * WIDEST + (next(b for b in buckets if b >= rest) if rest else 0)
