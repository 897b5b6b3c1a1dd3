# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rejection and block verification on the GPU: one program a slot decides, blocks draw the last
token.

The block rule needs sums over the vocabulary first; each block's sum is stored, and they are added
in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, power_of_two
from spd.kernels.sampling.draft_verify import (
    NO_TOKEN,
    NUM_STREAMS,
    STREAM_ACCEPTANCE,
    STREAM_RESIDUAL,
)
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.philox_triton import (
    NO_RANK,
    draw_rank,
    gumbel_from_bits,
    interleave4,
    random_bits4,
    rank_is_finite,
    rank_token,
    uniform,
)

TARGET = tl.constexpr(STREAM_TARGET)
ACCEPTANCE = tl.constexpr(STREAM_ACCEPTANCE)
RESIDUAL = tl.constexpr(STREAM_RESIDUAL)
NONE = tl.constexpr(NO_TOKEN)
STREAMS = tl.constexpr(NUM_STREAMS)
BLOCK = 2048
"""Token ids a program; a multiple of 4."""
WARPS = 8
MAX_ROWS = 64


@triton.jit
def draft_ratio(target, draft_probs, draft, slot, i, drafts, vocab_size, ONE_HOT: tl.constexpr):
    """Return p / q of a slot's draft i, target over draft model."""
    token = tl.load(draft + slot * drafts + i)
    p = tl.load(target + (slot * (drafts + 1) + i) * vocab_size + token)
    if ONE_HOT:
        return p
    else:
        q = tl.load(draft_probs + (slot * drafts + i) * vocab_size + token)
        return tl.where(q > 0, tl.div_rn(p, tl.where(q > 0, q, 1.0)), 0.0)


@triton.jit
def excess_over_draft(p, scale, draft_probs, draft, slot, i, drafts, ids, vocab_size, ONE_HOT):
    """Return max(scale * p - q, 0) for a block of ids, with q the distribution of draft i."""
    if ONE_HOT:
        q = (ids == tl.load(draft + slot * drafts + i)).to(tl.float32)
    else:
        q = tl.load(
            draft_probs + (slot * drafts + i) * vocab_size + ids, mask=ids < vocab_size, other=0.0
        )
    return tl.maximum(scale * p - q, 0.0)


@triton.jit(do_not_specialize=["drafts"])
def excess_kernel(
    target, draft_probs, draft, num_drafts, sums, drafts, vocab_size, ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block's part of the excess after i + 1 drafts, if another follows: float32 [S, k,
    blocks]."""
    slot = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    block = tl.program_id(2)
    if i + 1 < tl.load(num_drafts + slot):
        joint = 1.0
        for j in range(i + 1):
            ratio = draft_ratio(target, draft_probs, draft, slot, j, drafts, vocab_size, ONE_HOT)
            joint = tl.minimum(joint * ratio, 1.0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        row = slot * (drafts + 1) + i + 1
        p = tl.load(target + row * vocab_size + ids, mask=ids < vocab_size, other=0.0)
        excess = excess_over_draft(
            p, joint, draft_probs, draft, slot, i + 1, drafts, ids, vocab_size, ONE_HOT
        )  # fmt: skip
        tl.store(sums + (slot * drafts + i) * tl.num_programs(2) + block, tl.sum(excess))


@triton.jit(do_not_specialize=["drafts"])
def decide_kernel(
    target, draft_probs, draft, num_drafts, seed, positions, sums, accepted, scales, drafts, vocab_size,
    blocks, ONE_HOT: tl.constexpr, BY_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store a slot's accepted drafts, int64 [S], and the scale of the last row's residual, float32
    [S]."""
    slot = tl.program_id(0).to(tl.int64)
    valid_drafts = tl.minimum(tl.load(num_drafts + slot), drafts)
    index = tl.arange(0, BLOCKS)
    passed = tl.zeros((), dtype=tl.int64)
    joint = 1.0
    scale = 1.0
    for i in range(valid_drafts):
        ratio = draft_ratio(target, draft_probs, draft, slot, i, drafts, vocab_size, ONE_HOT)
        position = tl.load(positions + slot * (drafts + 1) + i)
        stream = (position * 0 + ACCEPTANCE + STREAMS * i).to(tl.uint32)
        bits, _, _, _ = random_bits4(tl.load(seed + slot), position, stream, position * 0)
        if BY_BLOCK:
            joint = tl.minimum(joint * ratio, 1.0)
            chance = joint
            if i + 1 < valid_drafts:
                parts = sums + (slot * drafts + i) * blocks
                excess = tl.sum(tl.load(parts + index, mask=index < blocks, other=0.0))
                total = excess + 1.0 - joint
                chance = tl.where(
                    total > 0, tl.div_rn(excess, tl.where(total > 0, total, 1.0)), 1.0
                )
            passes = uniform(bits) < chance
            passed = tl.where(passes, i + 1, passed)
            scale = tl.where(passes, joint, scale)
        else:
            passed += ((passed == i) & (uniform(bits) < ratio)).to(tl.int64)
    tl.store(accepted + slot, passed)
    tl.store(scales + slot, scale)


