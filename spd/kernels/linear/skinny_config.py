"""Launch configs of the skinny products, by a weight's shape, type and device, never by the rows.

A config may differ from weight to weight, for each is always multiplied by the same program; it
must not differ between two calls with one weight, or a row's bits would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from spd.kernels.launch import Device

TOKEN_TILES = (16, 32, 64)
"""Rows of x that a program multiplies; more rows need more programs.

The tile may be wider than the first, by the number of rows, where a trial on the device has shown
equal bits: an output is summed along K in the same steps in each tile.
"""
TOKEN_TILE = TOKEN_TILES[0]
REGISTER_BOUND_TILE = 32
"""The maximum of tokens a tile where other values need registers, too.

Those are noise of ids that are not consecutive, or the converted bytes of a weight in the few warps
of its programs.
"""
TokenTileLimits = Mapping[torch.dtype, int]
"""The widest token tile by the dtype of a weight's values, for tokens of that dtype or bfloat16."""
NARROW_TILES: TokenTileLimits = MappingProxyType({})

PROGRAMS = 128
"""Programs that fill the device: about one for each multiprocessor of the largest devices."""
BYTE_WEIGHT_PROGRAMS = (1024, 768)
"""Programs that fill the device where weights are bytes, by steps of 128 columns and of 256.

They have two warps and half the rows, so that several share a multiprocessor: while one converts,
another multiplies. Of those with long steps six fit, on an H200 768 of all parts at the same time.
"""
CHUNK_STEP = 128
"""Columns of a step where many tokens are multiplied: their tile takes most of shared memory."""


@dataclass(frozen=True)
class LinearConfig:
    """The tiles of one product: `block_n` weight rows by `block_k` columns a step, K in `split_k`
    parts.

    All are powers of two but split_k. For gate and up together, block_n counts the rows of both.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    warps: int = 4
    stages: int = 3
    block_t: int = TOKEN_TILE


TENSOR_MEMORY_ARCHITECTURES = (10, 11)
"""Architectures whose matrix units store sums in tensor memory.

