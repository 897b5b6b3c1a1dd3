"""Which sizes the last block of an attended context may have on this machine, found by trying, once, at load.

Attention reads keys in blocks of `KV_BLOCK`. A library may split a product over fewer keys otherwise than one
over a whole block whose rest is masked (on Intel's processors MKL halves 384 as it halves 512, and so sums
them otherwise; on AMD's it splits 512 into 384 and 128, and 256 comes out otherwise). A size serves if it was
seen to give the whole block's bits, for every number of rows that is run.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import (
    KV_BLOCK,
    KV_PART,
    AttentionHeads,
    Scores,
    Windows,
    paged_attention,
    plan_attention,
)

CANDIDATES = tuple(range(KV_PART, KV_BLOCK, KV_PART))
"""Of 512: 128, 256 and 384. Which of the last two serves depends on the processor."""
TRIED_ROWS = 256
"""Rows tried of each width: a difference of float32 sums shows in about one bfloat16 result of 2**14."""
FEWEST_TRIES = 4


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
    pools, table, scores = (
        (noise(*shape), noise(*shape)),
        torch.arange(pages)[None],
        Scores(heads.head_dim**-0.5),
    )

    def agrees(part: int, width: int) -> bool:
        """Rows before the part's end, in the first block and in the second, with the rest and without."""
        valid = torch.ones(1, width, dtype=torch.bool)
        plans = []
        for block in (0, KV_BLOCK):
            rows = block + part - width + torch.arange(width)[None]
            for context in (block + part, block + KV_BLOCK):
                windows = Windows(rows, valid, table, [context], [0])
                plans.append(plan_attention(windows, heads, page_size, dtype))
        for number in range(max(FEWEST_TRIES, TRIED_ROWS // width)):
            query = noise(1, width, heads.num_heads, heads.head_dim)
            short, whole = (
                paged_attention(query, pools, plan, scores) for plan in plans[2 * (number % 2) :][:2]
            )
            if not torch.equal(short, whole):
                return False
        return True

    whole_pages = [part for part in CANDIDATES if part % page_size == 0]
    return tuple(part for part in whole_pages if all(agrees(part, width) for width in widths))


def context_for(bound: int, parts: tuple[int, ...]) -> int:
    """The fewest positions to attend that reach `bound`: whole blocks, and perhaps a part of one."""
    whole, rest = divmod(bound, KV_BLOCK)
    return whole * KV_BLOCK + (next((part for part in parts if part >= rest), KV_BLOCK) if rest else 0)
