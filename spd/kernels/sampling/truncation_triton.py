# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The exact end of top-k and top-p in each row of processed logits, by many programs a row.

Tokens are ordered by (logit descending, id ascending), logits as integers of the same order. Two
passes over all blocks count tokens and sum their masses above 16 bounds each, which leaves a narrow
interval of logits; its tokens are listed, and one program a row bisects the list. All sums are of
integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spd.kernels.launch import ceil_div, power_of_two
from spd.kernels.sampling.philox_triton import order_key, value_of_key
from spd.kernels.sampling.sampling import (
    EXP2,
    FLOAT32_LOG2_E,
    LOWEST_EXPONENT,
    MASS_BITS,
    SamplingTensors,
)

LOG_BASE = tl.constexpr(FLOAT32_LOG2_E)
LOWEST_POWER = tl.constexpr(LOWEST_EXPONENT)
C6, C5, C4, C3, C2, C1, C0 = map(tl.constexpr, EXP2)
ONE = tl.constexpr(2.0**MASS_BITS)

BOUNDS = tl.constexpr(16)
SPACING = tl.constexpr(1.5)
"""The distance of the first pass's bounds below the row's highest logit, in nats."""
LOWEST_KEY = tl.constexpr(-(2**31))
"""A key below that of every value."""
HIGHEST_KEY = tl.constexpr(2**31 - 1)
COUNT_SHIFT = tl.constexpr(45)
ONE_TOKEN = tl.constexpr(2**45)
"""One token in an integer that holds a block's count above its sum of masses, 4096 times 2**32 at
most."""

BLOCK = 4096
"""Token ids a program; at most 4096, see COUNT_SHIFT."""
CHUNK = 2048
"""Listed tokens that the bisecting program reads at a time."""
WARPS = 8


@triton.jit
def token_mass(value, highest):
    """Compute `sampling.token_mass`; a kernel that calls it must not fuse products and sums."""
    power = (value - highest) * LOG_BASE
    power = tl.where(power > LOWEST_POWER, power, LOWEST_POWER)
    integer = tl.floor(power)
    part = power - integer
    mass = (((((C6 * part + C5) * part + C4) * part + C3) * part + C2) * part + C1) * part + C0
    return (mass * ONE).to(tl.int64) >> (-integer).to(tl.int64)


@triton.jit
def mass_limit(share, total):
    """Return share * total rounded up; share float32, total int64 below 2**53."""
    return tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit
def row_cuts(temperature, top_k, top_p, slot, vocab_size):
    """Return (True if top-k cuts, True if top-p cuts, k, p) of a slot.

    Neither cuts at temperatures <= 0.
    """
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    noisy = tl.load(temperature + slot) > 0
    return noisy & (k > 0) & (k < vocab_size), noisy & (p < 1), k, p


@triton.jit
def row_highest(highest, row, highest_blocks, HIGHEST_BLOCKS: tl.constexpr):
    """Return the highest order key of a row."""
    block = tl.arange(0, HIGHEST_BLOCKS)
    keys = tl.load(
        highest + row * highest_blocks + block, mask=block < highest_blocks, other=LOWEST_KEY
    )
    return tl.max(keys)


@triton.jit
def load_keys(processed, row, ids, vocab_size):
    """Load the order keys of a row's token ids; LOWEST_KEY beyond the vocabulary."""
    x = tl.load(processed + row * vocab_size + ids, mask=ids < vocab_size, other=0.0)
    return tl.where(ids < vocab_size, order_key(x), LOWEST_KEY)


@triton.jit
def first_bound(top, i):
    """Return bound i of the first pass, descending from the highest logit, top, to below all keys;
    int64."""
    return tl.where(i == BOUNDS - 1, LOWEST_KEY, order_key(top - i * SPACING)).to(tl.int64)


@triton.jit
def second_bound(low, high, i):
    """Return bound i of the second pass, descending in even steps from high to low."""
    return high - (high - low) * i // (BOUNDS - 1)


@triton.jit
def load_sums(sums, row, blocks, BLOCKS: tl.constexpr):
    """Load counts and masses above each bound in each block of a row: int64 [BLOCKS, BOUNDS]."""
    block = tl.arange(0, BLOCKS)[:, None]
    i = tl.arange(0, BOUNDS)[None, :]
    packed = tl.load(sums + (row * blocks + block) * BOUNDS + i, mask=block < blocks, other=0)
    count = packed >> COUNT_SHIFT
    return count, packed - (count << COUNT_SHIFT)


