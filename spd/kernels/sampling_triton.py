# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Every row's token from its logits on the GPU: one pass where nothing is truncated, else a few.

A program takes one block of one row's vocabulary. What blocks say of a row is put together as integers
(`draw_rank`), whose maximum depends on no order. Truncated rows are first written out processed, then
`truncation_triton` finds each row's last kept token, then the kept ones are drawn from.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import Signature, ceil_div, power_of_two
from spd.kernels.philox import STREAM_TARGET
from spd.kernels.philox_triton import (
    NO_RANK,
    draw_rank,
    gumbel_of,
    interleave4,
    order_key,
    random_bits4,
    rank_is_finite,
    rank_token,
    scaled_logit,
)
from spd.kernels.sampling import SamplingSteps, SamplingTensors
from spd.kernels.truncation_triton import find_thresholds, is_kept
from spd.kernels.truncation_triton import signatures as truncation_signatures

BLOCK = 2048
"""Token ids a program; a multiple of 4."""
WARPS = 8

VARYING = [
    *("rows_per_slot", "draft_stride", "mask_stride", "mask_words", "position_stride_0", "position_stride_1"),
    "stream",
]
"""What differs between calls of one model, and must therefore not choose the program."""


@triton.jit
def processed_logits(
    logits, draft, bias, in_prompt, generated, repetition, presence, frequency, temperature, stop_ids,
    length, min_length, mask, row, rows_per_slot, draft_stride, mask_stride, mask_words, ids,
    vocab_size, usable_vocab,
    STOPS: tl.constexpr, BIAS: tl.constexpr, PENALTIES: tl.constexpr, MIN_LENGTH: tl.constexpr,
    MASK: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """A row's logits of a block of ids after every step before truncation; -inf beyond the vocabulary."""
    slot, number = row // rows_per_slot, row % rows_per_slot
    inside = ids < vocab_size
    x = tl.load(logits + row * vocab_size + ids, mask=ids < usable_vocab, other=float("-inf"))
    if BIAS:
        x += tl.load(bias + slot * vocab_size + ids, mask=inside, other=0.0)
    if PENALTIES:
        counts = tl.load(generated + slot * vocab_size + ids, mask=inside, other=0)
        seen = tl.load(in_prompt + slot * vocab_size + ids, mask=inside, other=0) != 0
        for i in range(number):
            counts += (ids == tl.load(draft + slot * draft_stride + i)).to(tl.int32)
        strength = tl.load(repetition + slot)
        repeated = tl.where(x > 0, tl.div_rn(x, strength), x * strength)
        x = tl.where((counts > 0) | seen, repeated, x)
        x = x - tl.load(frequency + slot) * counts.to(tl.float32)
        x = x - tl.load(presence + slot) * (counts > 0).to(tl.float32)
    if MIN_LENGTH:
        early = tl.load(length + slot) + number < tl.load(min_length + slot)
        for j in range(tl.where(early, STOPS, 0)):
            x = tl.where(ids == tl.load(stop_ids + slot * STOPS + j), float("-inf"), x)
    if MASK:
        words = mask + slot * mask_stride + number * mask_words
        word = tl.load(words + (ids >> 5), mask=inside, other=0)
        x = tl.where(((word >> (ids & 31)) & 1) != 0, x, float("-inf"))
    if NOISE:
        x = scaled_logit(x, tl.load(temperature + slot))
    return x


@triton.jit
def block_rank(
    x, seed, positions, temperature, row, rows_per_slot, position_stride_0, position_stride_1,
    stream, first, ids, vocab_size, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The greatest rank of a block of a row's processed logits."""
    if NOISE:
        slot, number = row // rows_per_slot, row % rows_per_slot
        if tl.load(temperature + slot) > 0:
            position = tl.load(positions + slot * position_stride_0 + number * position_stride_1)
            groups = first // 4 + tl.arange(0, BLOCK // 4)
            bits0, bits1, bits2, bits3 = random_bits4(tl.load(seed + slot), position, stream, groups)
            x = x + gumbel_of(interleave4(bits0, bits1, bits2, bits3))
    return tl.max(tl.where(ids < vocab_size, draw_rank(x, ids), NO_RANK))


@triton.jit(do_not_specialize=VARYING)
def draw_kernel(
    logits, draft, positions, temperature, repetition, presence, frequency, seed, bias, in_prompt,
    generated, stop_ids, length, min_length, mask, ranks, rows_per_slot, draft_stride, mask_stride,
    mask_words, position_stride_0, position_stride_1, stream, vocab_size, usable_vocab, STOPS: tl.constexpr,
    BIAS: tl.constexpr, PENALTIES: tl.constexpr, MIN_LENGTH: tl.constexpr, MASK: tl.constexpr,
    NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process a block of a row and write its greatest rank: int64 [rows, blocks]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = processed_logits(
        logits, draft, bias, in_prompt, generated, repetition, presence, frequency, temperature, stop_ids,
        length, min_length, mask, row, rows_per_slot, draft_stride, mask_stride, mask_words, ids, vocab_size,
        usable_vocab, STOPS, BIAS, PENALTIES, MIN_LENGTH, MASK, NOISE,
    )  # fmt: skip
    rank = block_rank(
        x, seed, positions, temperature, row, rows_per_slot, position_stride_0, position_stride_1, stream,
        block * BLOCK, ids, vocab_size, NOISE, BLOCK,
    )  # fmt: skip
    tl.store(ranks + row * tl.num_programs(1) + block, rank)


@triton.jit(do_not_specialize=["rows_per_slot", "draft_stride", "mask_stride", "mask_words"])
def process_kernel(
    logits, draft, temperature, repetition, presence, frequency, bias, in_prompt, generated, stop_ids,
    length, min_length, mask, processed, highest, rows_per_slot, draft_stride, mask_stride, mask_words,
    vocab_size, usable_vocab, STOPS: tl.constexpr, BIAS: tl.constexpr, PENALTIES: tl.constexpr,
    MIN_LENGTH: tl.constexpr, MASK: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's processed block, float32 [rows, V], and its highest order key, int32 [rows, blocks]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = processed_logits(
        logits, draft, bias, in_prompt, generated, repetition, presence, frequency, temperature, stop_ids,
        length, min_length, mask, row, rows_per_slot, draft_stride, mask_stride, mask_words, ids, vocab_size,
        usable_vocab, STOPS, BIAS, PENALTIES, MIN_LENGTH, MASK, NOISE,
    )  # fmt: skip
    tl.store(processed + row * vocab_size + ids, x, mask=ids < vocab_size)
    tl.store(highest + row * tl.num_programs(1) + block, tl.max(order_key(x)))


@triton.jit(do_not_specialize=["rows_per_slot", "position_stride_0", "position_stride_1", "stream"])
def kept_draw_kernel(
    processed, thresholds, positions, temperature, min_p, seed, ranks, rows_per_slot, position_stride_0,
    position_stride_1, stream, vocab_size, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The greatest rank of a block of a processed row among the tokens that truncation keeps."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(processed + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    kept = is_kept(x, ids, thresholds, temperature, min_p, row, row // rows_per_slot)
    rank = block_rank(
        tl.where(kept, x, float("-inf")), seed, positions, temperature, row, rows_per_slot,
        position_stride_0, position_stride_1, stream, block * BLOCK, ids, vocab_size, NOISE, BLOCK,
    )  # fmt: skip
    tl.store(ranks + row * tl.num_programs(1) + block, rank)


@triton.jit
def choose_kernel(ranks, sampled, finite, blocks, BLOCKS: tl.constexpr):
    """The token of a row's greatest rank, and whether its logit is finite."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    rank = tl.max(tl.load(ranks + row * blocks + block, mask=block < blocks, other=NO_RANK))
    tl.store(sampled + row, rank_token(rank))
    tl.store(finite + row, rank_is_finite(rank))


def sample_rows(
    logits: Tensor,
    draft: Tensor,
    positions: Tensor,
    tensors: SamplingTensors,
    steps: SamplingSteps,
    usable_vocab: int,
    stream: int = STREAM_TARGET,
) -> tuple[Tensor, Tensor]:
    """See `sampling.sample_rows`; every tensor but draft and positions lies dense."""
    slots, rows_per_slot, vocab_size = logits.shape
    rows, blocks = slots * rows_per_slot, ceil_div(vocab_size, BLOCK)
    grid, device = (rows, blocks), logits.device
    ranks = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    where = (rows_per_slot, positions.stride(0), positions.stride(1), stream, vocab_size)
    noise: dict[str, Any] = {
        "NOISE": steps.noise, "BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": False
    }  # fmt: skip
    if steps.truncation and steps.noise:
        processed, highest = processed_rows(logits, draft, tensors, steps, usable_vocab)
        thresholds = find_thresholds(processed, highest, rows_per_slot, tensors)
        kept_draw_kernel[grid](
            processed, thresholds, positions, tensors.temperature, tensors.min_p, tensors.seed, ranks,
            *where, **noise,
        )  # fmt: skip
    else:
        flags, numbers, history = _parameters(logits, tensors, steps)
        draw_kernel[grid](
            logits, draft, positions, *numbers, tensors.seed, *history, ranks, rows_per_slot,
            draft.stride(0), *_mask_strides(tensors), *where[1:], usable_vocab, **flags, **noise,
        )  # fmt: skip
    sampled = torch.empty(slots, rows_per_slot, dtype=torch.int64, device=device)
    finite = torch.empty(slots, rows_per_slot, dtype=torch.bool, device=device)
    choose_kernel[(rows,)](ranks, sampled, finite, blocks, BLOCKS=power_of_two(blocks), num_warps=1)
    return sampled, finite


def processed_rows(
    logits: Tensor, draft: Tensor, tensors: SamplingTensors, steps: SamplingSteps, usable_vocab: int
) -> tuple[Tensor, Tensor]:
    """Rows before truncation, float32 [S R, V], and order keys whose maximum is each row's highest.

    int32 [S R, blocks]; see `sampling.process_rows`.
    """
    slots, rows_per_slot, vocab_size = logits.shape
    rows, blocks = slots * rows_per_slot, ceil_div(vocab_size, BLOCK)
    processed = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    highest = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    flags, numbers, history = _parameters(logits, tensors, steps)
    process_kernel[rows, blocks](
        logits, draft, *numbers, *history, processed, highest, rows_per_slot, draft.stride(0),
        *_mask_strides(tensors), vocab_size, usable_vocab, **flags, NOISE=steps.noise, BLOCK=BLOCK,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return processed, highest


def _mask_strides(tensors: SamplingTensors) -> tuple[int, int]:
    return (0, 0) if tensors.mask is None else (tensors.mask.stride(0), tensors.mask.stride(1))


def _parameters(
    logits: Tensor, tensors: SamplingTensors, steps: SamplingSteps
) -> tuple[dict[str, Any], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Which steps look at a slot's history, its numbers, and its history; absent tensors are never read."""
    bias, in_prompt, generated = tensors.bias, tensors.in_prompt, tensors.generated
    flags = {
        "STOPS": tensors.stop_ids.shape[1],
        "BIAS": steps.bias and bias is not None,
        "PENALTIES": steps.penalties and in_prompt is not None and generated is not None,
        "MIN_LENGTH": steps.min_length,
        "MASK": steps.grammar and tensors.mask is not None,
    }
    numbers = (
        tensors.temperature,
        tensors.repetition_penalty,
        tensors.presence_penalty,
        tensors.frequency_penalty,
    )
    absent = logits
    history = (
        absent if bias is None else bias,
        absent if in_prompt is None else in_prompt,
        absent if generated is None else generated,
        tensors.stop_ids,
        tensors.length,
        tensors.min_length,
        absent if tensors.mask is None else tensors.mask,
    )
    return flags, numbers, history


def signatures() -> dict[str, Signature]:
    """Every kernel for the vocabulary of an 8B model, with all steps and with as few as can be."""
    blocks = ceil_div(151936, BLOCK)
    types = {
        **dict.fromkeys(("logits", "bias", "processed"), "*fp32"),
        **dict.fromkeys(("temperature", "repetition", "presence", "frequency", "min_p"), "*fp32"),
        **dict.fromkeys(("draft", "positions", "seed", "stop_ids", "length", "min_length"), "*i64"),
        **dict.fromkeys(("generated", "highest", "thresholds", "mask"), "*i32"),
        **dict.fromkeys((*VARYING, "vocab_size", "usable_vocab", "blocks"), "i32"),
        **{"in_prompt": "*i1", "finite": "*i1", "ranks": "*i64", "sampled": "*i64"},
    }
    every = {"STOPS": 24, "BIAS": True, "PENALTIES": True, "MIN_LENGTH": True, "MASK": True}
    none = {"STOPS": 24, "BIAS": False, "PENALTIES": False, "MIN_LENGTH": False, "MASK": False}
    noise, greedy = {"NOISE": True, "BLOCK": BLOCK}, {"NOISE": False, "BLOCK": BLOCK}
    exact = {"num_warps": WARPS, "enable_fp_fusion": False}
    kernels: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "draw_greedy": (draw_kernel, {**none, **greedy}, exact),
        "draw_noise": (draw_kernel, {**none, **noise}, exact),
        "draw_every_step": (draw_kernel, {**every, **noise}, exact),
        "process": (process_kernel, {**none, **noise}, exact),
        "process_every_step": (process_kernel, {**every, **noise}, exact),
        "kept_draw": (kept_draw_kernel, noise, exact),
        "choose": (choose_kernel, {"BLOCKS": power_of_two(blocks)}, {"num_warps": 1}),
    }
    own = {
        name: Signature(
            kernel,
            {key: types[key] for key in kernel.arg_names if key in types},
            constants,
            options,
            (*VARYING, "blocks"),
        )
        for name, (kernel, constants, options) in kernels.items()
    }
    return {**own, **truncation_signatures()}
