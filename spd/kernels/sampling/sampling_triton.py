# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Every row's token from its logits on the GPU: one pass where nothing is truncated, else a few.

A program processes one block of one row's vocabulary. Blocks of a row are combined as integers
(`draw_rank`), whose maximum depends on no order. Truncated rows are first stored processed, then
`truncation_triton` finds each row's last kept token, then one of the kept ones is drawn. A row's
distribution is its processed logits' weights over their sum, added block by block in a fixed order,
so it depends on no other row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, power_of_two
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.philox_triton import (
    KEY_OF_INFINITY,
    KEY_OF_MINUS_INFINITY,
    MAGNITUDE,
    NO_RANK,
    choose_kernel,
    draw_rank,
    gumbel_from_bits,
    interleave4,
    order_key,
    random_bits4,
    scaled_logit,
    value_of_key,
)
from spd.kernels.sampling.sampling import SamplingTensors
from spd.kernels.sampling.truncation_triton import find_thresholds, is_kept, row_highest

BLOCK = 2048
"""Token ids a program; a multiple of 4."""
OPTIONS: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}

NOT_SPECIALIZED = [
    "rows_per_slot",
    "draft_stride",
    "mask_stride",
    "mask_words",
    "position_stride_0",
    "position_stride_1",
    "stream",
]
"""Arguments that differ between calls of one model, and so must not specialize a program."""


