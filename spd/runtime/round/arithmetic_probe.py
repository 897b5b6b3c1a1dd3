"""Which numbers of rows and of keys give the same bits on this machine, found by trying, once, at load.

Libraries choose their arithmetic by shape: another instruction, another blocking, a scalar tail. Rows
are therefore only ever computed in buckets that were seen to agree, bit for bit and at every row
position, with the widest bucket, on the model's own first layers and head.

Attention reads keys in blocks of `KV_BLOCK`. A library may split a product over fewer keys otherwise than one
over a whole block whose rest is masked (on Intel's processors MKL halves 384 as it halves 512, and so sums
them otherwise; on AMD's it splits 512 into 384 and 128, and 256 comes out otherwise). A part of a block is
attended only if it was seen to give the whole block's bits, for every number of rows that is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spd.kernels.attention import paged_attention as attention
from spd.kernels.attention.paged_attention import KV_BLOCK, KV_PART, AttentionHeads, paged_attention
from spd.runtime.layers.linear import Linear

WIDEST = 32
CANDIDATES = (2, 4, 5, 6, 8, 12, 16)
"""Not 1: a single row is a matrix-vector product, which libraries sum in another order. 5 and 6: products of
up to 6 rows pass over packed bfloat16 weights once, of 7 and 8 twice (oneDNN 3.12)."""
PROBED_LAYERS = 4

Pass = tuple[Tensor, Tensor]  # hidden states [T, H] and logits [T, V] of rows of one fixed text
Window = Callable[[int, int, int], Pass]  # (first row, rows, blocks of context) to what becomes of those rows
PARTS = tuple(range(KV_PART, KV_BLOCK, KV_PART))
"""Of 512: 128, 256 and 384. Which of the last two serves depends on the processor."""
PART_ROWS = 256
"""Rows tried of each width: a difference of float32 sums shows in about one bfloat16 result of 2**14."""
PART_TRIES = 4


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
def admitted_parts(
    heads: AttentionHeads, dtype: torch.dtype, page_size: int, widths: tuple[int, ...]
) -> tuple[int, ...]:
    """Sizes, ascending, that a last block may have; none of them need. On CPU; widths: of windows."""
    generator, heads = torch.Generator().manual_seed(0), replace(heads, sliding=(None,))

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pages = 2 * KV_BLOCK // page_size
    shape = (pages, page_size, heads.num_kv_heads, heads.head_dim)
    pools, table = (noise(*shape), noise(*shape)), torch.arange(pages)[None]
    scores = attention.Scores(heads.head_dim**-0.5)

    def agrees(part: int, width: int) -> bool:
        """Rows before the part's end, in the first block and in the second, with the rest and without."""
        valid = torch.ones(1, width, dtype=torch.bool)
        plans = []
        for block in (0, KV_BLOCK):
            rows = block + part - width + torch.arange(width)[None]
            for context in (block + part, block + KV_BLOCK):
                windows = attention.Windows(rows, valid, table, [context], [0])
                plans.append(attention.plan_attention(windows, heads, page_size, dtype))
        for number in range(max(PART_TRIES, PART_ROWS // width)):
            query = noise(1, width, heads.num_heads, heads.head_dim)
            pair = plans[2 * (number % 2) :][:2]
            if not torch.equal(*(paged_attention(query, pools, plan, scores) for plan in pair)):
                return False
        return True

    whole_pages = [part for part in PARTS if part % page_size == 0]
    return tuple(part for part in whole_pages if all(agrees(part, width) for width in widths))