An online softmax scales them at each step: for 64 wide rows that needs more registers than there
are, so attention has tiles of half as many rows.
"""


WIDE_UNIT_ARCHITECTURES = (9, *TENSOR_MEMORY_ARCHITECTURES)
"""Architectures whose matrix units serve four warps together."""


def config_for(
    n: int, k: int, itemsize: int, device: Device, step: int | None = None
) -> LinearConfig:
    """Return the config for a weight [n, k] of `itemsize` bytes a value, `step` columns at a time.

    Measured on an H200 with bfloat16 weights: tiles of 64 rows, narrower ones for short weights,
    256 bytes of a row a step; K is split only where there are fewer than `PROGRAMS` / 2 tiles; the
    fewer programs share a multiprocessor, the more stages each needs in flight.
    """
    block_n = max(
        16, min(64 if n >= 2048 and itemsize > 1 else 32, 1 << max(0, n - 1).bit_length())
    )
    widest = 128 if itemsize == 1 and k % 256 else 256 // itemsize
    block_k = step or max(16, min(widest, 1 << max(0, k - 1).bit_length()))
    tiles = -(-n // block_n)
    if itemsize == 1:
        is_long = block_k > 128
        programs = BYTE_WEIGHT_PROGRAMS[is_long]
        split_k = max(1, min(programs // tiles, 8, k // (4 * block_k)))
        return LinearConfig(
            block_n=block_n,
            block_k=block_k,
            split_k=split_k,
            warps=2,
            stages=3 if is_long or split_k > 1 else 4,
        )
    split_k = 1 if tiles >= PROGRAMS // 2 else max(1, min(PROGRAMS // tiles, 4, k // (4 * block_k)))
    if split_k > 1 or tiles > PROGRAMS:
        stages = 4
    else:
        stages = 6 if k < 8192 else 8
    stages = _fit_stages(stages, _step_bytes(block_n, TOKEN_TILE, block_k, itemsize), device)
    return LinearConfig(block_n=block_n, block_k=block_k, split_k=split_k, warps=4, stages=stages)


def _step_bytes(block_n: int, block_t: int, block_k: int, itemsize: int) -> int:
    """Return the bytes of weights and tokens a step: tokens have 16 bits where weights have
    eight."""
    return (block_n * itemsize + block_t * max(2, itemsize)) * block_k


def _fit_stages(stages: int, step_bytes: int, device: Device) -> int:
    """Return the number of stages of step_bytes that shared memory holds, at most `stages`, at
    least two."""
    return max(2, min(stages, (device.shared - 8 * 1024) // step_bytes))


def token_tile(
    rows: int, tokens: torch.dtype, weights: torch.dtype, tile_limits: TokenTileLimits
) -> int:
    """Return the rows of x that a program multiplies, of `rows` in all, by the dtypes of both."""
    limit = (
        tile_limits.get(weights, TOKEN_TILE) if tokens in (weights, torch.bfloat16) else TOKEN_TILE
    )
    return min(limit, next((tile for tile in TOKEN_TILES if tile >= rows), TOKEN_TILES[-1]))


def with_tile(config: LinearConfig, block_t: int, itemsize: int, device: Device) -> LinearConfig:
    """Return the config for another token tile: only what changes no bit differs."""
    step_bytes = _step_bytes(config.block_n, block_t, config.block_k, itemsize)
    return replace(config, block_t=block_t, stages=_fit_stages(config.stages, step_bytes, device))


def gate_up_config(config: LinearConfig, n: int) -> LinearConfig:
    """Return the config for n gate and up rows together: half a tile of each, at least 16.

    Tiles are twice as tall where they just fill the device: two programs fit a multiprocessor.
    """
    if config.block_n == 64 and PROGRAMS <= n // 128 <= 2 * PROGRAMS + 8:
        return replace(config, block_n=128, stages=min(config.stages, 3))
    return replace(config, block_n=max(32, config.block_n))


def chunk_config(
    config: LinearConfig,
    device: Device,
    *,
    step: int,
    has_minima: bool = False,
    has_short_tiles: bool = False,
) -> LinearConfig:
    """Return the config for a prompt chunk by a weight of bytes, which is compute-bound.

    step: the columns of a step at least, where a byte holds codes of two of them.

    Tokens are added up beside products where groups have minima: half of them, where a warp's
    registers hold all sums; also where a step is long, but for Hopper. Tensor memory has no room for
    the many sums of short tiles, which rows too few for it keep in registers.
    """
    is_narrow = has_minima and device.capability[0] not in WIDE_UNIT_ARCHITECTURES
    is_narrow = is_narrow or (step > CHUNK_STEP and device.capability[0] != 9)
    block_t = TOKEN_TILES[-2] if is_narrow else TOKEN_TILES[-1]
    in_registers = has_short_tiles and device.capability[0] in TENSOR_MEMORY_ARCHITECTURES
    block_n = 32 if in_registers else 64
    block_k = max(step, min(CHUNK_STEP, config.block_k))
    stages = _fit_stages(3, _step_bytes(block_n, block_t, block_k, itemsize=1), device)
    return LinearConfig(
        block_n=block_n, block_k=block_k, split_k=1, warps=4, stages=stages, block_t=block_t
    )


def workspace_sizes(n: int, rows: int, config: LinearConfig) -> tuple[int, int]:
    """Float32 partials and int32 counters that suffice for products of up to `rows` rows by a
    weight of n rows, gate_up_config or not: (0, 0) unsplit."""
    if config.split_k == 1:
        return 0, 0
    tokens = -(-rows // TOKEN_TILES[-1]) * TOKEN_TILES[-1]
    widest = gate_up_config(config, n).block_n
    padded = -(-n // widest) * widest
    return padded * tokens * config.split_k, padded // config.block_n * (tokens // TOKEN_TILE)