@triton.jit
def block_rank(
    x, seed, positions, temperature, row, rows_per_slot, position_stride_0, position_stride_1,
    stream, first, ids, vocab_size, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the greatest rank of a block of a row's processed logits."""
    if NOISE:
        slot = row // rows_per_slot
        number = row % rows_per_slot
        if tl.load(temperature + slot) > 0:
            position = tl.load(positions + slot * position_stride_0 + number * position_stride_1)
            groups = first // 4 + tl.arange(0, BLOCK // 4)
            bits0, bits1, bits2, bits3 = random_bits4(
                tl.load(seed + slot), position, stream, groups
            )
            x = x + gumbel_from_bits(interleave4(bits0, bits1, bits2, bits3))
    return tl.max(tl.where(ids < vocab_size, draw_rank(x, ids), NO_RANK))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def process_kernel(
    logits, draft, positions, temperature, repetition, presence, frequency, seed, bias, in_prompt,
    generated, stop_ids, length, min_length, mask, ranks, processed, highest, rows_per_slot, draft_stride,
    mask_stride, mask_words, position_stride_0, position_stride_1, stream, vocab_size, usable_vocab,
    STOPS: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply every step before truncation to a block of a row's logits; -inf beyond the vocabulary.

    Store its greatest rank, int64 [rows, blocks], if ranks is not None. Else store the processed
    block, float32 [rows, V], and its highest order key, int32 [rows, blocks].
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    slot = row // rows_per_slot
    number = row % rows_per_slot
    inside = ids < vocab_size
    x = tl.load(logits + row * vocab_size + ids, mask=ids < usable_vocab, other=float("-inf"))
    if bias is not None:
        x += tl.load(bias + slot * vocab_size + ids, mask=inside, other=0.0)
    if generated is not None:
        counts = tl.load(generated + slot * vocab_size + ids, mask=inside, other=0)
        seen = tl.load(in_prompt + slot * vocab_size + ids, mask=inside, other=0) != 0
        for i in range(number):
            counts += (ids == tl.load(draft + slot * draft_stride + i)).to(tl.int32)
        strength = tl.load(repetition + slot)
        repeated = tl.where(x > 0, tl.div_rn(x, strength), x * strength)
        x = tl.where((counts > 0) | seen, repeated, x)
        x = x - tl.load(frequency + slot) * counts.to(tl.float32)
        x = x - tl.load(presence + slot) * (counts > 0).to(tl.float32)
    if min_length is not None:
        early = tl.load(length + slot) + number < tl.load(min_length + slot)
        for j in range(tl.where(early, STOPS, 0)):
            x = tl.where(ids == tl.load(stop_ids + slot * STOPS + j), float("-inf"), x)
    if mask is not None:
        words = mask + slot * mask_stride + number * mask_words
        word = tl.load(words + (ids >> 5), mask=inside, other=0)
        x = tl.where(((word >> (ids & 31)) & 1) != 0, x, float("-inf"))
    if NOISE:
        x = scaled_logit(x, tl.load(temperature + slot))
    if ranks is not None:
        rank = block_rank(
            x, seed, positions, temperature, row, rows_per_slot, position_stride_0, position_stride_1, stream,
            block * BLOCK, ids, vocab_size, NOISE, BLOCK,
        )  # fmt: skip
        tl.store(ranks + row * tl.num_programs(1) + block, rank)
    else:
        tl.store(processed + row * vocab_size + ids, x, mask=ids < vocab_size)
        tl.store(highest + row * tl.num_programs(1) + block, tl.max(order_key(x)))


@triton.jit(do_not_specialize=["rows_per_slot", "position_stride_0", "position_stride_1", "stream"])
def kept_draw_kernel(
    processed, thresholds, positions, temperature, min_p, seed, ranks, rows_per_slot, position_stride_0,
    position_stride_1, stream, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the greatest rank of a block of a processed row among the tokens that truncation
    keeps."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(processed + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    survives = is_kept(x, ids, thresholds, temperature, min_p, row, row // rows_per_slot)
    rank = block_rank(
        tl.where(survives, x, float("-inf")), seed, positions, temperature, row, rows_per_slot,
        position_stride_0, position_stride_1, stream, block * BLOCK, ids, vocab_size, True, BLOCK,
    )  # fmt: skip
    tl.store(ranks + row * tl.num_programs(1) + block, rank)


@triton.jit
def load_weights(
    processed, highest, thresholds, temperature, min_p, row, slot, ids, vocab_size, highest_blocks,
    TRUNCATION: tl.constexpr, HIGHEST_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return unnormalised probabilities of a block of ids, True for the likeliest, and its order
    key."""
    top_key = row_highest(highest, row, highest_blocks, HIGHEST_BLOCKS)
    x = tl.load(processed + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    weights = tl.exp(x - value_of_key(top_key))
    if TRUNCATION:
        survives = is_kept(x, ids, thresholds, temperature, min_p, row, slot)
        weights = tl.where(survives, weights, 0.0)
    return (
        tl.where(ids < vocab_size, weights, 0.0),
        (order_key(x) == top_key) & (ids < vocab_size),
        top_key,
    )


@triton.jit(do_not_specialize=["rows_per_slot"])
def weigh_kernel(
    processed, highest, thresholds, temperature, min_p, sums, firsts, rows_per_slot, vocab_size,
    highest_blocks, TRUNCATION: tl.constexpr, HIGHEST_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block's sum of weights, float32 [rows, blocks], and the lowest id that is the
    likeliest."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    weights, likeliest, _ = load_weights(
        processed, highest, thresholds, temperature, min_p, row, row // rows_per_slot, ids, vocab_size,
        highest_blocks, TRUNCATION, HIGHEST_BLOCKS,
    )  # fmt: skip
    at = row * tl.num_programs(1) + block
    tl.store(sums + at, tl.sum(weights))
    tl.store(firsts + at, tl.min(tl.where(likeliest, ids, MAGNITUDE)))


@triton.jit(do_not_specialize=["rows_per_slot"])
def law_kernel(
    processed, highest, thresholds, temperature, min_p, sums, firsts, rows_per_slot, vocab_size,
    highest_blocks, TRUNCATION: tl.constexpr, NOISE: tl.constexpr, HIGHEST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite a block of a row's processed logits with its distribution."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = row // rows_per_slot
    ids = block * BLOCK + tl.arange(0, BLOCK)
    weights, _, top_key = load_weights(
        processed, highest, thresholds, temperature, min_p, row, slot, ids, vocab_size, highest_blocks,
        TRUNCATION, HIGHEST_BLOCKS,
    )  # fmt: skip
    index = tl.arange(0, HIGHEST_BLOCKS)
    at = row * tl.num_programs(1) + index
    inside = index < tl.num_programs(1)
    distribution = (ids == tl.min(tl.load(firsts + at, mask=inside, other=MAGNITUDE))).to(
        tl.float32
    )
    if NOISE:
        total = tl.sum(tl.load(sums + at, mask=inside, other=0.0))
        distribution = tl.where(
            tl.load(temperature + slot) > 0, tl.div_rn(weights, total), distribution
        )
    is_finite = (top_key > KEY_OF_MINUS_INFINITY) & (top_key < KEY_OF_INFINITY)
    tl.store(
        processed + row * vocab_size + ids,
        tl.where(is_finite, distribution, float("nan")),
        mask=ids < vocab_size,
    )


def sample_rows(
    logits: Tensor,
    draft: Tensor,
    positions: Tensor,
    tensors: SamplingTensors,
    stream: int = STREAM_TARGET,
) -> tuple[Tensor, Tensor]:
    """Launch `Kernels.sample_rows`; all tensors but draft and positions are contiguous."""
    slots, rows_per_slot, vocab_size = logits.shape
    rows = slots * rows_per_slot
    blocks = ceil_div(vocab_size, BLOCK)
    device = logits.device
    ranks = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    if tensors.truncation and tensors.noise:
        processed, highest = _process(logits, draft, tensors)
        thresholds = find_thresholds(processed, highest, rows_per_slot, tensors)
        kept_draw_kernel[rows, blocks](
            processed, thresholds, positions, tensors.temperature, tensors.min_p, tensors.seed, ranks,
            rows_per_slot, positions.stride(0), positions.stride(1), stream, vocab_size, **OPTIONS,
        )  # fmt: skip
    else:
        _launch_process(logits, draft, tensors, ranks=ranks, positions=positions, stream=stream)
    sampled = torch.empty(slots, rows_per_slot, dtype=torch.int64, device=device)
    finite = torch.empty_like(sampled, dtype=torch.bool)
    choose_kernel[(rows,)](
        ranks, sampled, finite, blocks, BLOCK=power_of_two(blocks), PDL=0, num_warps=1
    )
    return sampled, finite


def row_distributions(logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> Tensor:
    """Launch `Kernels.row_distributions`; all tensors but draft are contiguous."""
    rows_per_slot, vocab_size = logits.shape[1:]
    processed, highest = _process(logits, draft, tensors)
    rows, blocks = highest.shape
    truncation = tensors.truncation and tensors.noise
    thresholds = (
        find_thresholds(processed, highest, rows_per_slot, tensors) if truncation else highest
    )
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    firsts = torch.empty_like(highest)
    arguments = (
        processed,
        highest,
        thresholds,
        tensors.temperature,
        tensors.min_p,
        sums,
        firsts,
        rows_per_slot,
        vocab_size,
        blocks,
    )
    options = {**OPTIONS, "TRUNCATION": truncation, "HIGHEST_BLOCKS": power_of_two(blocks)}
    weigh_kernel[rows, blocks](*arguments, **options)
    law_kernel[rows, blocks](*arguments, NOISE=tensors.noise, **options)
    return processed.view(logits.shape)


def _process(logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Return rows before truncation, float32 [S R, V], and order keys int32 [S R, blocks].

    The maximum of a row's keys is its highest logit's. See `sampling.process_rows`.
    """
    rows = logits.shape[0] * logits.shape[1]
    vocab_size = logits.shape[2]
    processed = logits.new_empty(rows, vocab_size)
    highest = logits.new_empty(rows, ceil_div(vocab_size, BLOCK), dtype=torch.int32)
    _launch_process(logits, draft, tensors, processed=processed, highest=highest)
    return processed, highest


def _launch_process(
    logits: Tensor,
    draft: Tensor,
    tensors: SamplingTensors,
    *,
    ranks: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    processed: Tensor | None = None,
    highest: Tensor | None = None,
) -> None:
    """Launch the steps before truncation, for ranks at positions, or else for processed and
    highest."""
    slots, rows_per_slot, vocab_size = logits.shape
    mask_stride, mask_words = (0, 0) if tensors.mask is None else tensors.mask.stride()[:2]
    slot_stride, row_stride = (0, 0) if positions is None else positions.stride()
    process_kernel[slots * rows_per_slot, ceil_div(vocab_size, BLOCK)](
        logits,
        draft,
        positions,
        tensors.temperature,
        tensors.repetition_penalty,
        tensors.presence_penalty,
        tensors.frequency_penalty,
        tensors.seed,
        tensors.bias,
        tensors.in_prompt,
        tensors.generated,
        tensors.stop_ids,
        tensors.length,
        tensors.min_length,
        tensors.mask,
        ranks,
        processed,
        highest,
        rows_per_slot,
        draft.stride(0),
        mask_stride,
        mask_words,
        slot_stride,
        row_stride,
        stream,
        vocab_size,
        tensors.usable_vocab,
        STOPS=tensors.stop_ids.shape[1],
        NOISE=tensors.noise,
        **OPTIONS,
    )
