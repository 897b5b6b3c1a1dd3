# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Every row's token from its logits on the GPU: one pass where nothing is truncated, else a few.

A program takes one block of one row's vocabulary. What blocks say of a row is put together as integers
(`draw_rank`), whose maximum depends on no order. Truncated rows are first written out processed, then
`truncation_triton` finds each row's last kept token, then the kept ones are drawn from. A row's law is its
processed logits' weights, summed block by block in a fixed order, so it depends on no other row.
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
    gumbel_of,
    interleave4,
    key_value,
    order_key,
    random_bits4,
    scaled_logit,
)
from spd.kernels.sampling.sampling import SamplingTensors
from spd.kernels.sampling.truncation_triton import find_thresholds, is_kept, row_highest

BLOCK = 2048
"""Token ids a program; a multiple of 4."""
OPTIONS: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}

VARYING = [
    "rows_per_slot",
    "draft_stride",
    "mask_stride",
    "mask_words",
    "position_stride_0",
    "position_stride_1",
    "stream",
]
"""What differs between calls of one model, and must therefore not choose the program."""


@triton.jit
def block_rank(
    x, seed, positions, temperature, row, rows_per_slot, position_stride_0, position_stride_1,
    stream, first, ids, vocab_size, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The greatest rank of a block of a row's processed logits."""
    if NOISE:
        slot = row // rows_per_slot
        number = row % rows_per_slot
        if tl.load(temperature + slot) > 0:
            position = tl.load(positions + slot * position_stride_0 + number * position_stride_1)
            groups = first // 4 + tl.arange(0, BLOCK // 4)
            bits0, bits1, bits2, bits3 = random_bits4(
                tl.load(seed + slot), position, stream, groups
            )
            x = x + gumbel_of(interleave4(bits0, bits1, bits2, bits3))
    return tl.max(tl.where(ids < vocab_size, draw_rank(x, ids), NO_RANK))


@triton.jit(do_not_specialize=VARYING)
def process_kernel(
    logits, draft, positions, temperature, repetition, presence, frequency, seed, bias, in_prompt,
    generated, stop_ids, length, min_length, mask, ranks, processed, highest, rows_per_slot, draft_stride,
    mask_stride, mask_words, position_stride_0, position_stride_1, stream, vocab_size, usable_vocab,
    STOPS: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take every step before truncation with a block of a row's logits; -inf beyond the vocabulary.

    Write its greatest rank, int64 [rows, blocks], where there are ranks. Else the processed block, float32
    [rows, V], and its highest order key, int32 [rows, blocks].
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
    """The greatest rank of a block of a processed row among the tokens that truncation keeps."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(processed + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    kept = is_kept(x, ids, thresholds, temperature, min_p, row, row // rows_per_slot)
    rank = block_rank(
        tl.where(kept, x, float("-inf")), seed, positions, temperature, row, rows_per_slot,
        position_stride_0, position_stride_1, stream, block * BLOCK, ids, vocab_size, True, BLOCK,
    )  # fmt: skip
    tl.store(ranks + row * tl.num_programs(1) + block, rank)


@triton.jit
def weights_of(
    processed, highest, thresholds, temperature, min_p, row, slot, ids, vocab_size, highest_blocks,
    TRUNCATION: tl.constexpr, HIGHEST_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Unnormalised probabilities of a block of ids, whether each is the likeliest, and that one's key."""
    top_key = row_highest(highest, row, highest_blocks, HIGHEST_BLOCKS)
    x = tl.load(processed + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    weights = tl.exp(x - key_value(top_key))
    if TRUNCATION:
        kept = is_kept(x, ids, thresholds, temperature, min_p, row, slot)
        weights = tl.where(kept, weights, 0.0)
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
    """A block's sum of weights, float32 [rows, blocks], and the lowest id that is the row's likeliest."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    weights, likeliest, _ = weights_of(
        processed, highest, thresholds, temperature, min_p, row, row // rows_per_slot, ids, vocab_size,
        highest_blocks, TRUNCATION, HIGHEST_BLOCKS,
    )  # fmt: skip
    at = row * tl.num_programs(1) + block
    tl.store(sums + at, tl.sum(weights))
    tl.store(firsts + at, tl.min(tl.where(likeliest, ids, MAGNITUDE)))


@triton.jit(do_not_specialize=["rows_per_slot"])
def distribution_kernel(
    processed, highest, thresholds, temperature, min_p, sums, firsts, rows_per_slot, vocab_size,
    highest_blocks, TRUNCATION: tl.constexpr, NOISE: tl.constexpr, HIGHEST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block of a row's law in the place of its processed logits."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = row // rows_per_slot
    ids = block * BLOCK + tl.arange(0, BLOCK)
    weights, _, top_key = weights_of(
        processed, highest, thresholds, temperature, min_p, row, slot, ids, vocab_size, highest_blocks,
        TRUNCATION, HIGHEST_BLOCKS,
    )  # fmt: skip
    index = tl.arange(0, HIGHEST_BLOCKS)
    at = row * tl.num_programs(1) + index
    inside = index < tl.num_programs(1)
    law = (ids == tl.min(tl.load(firsts + at, mask=inside, other=MAGNITUDE))).to(tl.float32)
    if NOISE:
        total = tl.sum(tl.load(sums + at, mask=inside, other=0.0))
        law = tl.where(tl.load(temperature + slot) > 0, tl.div_rn(weights, total), law)
    sound = (top_key > KEY_OF_MINUS_INFINITY) & (top_key < KEY_OF_INFINITY)
    tl.store(
        processed + row * vocab_size + ids,
        tl.where(sound, law, float("nan")),
        mask=ids < vocab_size,
    )


def sample_rows(
    logits: Tensor,
    draft: Tensor,
    positions: Tensor,
    tensors: SamplingTensors,
    stream: int = STREAM_TARGET,
) -> tuple[Tensor, Tensor]:
    """Every tensor but draft and positions lies dense."""
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
        _process(logits, draft, tensors, (ranks, positions, stream))
    sampled = torch.empty(slots, rows_per_slot, dtype=torch.int64, device=device)
    finite = torch.empty_like(sampled, dtype=torch.bool)
    choose_kernel[(rows,)](
        ranks, sampled, finite, blocks, BLOCK=power_of_two(blocks), PDL=0, num_warps=1
    )
    return sampled, finite


def row_distributions(logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> Tensor:
    """Every tensor but draft lies dense."""
    rows_per_slot, vocab_size = logits.shape[1:]
    processed, highest = _process(logits, draft, tensors)
    rows, blocks = highest.shape
    truncation = tensors.truncation and tensors.noise
    thresholds = (
        find_thresholds(processed, highest, rows_per_slot, tensors) if truncation else highest
    )
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    firsts = torch.empty_like(highest)
    row = (processed, highest, thresholds, tensors.temperature, tensors.min_p)
    arguments = (*row, sums, firsts, rows_per_slot, vocab_size, blocks)
    options = {**OPTIONS, "TRUNCATION": truncation, "HIGHEST_BLOCKS": power_of_two(blocks)}
    weigh_kernel[rows, blocks](*arguments, **options)
    distribution_kernel[rows, blocks](*arguments, NOISE=tensors.noise, **options)
    return processed.view(logits.shape)


def _process(
    logits: Tensor, draft: Tensor, tensors: SamplingTensors, draw: tuple[Any, ...] = (None, None, 0)
) -> tuple[Tensor, Tensor]:
    """Rows before truncation, float32 [S R, V], and order keys whose maximum is each row's highest.

    int32 [S R, blocks]; see `sampling.process_rows`. Nothing where the blocks' ranks are to be written, of a
    draw (ranks, positions, stream).
    """
    ranks, positions, stream = draw
    own = tensors
    slots, rows_per_slot, vocab_size = logits.shape
    rows = slots * rows_per_slot
    blocks = ceil_div(vocab_size, BLOCK)
    made: tuple[Any, Any] = (None, None)
    if ranks is None:
        made = logits.new_empty(rows, vocab_size), logits.new_empty(rows, blocks, dtype=torch.int32)
    numbers = (
        own.temperature,
        own.repetition_penalty,
        own.presence_penalty,
        own.frequency_penalty,
        own.seed,
    )
    history = (
        own.bias,
        own.in_prompt,
        own.generated,
        own.stop_ids,
        own.length,
        own.min_length,
        own.mask,
    )
    mask_strides = (0, 0) if own.mask is None else own.mask.stride()[:2]
    places = (0, 0) if positions is None else positions.stride()
    process_kernel[rows, blocks](
        logits, draft, positions, *numbers, *history, ranks, *made, rows_per_slot, draft.stride(0),
        *mask_strides, *places, stream, vocab_size, own.usable_vocab, STOPS=own.stop_ids.shape[1],
        NOISE=own.noise, **OPTIONS,
    )  # fmt: skip
    return made
