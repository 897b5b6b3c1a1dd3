# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `row_laws`: the rows processed as for a draw, then each block's weight, then the law.

A row's weights are summed block by block in a fixed order, so its law depends on no other row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels import sampling_triton
from spd.kernels.launch import Signature, ceil_div, power_of_two
from spd.kernels.philox_triton import (
    KEY_OF_INFINITY,
    KEY_OF_MINUS_INFINITY,
    MAGNITUDE,
    key_value,
    order_key,
)
from spd.kernels.sampling import SamplingSteps, SamplingTensors
from spd.kernels.truncation_triton import find_thresholds, is_kept, row_highest

NAN = tl.constexpr(float("nan"))


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
    return tl.where(ids < vocab_size, weights, 0.0), (order_key(x) == top_key) & (ids < vocab_size), top_key


@triton.jit(do_not_specialize=["rows_per_slot"])
def weigh_kernel(
    processed, highest, thresholds, temperature, min_p, sums, firsts, rows_per_slot, vocab_size,
    highest_blocks, TRUNCATION: tl.constexpr, HIGHEST_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block's sum of weights, float32 [rows, blocks], and the lowest id that is the row's likeliest."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    weights, likeliest, _ = weights_of(
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
    """Write a block of a row's law in the place of its processed logits."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, ids = row // rows_per_slot, block * BLOCK + tl.arange(0, BLOCK)
    weights, _, top_key = weights_of(
        processed, highest, thresholds, temperature, min_p, row, slot, ids, vocab_size, highest_blocks,
        TRUNCATION, HIGHEST_BLOCKS,
    )  # fmt: skip
    index = tl.arange(0, HIGHEST_BLOCKS)
    at, inside = row * tl.num_programs(1) + index, index < tl.num_programs(1)
    law = (ids == tl.min(tl.load(firsts + at, mask=inside, other=MAGNITUDE))).to(tl.float32)
    if NOISE:
        total = tl.sum(tl.load(sums + at, mask=inside, other=0.0))
        law = tl.where(tl.load(temperature + slot) > 0, tl.div_rn(weights, total), law)
    sound = (top_key > KEY_OF_MINUS_INFINITY) & (top_key < KEY_OF_INFINITY)
    tl.store(processed + row * vocab_size + ids, tl.where(sound, law, NAN), mask=ids < vocab_size)


def row_laws(
    logits: Tensor, draft: Tensor, tensors: SamplingTensors, steps: SamplingSteps, usable_vocab: int
) -> Tensor:
    """See `row_laws.row_laws`; every tensor but draft lies dense."""
    slots, rows_per_slot, vocab_size = logits.shape
    processed, highest = sampling_triton.processed_rows(logits, draft, tensors, steps, usable_vocab)
    rows, blocks = highest.shape
    truncation = steps.truncation and steps.noise
    thresholds = find_thresholds(processed, highest, rows_per_slot, tensors) if truncation else highest
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    firsts = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    arguments = (
        processed, highest, thresholds, tensors.temperature, tensors.min_p, sums, firsts, rows_per_slot,
        vocab_size, blocks,
    )  # fmt: skip
    options: dict[str, Any] = {
        "TRUNCATION": truncation, "HIGHEST_BLOCKS": power_of_two(blocks),
        "BLOCK": sampling_triton.BLOCK, "num_warps": sampling_triton.WARPS, "enable_fp_fusion": False,
    }  # fmt: skip
    weigh_kernel[rows, blocks](*arguments, **options)
    law_kernel[rows, blocks](*arguments, NOISE=steps.noise, **options)
    return processed.view(slots, rows_per_slot, vocab_size)


def signatures() -> dict[str, Signature]:
    """Both kernels for the vocabulary of an 8B model, with truncation and without."""
    types = {
        **dict.fromkeys(("processed", "temperature", "min_p", "sums"), "*fp32"),
        **dict.fromkeys(("highest", "thresholds", "firsts"), "*i32"),
        **dict.fromkeys(("rows_per_slot", "vocab_size", "highest_blocks"), "i32"),
    }
    options = {"num_warps": sampling_triton.WARPS, "enable_fp_fusion": False}
    block = sampling_triton.BLOCK
    found = {}
    for name, truncation in (("plain", False), ("truncated", True)):
        sizes = {"HIGHEST_BLOCKS": power_of_two(ceil_div(151936, block)), "BLOCK": block}
        for kernel, constants in ((weigh_kernel, {}), (law_kernel, {"NOISE": True})):
            found[f"row_{'law' if constants else 'weights'}_{name}"] = Signature(
                kernel,
                types,
                {"TRUNCATION": truncation, **constants, **sizes},
                options,
                ("rows_per_slot", "highest_blocks"),
            )
    return found
