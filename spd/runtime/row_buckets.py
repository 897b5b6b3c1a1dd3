"""Which numbers of rows give the same bits on this machine, found by trying, once, at load.

Libraries choose their arithmetic by shape: another instruction, another blocking, a scalar tail. Rows
are therefore only ever computed in buckets that were seen to agree, bit for bit and at every row
position, with the widest bucket, on the model's own first layers and head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WIDEST = 32
CANDIDATES = (2, 4, 5, 6, 8, 12, 16)
"""Not 1: a single row is a matrix-vector product, which libraries sum in another order. 5 and 6: products of
up to 6 rows pass over packed bfloat16 weights once, of 7 and 8 twice (oneDNN 3.12)."""
PROBED_LAYERS = 4

Window = Callable[[int, int, int, int], tuple[Tensor, Tensor]]
"""(position of row 0, first row, rows, context) to hidden states and logits of those rows."""


@torch.inference_mode()
def admitted_buckets(window: Window, start: int, block: int) -> tuple[int, ...]:
    """Row counts, ascending, whose results equal the widest bucket's; the widest is always last.

    `window` runs rows of one fixed text, at the same positions whichever window they come in; here from
    position `start` on, within a context of one or two blocks. Times do not choose: ranks that work
    together have to come to the same numbers.
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


def bucket_for(rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest padded number of rows: a bucket, or whole tiles of the widest and a bucket."""
    whole, rest = divmod(rows, WIDEST)
    return whole * WIDEST + (next(b for b in buckets if b >= rest) if rest else 0)