@triton.jit
def pick(values, i):
    """Return element i of a block of integers along its last axis."""
    return tl.sum(tl.where(tl.arange(0, BOUNDS) == i, values, 0), axis=len(values.shape) - 1)


@triton.jit
def first_reached(amounts, need):
    """Return the first bound with at least `need` above it; never bound 0, at most the last."""
    return tl.min(tl.where(amounts >= need, tl.arange(0, BOUNDS), BOUNDS - 1))


@triton.jit(do_not_specialize=["rows_per_slot"])
def narrow_kernel(
    processed, highest, temperature, top_k, top_p, before, sums, plan, rows_per_slot, vocab_size,
    highest_blocks, FIRST: tl.constexpr, HIGHEST_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count and sum a block of a row above each bound, of the full row or of the first pass's
    interval.

    sums int64 [rows, blocks, BOUNDS], and `before`, the first pass's; plan int64 [rows, 8], see
    collect.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    cuts_k, cuts_p, k, p = row_cuts(temperature, top_k, top_p, row // rows_per_slot, vocab_size)
    if cuts_k | cuts_p:
        top = value_of_key(row_highest(highest, row, highest_blocks, HIGHEST_BLOCKS))
        low = first_bound(top, BOUNDS - 1)
        high = first_bound(top, 0)
        if not FIRST:
            count_parts, mass_parts = load_sums(before, row, blocks, BLOCKS)
            counts = tl.sum(count_parts, axis=0)
            masses = tl.sum(mass_parts, axis=0)
            limit = mass_limit(p, pick(masses, BOUNDS - 1))
            by_count = cuts_k | (limit < 1)
            need = tl.where(cuts_k, k, tl.maximum(limit, 1))
            i = first_reached(tl.where(by_count, counts, masses), need)
            low = first_bound(top, i)
            high = first_bound(top, i - 1)
            if block == 0:
                tl.store(plan + row * 8, low)
                tl.store(plan + row * 8 + 1, high)
                tl.store(plan + row * 8 + 2, need)
                tl.store(plan + row * 8 + 3, by_count.to(tl.int64))
        key = load_keys(processed, row, block * BLOCK + tl.arange(0, BLOCK), vocab_size)
        amount = token_mass(value_of_key(key), top) + ONE_TOKEN
        out = sums + (row * blocks + block) * BOUNDS
        above = tl.sum(tl.where(key > high.to(tl.int32), amount, 0))
        total = tl.sum(tl.where(key > low.to(tl.int32), amount, 0))
        tl.store(out, above)
        tl.store(out + BOUNDS - 1, total)
        if above == total:  # nothing of this block lies between
            for i in tl.static_range(1, BOUNDS - 1):
                tl.store(out + i, above)
        else:
            for i in tl.static_range(1, BOUNDS - 1):
                if FIRST:
                    bound = order_key(top - i * SPACING)
                else:
                    bound = second_bound(low, high, i).to(tl.int32)
                tl.store(out + i, tl.sum(tl.where(key > bound, amount, 0)))


@triton.jit(do_not_specialize=["rows_per_slot"])
def collect_kernel(
    processed, highest, temperature, top_k, top_p, sums, plan, list_keys, list_ids, list_masses,
    rows_per_slot, vocab_size, highest_blocks, HIGHEST_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """List the tokens of the interval that the second pass leaves, in the order of ids.

    plan: the first interval (low, high], the amount needed, 1 if it is a count; stored here: the
    list's interval, the amount above it, the number of its tokens. Where top-p follows top-k, the
    list has all tokens above the interval, too. list_keys, list_ids int32 [rows, V], list_masses
    int64.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    cuts_k, cuts_p, _, _ = row_cuts(temperature, top_k, top_p, row // rows_per_slot, vocab_size)
    if cuts_k | cuts_p:
        low = tl.load(plan + row * 8)
        high = tl.load(plan + row * 8 + 1)
        need = tl.load(plan + row * 8 + 2)
        by_count = tl.load(plan + row * 8 + 3) != 0
        count_parts, mass_parts = load_sums(sums, row, blocks, BLOCKS)
        amounts = tl.where(by_count, tl.sum(count_parts, axis=0), tl.sum(mass_parts, axis=0))
        i = first_reached(amounts, need)
        both = cuts_k & cuts_p
        bottom = second_bound(low, high, i)
        top = tl.where(both, HIGHEST_KEY, second_bound(low, high, i - 1))
        listed = pick(count_parts, i) - tl.where(both, 0, pick(count_parts, i - 1))
        index = tl.arange(0, BLOCKS)
        if block == 0:
            tl.store(plan + row * 8 + 4, bottom)
            tl.store(plan + row * 8 + 5, top)
            tl.store(plan + row * 8 + 6, tl.where(both, 0, pick(amounts, i - 1)))
            tl.store(plan + row * 8 + 7, tl.sum(listed))
        if tl.sum(tl.where(index == block, listed, 0)) > 0:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            key = load_keys(processed, row, ids, vocab_size)
            chosen = (key > bottom.to(tl.int32)) & (key <= top.to(tl.int32))
            at = tl.sum(tl.where(index < block, listed, 0)) + tl.cumsum(chosen.to(tl.int32)) - 1
            tl.store(list_keys + row * vocab_size + at, key, mask=chosen)
            tl.store(list_ids + row * vocab_size + at, ids, mask=chosen)
            highest_value = value_of_key(row_highest(highest, row, highest_blocks, HIGHEST_BLOCKS))
            mass = token_mass(value_of_key(key), highest_value)
            tl.store(list_masses + row * vocab_size + at, mass, mask=chosen)


@triton.jit
def amount_above(keys, masses, listed, bound, by_count, CHUNK: tl.constexpr):
    """Return the count of the listed keys above a bound, or their mass: int64."""
    total = tl.zeros((CHUNK,), dtype=tl.int64)
    for start in range(0, listed, CHUNK):
        at = start + tl.arange(0, CHUNK)
        above = tl.load(keys + at, mask=at < listed, other=LOWEST_KEY) > bound.to(tl.int32)
        total += tl.where(by_count, above.to(tl.int64), tl.load(masses + at, mask=above, other=0))
    return tl.sum(total)


@triton.jit
def bisect(keys, masses, listed, low, high, base, need, by_count, CHUNK: tl.constexpr):
    """Return the highest key such that `need` is reached at or above it, and the amount above that
    key.

    It lies in (low, high]; base is the amount above the list.
    """
    beyond = base
    while high - low > 1:
        middle = low + (high - low) // 2
        amount = base + amount_above(keys, masses, listed, middle, by_count, CHUNK)
        reached = amount >= need
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        beyond = tl.where(reached, beyond, amount)
    return high, beyond


@triton.jit
def last_tied_id(keys, ids, listed, key, above, weight, need, CHUNK: tl.constexpr):
    """Return the highest id of the listed tokens of this key with less than `need` before them.

    above is the amount above the key, weight the amount of each of its tokens.
    """
    before = above
    last = tl.zeros((), dtype=tl.int32)
    for start in range(0, listed, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tied = (tl.load(keys + at, mask=at < listed, other=LOWEST_KEY) == key) & (at < listed)
        number = tl.cumsum(tied.to(tl.int32))
        survives = tied & (before + (number - 1).to(tl.int64) * weight < need)
        last = tl.maximum(last, tl.max(tl.load(ids + at, mask=survives, other=0)))
        before += tl.sum(tied.to(tl.int32)).to(tl.int64) * weight
    return last


@triton.jit(do_not_specialize=["rows_per_slot"])
def threshold_kernel(
    highest, temperature, top_k, top_p, plan, list_keys, list_ids, list_masses, thresholds, rows_per_slot,
    vocab_size, highest_blocks, HIGHEST_BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store a row's last kept token and highest logit: thresholds int32 [rows, 3] (key, id, highest
    key)."""
    row = tl.program_id(0).to(tl.int64)
    cuts_k, cuts_p, _, p = row_cuts(temperature, top_k, top_p, row // rows_per_slot, vocab_size)
    top_key = row_highest(highest, row, highest_blocks, HIGHEST_BLOCKS)
    tl.store(thresholds + row * 3 + 2, top_key)
    if cuts_k | cuts_p:
        top = value_of_key(top_key)
        keys = list_keys + row * vocab_size
        masses = list_masses + row * vocab_size
        need = tl.load(plan + row * 8 + 2)
        by_count = tl.load(plan + row * 8 + 3) != 0
        low = tl.load(plan + row * 8 + 4)
        base = tl.load(plan + row * 8 + 6)
        high = tl.minimum(tl.load(plan + row * 8 + 5), top_key.to(tl.int64))
        listed = tl.load(plan + row * 8 + 7).to(tl.int32)
        key, above = bisect(keys, masses, listed, low, high, base, need, by_count, CHUNK)
        if cuts_k & cuts_p:
            mass = token_mass(value_of_key(key.to(tl.int32)), top)
            kept_mass = (
                amount_above(keys, masses, listed, key, False, CHUNK) + (need - above) * mass
            )
            limit = mass_limit(p, kept_mass)
            by_count = limit < 1
            need = tl.maximum(limit, 1)
            key, above = bisect(keys, masses, listed, key - 1, high, base, need, by_count, CHUNK)
        key = key.to(tl.int32)
        weight = tl.where(by_count, 1, token_mass(value_of_key(key), top))
        ids = list_ids + row * vocab_size
        tl.store(thresholds + row * 3, key)
        tl.store(
            thresholds + row * 3 + 1,
            last_tied_id(keys, ids, listed, key, above, weight, need, CHUNK),
        )
    else:
        tl.store(thresholds + row * 3, LOWEST_KEY)
        tl.store(thresholds + row * 3 + 1, HIGHEST_KEY)


@triton.jit
def is_kept(x, ids, thresholds, temperature, min_p, row, slot):
    """True where top-k, top-p and min-p keep a row's processed logits of a block of ids."""
    key = order_key(x)
    share = tl.load(min_p + slot)
    last_key = tl.load(thresholds + row * 3)
    last_id = tl.load(thresholds + row * 3 + 1)
    top_key = tl.load(thresholds + row * 3 + 2)
    survives = (key > last_key) | ((key == last_key) & (ids <= last_id))
    if (share > 0) & (tl.load(temperature + slot) > 0):
        min_mass = tl.ceil(share.to(tl.float64) * ONE).to(tl.int64)
        survives = survives & (
            (token_mass(x, value_of_key(top_key)) >= min_mass) | (key == top_key)
        )
    return survives


def find_thresholds(
    processed: Tensor, highest: Tensor, rows_per_slot: int, tensors: SamplingTensors
) -> Tensor:
    """Return the ends of each row's top-k and top-p, for `is_kept`: int32 [rows, 3].

    processed float32 [rows, V], rows of a slot consecutive; highest int32 [rows, N], order keys
    whose maximum is the row's.
    """
    rows, vocab_size = processed.shape
    device = processed.device
    options = {
        "HIGHEST_BLOCKS": power_of_two(highest.shape[1]),
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
    plan = torch.empty(rows, 8, dtype=torch.int64, device=device)
    listed = torch.empty(2, rows, vocab_size, dtype=torch.int32, device=device)
    masses = torch.empty(rows, vocab_size, dtype=torch.int64, device=device)
    thresholds = torch.empty(rows, 3, dtype=torch.int32, device=device)
    sums = _narrow(processed, highest, rows_per_slot, tensors, plan, options)
    blocks = sums.shape[1]
    collect_kernel[rows, blocks](
        processed,
        highest,
        tensors.temperature,
        tensors.top_k,
        tensors.top_p,
        sums,
        plan,
        listed[0],
        listed[1],
        masses,
        rows_per_slot,
        vocab_size,
        highest.shape[1],
        BLOCKS=power_of_two(blocks),
        BLOCK=BLOCK,
        **options,
    )
    threshold_kernel[(rows,)](
        highest,
        tensors.temperature,
        tensors.top_k,
        tensors.top_p,
        plan,
        listed[0],
        listed[1],
        masses,
        thresholds,
        rows_per_slot,
        vocab_size,
        highest.shape[1],
        CHUNK=CHUNK,
        **options,
    )
    return thresholds


def _narrow(
    processed: Tensor,
    highest: Tensor,
    rows_per_slot: int,
    tensors: SamplingTensors,
    plan: Tensor,
    options: dict[str, int],
) -> Tensor:
    """Write the first interval to plan [rows, 8].

    Return the second's sums int64 [rows, blocks, BOUNDS].
    """
    rows, vocab_size = processed.shape
    blocks = ceil_div(vocab_size, BLOCK)
    sums = torch.empty(2, rows, blocks, BOUNDS.value, dtype=torch.int64, device=processed.device)
    for step in (0, 1):
        narrow_kernel[rows, blocks](
            processed,
            highest,
            tensors.temperature,
            tensors.top_k,
            tensors.top_p,
            sums[0],
            sums[step],
            plan,
            rows_per_slot,
            vocab_size,
            highest.shape[1],
            FIRST=step == 0,
            BLOCKS=power_of_two(blocks),
            BLOCK=BLOCK,
            **options,
        )
    return sums[1]
