"""Which numbers of rows and of keys give the same bits on this machine, found by trying, once, at load.

Libraries choose their arithmetic by shape: another instruction, another blocking, a scalar tail. Rows
are therefore only ever computed in buckets that were seen to agree, bit for bit and at every row
position, with the widest bucket, on the model's own first layers and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spd.runtime.layers.torch_linear import Linear

WIDEST = 32
CANDIDATES = (2, 4, 5, 6, 8, 12, 16)
"""Not 1: a single row is a matrix-vector product, which libraries sum in another order. 5 and 6: products of
up to 6 rows pass over packed bfloat16 weights once, of 7 and 8 twice (oneDNN 3.12)."""
PROBED_LAYERS = 4

Pass = tuple[Tensor, Tensor]  # hidden states [T, H] and logits [T, V] of rows of one fixed text
Window = Callable[
    [int, int, int], Pass
]  # (first row, rows, blocks of context) to what becomes of those rows


@torch.inference_mode()
def admitted_buckets(window: Window) -> tuple[int, ...]:
    """Row counts, ascending, whose results equal the widest bucket's; the widest is always last.

    `window` runs rows of one fixed text, at the same positions whichever window they come in.
    """
    whole = window(0, WIDEST, 1)

    def agrees(width: int) -> bool:
        for first in range(0, WIDEST - width + 1, width):
            pairs = zip(window(first, width, 1 + first // width % 2), whole, strict=True)
            if not all(torch.equal(own, every[first : first + width]) for own, every in pairs):
                return False
        return True

    return (*filter(agrees, CANDIDATES), WIDEST)


@torch.inference_mode()
def summed_alike(product: Linear, widths: Sequence[int]) -> tuple[int, ...]:
    """The widths whose rows are summed in the order of the widest bucket's.

    Another order shows in one rounded result of ten thousand, but in one of ten of what rounding took away.
    """
    x = product.example(WIDEST)
    whole = product.product(x, WIDEST)
    errors = product.rounding_error(x, whole)
    if errors is None:
        return tuple(widths)

    def alike(width: int) -> bool:
        for rows in (slice(width), slice(WIDEST - width, WIDEST)):
            part = product.rounding_error(x[rows], whole[rows])
            if part is None or not torch.equal(part, errors[rows]):
                return False
        return True

    return tuple(filter(alike, widths))
