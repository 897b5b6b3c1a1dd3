"""Launch choices of the skinny products: by a weight's shape, type and device, never by the rows.

A choice may differ from weight to weight, for each is always multiplied by the same program; it must
not differ between two calls with one weight, or a row's bits would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from spd.kernels.launch import Device

TILES = (16, 32, 64)
"""Rows of x a program multiplies; more rows are more programs. Wider tiles than the first may follow the rows
where the device has shown that no bit does: an output is summed along K in the same steps in each of them."""
TOKEN_TILE = TILES[0]
REGISTER_BOUND_TILE = 32
"""Tokens a tile at most where registers hold more: noise of ids that do not lie beside each other, or what
bytes become in the few warps of their programs."""
TokenTileLimits = Mapping[torch.dtype, int]
"""By the dtype of a weight's values: how wide tiles of tokens of that dtype, or of bfloat16, may be."""
NARROW_TILES: TokenTileLimits = MappingProxyType({})

PROGRAMS = (
    128  # programs that fill the device: about one for each multiprocessor of the largest ones
)

SMALL_PROGRAMS = 1024
"""The same for weights of bytes, whose programs have two warps and half the rows, so that several share a
multiprocessor: while one converts, another multiplies."""


@dataclass(frozen=True)
class LinearConfig:
    """How one product is cut: `block_n` weight rows by `block_k` columns a step, K in `split_k` parts.

    All are powers of two but split_k. For gate and up together, block_n counts the rows of both.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    warps: int = 4
    stages: int = 3
    block_t: int = TOKEN_TILE


TENSOR_MEMORY_ARCHITECTURES = (10, 11)
"""Architectures whose matrix units keep sums in a memory of their own. An online softmax scales them at each
step: for 64 wide rows that takes more registers than there are, so attention has tiles of half as many."""


def config_for(
    n: int, k: int, itemsize: int, device: Device, step: int | None = None
) -> LinearConfig:
    """The choices for a weight [n, k] of `itemsize` bytes a value, `step` columns at a time, on a device.

    Measured on an H200 with bfloat16 weights: tiles of 64 rows, narrower ones for short weights, 256 bytes
    of a row a step, 128 of bytes; K in parts only where there are fewer than
    `PROGRAMS` / 2 tiles; the fewer programs share a multiprocessor, the more stages each needs in flight.
    """
    block_n = max(
        16, min(64 if n >= 2048 and itemsize > 1 else 32, 1 << max(0, n - 1).bit_length())
    )
    block_k = max(
        16, min(128 if itemsize == 1 else 256 // itemsize, 1 << max(0, k - 1).bit_length())
    )
    block_k = step or block_k
    tiles = -(-n // block_n)
    if itemsize == 1:
        split_k = max(1, min(SMALL_PROGRAMS // tiles, 8, k // (4 * block_k)))
        return LinearConfig(block_n, block_k, split_k, 2, 4 if split_k == 1 else 3)
    split_k = 1 if tiles >= PROGRAMS // 2 else max(1, min(PROGRAMS // tiles, 4, k // (4 * block_k)))
    if split_k > 1 or tiles > PROGRAMS:
        stages = 4
    else:
        stages = 6 if k < 8192 else 8
    stages = _fitting(stages, _step_bytes(block_n, TOKEN_TILE, block_k, itemsize), device)
    return LinearConfig(block_n, block_k, split_k, 4, stages)


def _step_bytes(block_n: int, block_t: int, block_k: int, itemsize: int) -> int:
    """Bytes of weights and tokens a step: tokens keep 16 bits where weights have eight."""
    return (block_n * itemsize + block_t * max(2, itemsize)) * block_k


def _fitting(stages: int, step_bytes: int, device: Device) -> int:
    """As many of the stages of step_bytes as shared memory holds, at least two."""
    return max(2, min(stages, (device.shared - 8 * 1024) // step_bytes))


def token_tile(
    rows: int, tokens: torch.dtype, weights: torch.dtype, tile_limits: TokenTileLimits
) -> int:
    """Rows of x a program multiplies where there are `rows` in all, of `tokens` by `weights`."""
    shown = (
        tile_limits.get(weights, TOKEN_TILE) if tokens in (weights, torch.bfloat16) else TOKEN_TILE
    )
    return min(shown, next((tile for tile in TILES if tile >= rows), TILES[-1]))


def with_tile(config: LinearConfig, block_t: int, itemsize: int, device: Device) -> LinearConfig:
    """The same program for another tile of tokens: everything that could change a bit stays."""
    step_bytes = _step_bytes(config.block_n, block_t, config.block_k, itemsize)
    return replace(config, block_t=block_t, stages=_fitting(config.stages, step_bytes, device))


def gate_up_config(config: LinearConfig, n: int) -> LinearConfig:
    """The choices for a weight of n gate and up rows together: half a tile of each, at least 16.

    Tiles twice as tall where they fill the device once and not more: two programs fit a multiprocessor.
    """
    if config.block_n == 64 and PROGRAMS <= n // 128 <= 2 * PROGRAMS + 8:
        return replace(config, block_n=128, stages=min(config.stages, 3))
    return replace(config, block_n=max(32, config.block_n))


def chunk_config(config: LinearConfig) -> LinearConfig:
    """The choices for a chunk of a prompt by a weight of bytes, where what binds is arithmetic."""
    return replace(config, block_n=64, split_k=1, warps=4, stages=3, block_t=TILES[-1])


def workspace_sizes(n: int, rows: int, config: LinearConfig) -> tuple[int, int]:
    """Float32 partials and int32 counters that suffice for products of up to `rows` rows by a weight of n
    rows, gate_up_config or not: (0, 0) unsplit."""
    if config.split_k == 1:
        return 0, 0
    tokens = -(-rows // TILES[-1]) * TILES[-1]
    widest = gate_up_config(config, n).block_n
    padded = -(-n // widest) * widest
    return padded * tokens * config.split_k, padded // config.block_n * (tokens // TOKEN_TILE)
