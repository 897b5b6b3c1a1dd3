# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Philox4x32-10 and Gumbel noise on the GPU, and the device functions that all sampling kernels
share.

The integers equal the torch form's bit for bit. All kernels must draw the same token: the sampling
kernels (`sampling_triton`) and the fused vocabulary product with its draw (`skinny_linear_triton`)
divide by the temperature, add the noise and compare by the functions of this file only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spd.kernels.overlap_triton import wait_and_release
from spd.kernels.sampling.philox import MULTIPLIERS, WEYL

MULTIPLIER_0, MULTIPLIER_1 = map(tl.constexpr, MULTIPLIERS)
WEYL_0, WEYL_1 = map(tl.constexpr, WEYL)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
KEY_OF_INFINITY = tl.constexpr(0x7F800000)
KEY_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """Return four words from four counters and two keys, uint32 blocks that broadcast against each
    other."""
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * MULTIPLIER_0
        product1 = c2.to(tl.uint64) * MULTIPLIER_1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, WEYL_0, sanitize_overflow=False)
        k1 = tl.add(k1, WEYL_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def random_bits4(seed, position, stream, groups):
    """Return 32 random bits for the token ids 4 * groups + lane: four uint32 blocks, one a lane.

    seed, position int64, scalars or blocks that broadcast against groups; stream a small integer.
    """
    zero = (position * 0).to(tl.uint32)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    return philox_words(
        groups.to(tl.uint32), position.to(tl.uint32), zero + stream, zero, low, high
    )


@triton.jit
def uniform(bits):
    """Return float32 uniforms in [2**-33, 1 - 2**-24] from uint32 blocks."""
    return tl.minimum(tl.maximum(bits.to(tl.float32) * 2.0**-32, 2.0**-33), 1.0 - 2.0**-24)


@triton.jit
def gumbel_from_bits(bits):
    """Return standard Gumbel noise, float32, from uint32 blocks."""
    return -tl.log(-tl.log(uniform(bits)))


@triton.jit
def gumbel4(seed, position, stream, groups):
    """Return Gumbel noise for the token ids 4 * groups + lane: four float32 blocks, one a lane.

    groups [G] with scalar seed and position, or [G, 1] with seed and position [1, T].
    """
    bits0, bits1, bits2, bits3 = random_bits4(seed, position, stream, groups)
    return (
        gumbel_from_bits(bits0),
        gumbel_from_bits(bits1),
        gumbel_from_bits(bits2),
        gumbel_from_bits(bits3),
    )


@triton.jit
def gumbel_at(seed, position, stream, ids):
    """Return Gumbel noise for any token ids [G, 1] at seed and position [1, T]."""
    bits0, bits1, bits2, bits3 = random_bits4(seed, position, stream, ids >> 2)
    lane = ids & 3
    return gumbel_from_bits(
        tl.where(lane < 2, tl.where(lane == 0, bits0, bits1), tl.where(lane == 2, bits2, bits3))
    )


@triton.jit
def interleave4(lane0, lane1, lane2, lane3):
    """Interleave blocks [G] or [G, T] of four lanes as one [4 G] or [4 G, T] in the order of token
    ids."""
    lanes = tl.join(tl.join(lane0, lane2), tl.join(lane1, lane3))  # [..., lane // 2, lane % 2]
    if len(lanes.shape) == 3:
        return tl.reshape(lanes, (lanes.shape[0] * 4,))
    else:
        return tl.reshape(tl.permute(lanes, (0, 2, 3, 1)), (lanes.shape[0] * 4, lanes.shape[1]))


# -- the draw: used by sampling_triton and by the vocabulary product that draws (skinny_linear_triton) --


@triton.jit
def scaled_logit(logit, temperature):
    """Divide float32 logits by the temperature, with IEEE rounding.

    Unchanged at temperatures <= 0.
    """
    return tl.div_rn(logit, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def noisy_logit(scaled, noise, temperature):
    """Return scaled logits plus noise; without it at temperatures <= 0."""
    return tl.where(temperature > 0, scaled + noise, scaled)


@triton.jit
def order_key(value):
    """Return int32 keys in the order of float32 values: -0 equals 0, and NaN is above infinity."""
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ MAGNITUDE, bits)
    return tl.where(value == 0, 0, tl.where(value == value, key, MAGNITUDE))


@triton.jit
def value_of_key(key):
    """Return the float32 value of an order key."""
    return tl.where(key < 0, key ^ MAGNITUDE, key).to(tl.float32, bitcast=True)


@triton.jit
def draw_rank(score, ids):
    """Return int64 ranks of (score, token id): the greatest is drawn, ties to the lowest id, NaN
    first.

    Ranks of parts of a vocabulary can be combined by `max` in any order.
    """
    return (order_key(score).to(tl.int64) << 32) | (ids ^ MAGNITUDE).to(tl.int64)


@triton.jit
def rank_token(rank):
    """Return the token id of a rank, int64."""
    return (rank & MAGNITUDE) ^ MAGNITUDE


@triton.jit
def rank_is_finite(rank):
    """True if a rank's score is finite.

    Noise is finite, so a logit is finite if and only if its score is.
    """
    key = rank >> 32
    return (key > KEY_OF_MINUS_INFINITY) & (key < KEY_OF_INFINITY)


NO_RANK = tl.constexpr(-(2**63))
"""A rank below all others, for ids beyond the vocabulary."""


@triton.jit
def choose_kernel(ranks, token, finite, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Choose the best of a row's tiles [T, tiles]; one program a row."""
    wait_and_release(PDL)
    row = tl.program_id(0)
    best = tl.full((BLOCK,), NO_RANK, dtype=tl.int64)
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(ranks + row * tiles + at, mask=at < tiles, other=NO_RANK))
    chosen = tl.max(best, 0)
    tl.store(token + row, rank_token(chosen))
    tl.store(finite + row, rank_is_finite(chosen))