@triton.jit(do_not_specialize=["drafts"])
def last_token_kernel(
    target, draft_probs, draft, num_drafts, seed, positions, accepted, scales, ranks, drafts, vocab_size,
    ONE_HOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block's greatest ranks in the row after the accepted drafts, by residual and by the
    target.

    int64 [S, blocks, 2], with the same noise; both are the target's where no draft was rejected.
    """
    slot = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = tl.load(accepted + slot)
    rejected = at < tl.minimum(tl.load(num_drafts + slot), drafts)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    row = slot * (drafts + 1) + at
    p = tl.load(target + row * vocab_size + ids, mask=ids < vocab_size, other=0.0)
    weights = p
    if rejected:
        weights = excess_over_draft(
            p, tl.load(scales + slot), draft_probs, draft, slot, at, drafts, ids, vocab_size, ONE_HOT
        )  # fmt: skip
    stream = tl.where(rejected, RESIDUAL, TARGET).to(tl.uint32)
    groups = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    bits0, bits1, bits2, bits3 = random_bits4(
        tl.load(seed + slot), tl.load(positions + row), stream, groups
    )
    noise = gumbel_from_bits(interleave4(bits0, bits1, bits2, bits3))
    out = ranks + (slot * tl.num_programs(1) + block) * 2
    residual = tl.where(ids < vocab_size, draw_rank(tl.log(weights) + noise, ids), NO_RANK)
    plain = tl.where(ids < vocab_size, draw_rank(tl.log(p) + noise, ids), NO_RANK)
    tl.store(out, tl.max(residual))
    tl.store(out + 1, tl.max(plain))


@triton.jit(do_not_specialize=["drafts"])
def emit_kernel(
    draft, accepted, ranks, tokens, drafts, blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):
    """Store a slot's tokens: accepted drafts, the last token, NONE beyond; int64 [S, k + 1]."""
    slot = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    rows = tl.arange(0, ROWS)
    parts = ranks + (slot * blocks + index) * 2
    rank = tl.max(tl.load(parts, mask=index < blocks, other=NO_RANK))
    plain = tl.max(tl.load(parts + 1, mask=index < blocks, other=NO_RANK))
    last = rank_token(tl.where(rank_is_finite(rank), rank, plain))
    at = tl.load(accepted + slot)
    drafted = tl.load(draft + slot * drafts + rows, mask=rows < at, other=NONE)
    tl.store(
        tokens + slot * (drafts + 1) + rows,
        tl.where(rows == at, last, drafted),
        mask=rows <= drafts,
    )


def verify_drafts(
    target: Tensor,
    draft_probs: Tensor | None,
    draft: Tensor,
    num_drafts: Tensor,
    seed: Tensor,
    positions: Tensor,
    by_block: bool,
) -> tuple[Tensor, Tensor]:
    """Launch `Kernels.verify_drafts`; probabilities are float32."""
    slots, rows, vocab_size = target.shape
    device = target.device
    drafts = rows - 1
    blocks = ceil_div(vocab_size, BLOCK)
    assert rows <= MAX_ROWS
    draft = draft.contiguous()
    positions = positions.contiguous()
    probs = target if draft_probs is None else draft_probs.contiguous()
    one_hot = draft_probs is None
    accepted, scales = _accept(
        target=target,
        probs=probs,
        draft=draft,
        num_drafts=num_drafts,
        seed=seed,
        positions=positions,
        by_block=by_block,
        one_hot=one_hot,
    )
    ranks = torch.empty(slots, blocks, 2, dtype=torch.int64, device=device)
    tokens = torch.empty(slots, rows, dtype=torch.int64, device=device)
    last_token_kernel[slots, blocks](
        target,
        probs,
        draft,
        num_drafts,
        seed,
        positions,
        accepted,
        scales,
        ranks,
        drafts,
        vocab_size,
        ONE_HOT=one_hot,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    emit_kernel[(slots,)](
        draft,
        accepted,
        ranks,
        tokens,
        drafts,
        blocks,
        BLOCKS=power_of_two(blocks),
        ROWS=MAX_ROWS,
        num_warps=1,
    )
    return tokens, accepted


def _accept(
    target: Tensor,
    probs: Tensor,
    draft: Tensor,
    num_drafts: Tensor,
    seed: Tensor,
    positions: Tensor,
    by_block: bool,
    one_hot: bool,
) -> tuple[Tensor, Tensor]:
    """Return the accepted drafts, int64 [S], and the scales of the last rows' residuals, float32
    [S]."""
    slots, rows, vocab_size = target.shape
    drafts = rows - 1
    blocks = ceil_div(vocab_size, BLOCK)
    options = {"ONE_HOT": one_hot, "enable_fp_fusion": False}
    device = target.device
    sums = torch.empty(slots, max(drafts, 1), blocks, dtype=torch.float32, device=device)
    accepted = torch.empty_like(num_drafts)
    scales = torch.empty(slots, dtype=torch.float32, device=device)
    if by_block and drafts > 1:
        excess_kernel[slots, drafts - 1, blocks](
            target,
            probs,
            draft,
            num_drafts,
            sums,
            drafts,
            vocab_size,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **options,
        )
    decide_kernel[(slots,)](
        target,
        probs,
        draft,
        num_drafts,
        seed,
        positions,
        sums,
        accepted,
        scales,
        drafts,
        vocab_size,
        blocks,
        BY_BLOCK=by_block,
        BLOCKS=power_of_two(blocks),
        num_warps=1,
        **options,
    )
    return accepted, scales
