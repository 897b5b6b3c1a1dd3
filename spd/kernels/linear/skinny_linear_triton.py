# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `skinny_linear`: one launch an operation, two for the draw; all tensors
contiguous.

`tile_limits` are the widest token tiles of the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spd.kernels.launch import ceil_div, device_properties, pdl_options, power_of_two
from spd.kernels.linear.activation import SILU, Activation
from spd.kernels.linear.norm_gate import activate
from spd.kernels.linear.skinny_config import (
    NARROW_TILES,
    REGISTER_BOUND_TILE,
    TOKEN_TILES,
    LinearConfig,
    TokenTileLimits,
    chunk_config,
    config_for,
    gate_up_config,
    token_tile,
    with_tile,
    workspace_sizes,
)
from spd.kernels.linear.skinny_kernels_triton import gate_up_kernel, head_kernel, linear_kernel
from spd.kernels.linear.skinny_linear import (
    AnyWeight,
    Draw,
    LinearWorkspace,
    Norm,
    pieces_of,
    step_of,
)
from spd.kernels.linear.tiled_weight import PAIRED_KINDS, StackedTiles, TiledWeight
from spd.kernels.linear.weight_operands_triton import WeightOperands
from spd.kernels.sampling.philox_triton import choose_kernel

PARTS_BLOCK = 128
"""Partial sums of squares that a program loads at a time for every row."""
CHOICE_BLOCK = 2048
"""Tiles that the last step of the draw compares at a time."""


def _config(
    weight: AnyWeight,
    x: Tensor,
    tile_limits: TokenTileLimits,
    *,
    pair: bool = False,
    max_tile: int = TOKEN_TILES[-1],
) -> LinearConfig:
    """Return the config for a weight, with gate and up rows together if `pair`, and x's token
    tile."""
    values = operands_of(weight).stored
    n, k = weight.shape
    device = device_properties(weight.device)
    size = values.element_size()
    max_tile = min(max_tile, REGISTER_BOUND_TILE if size == 1 else max_tile)
    tile = min(max_tile, token_tile(x.shape[0], x.dtype, values.dtype, tile_limits))
    config = config_for(n=n, k=k, itemsize=size, device=device, step=step_of(weight))
    return with_tile(gate_up_config(config, n) if pair else config, tile, size, device)


def operands_of(weight: AnyWeight) -> WeightOperands:
    """Return a weight of one form as the kernels of products take it."""
    if isinstance(weight, Tensor):
        return WeightOperands(weight)
    assert isinstance(weight, TiledWeight)
    return WeightOperands(
        weight.codes,
        weight.upper,
        weight.scales,
        weight.zeros,
        weight.minima,
        weight.factors,
        weight.columns,
    )


def has_pairs(weight: AnyWeight) -> bool:
    """True if a byte of a weight holds codes of two columns of a step."""
    return isinstance(weight, TiledWeight) and weight.kind in PAIRED_KINDS


def launch_of(
    config: LinearConfig, weight: AnyWeight, x: Tensor, act: Activation | None = None
) -> dict[str, Any]:
    """Return constants and options of a product's kernel; with a gated `act` a tile has rows of
    both halves.

    Multiply-adds may be fused for float32, which has one tile size and whose products consist of
    them. Otherwise the tile would decide which pairs meet in a thread, and so are fused.
    """
    columns = weight.group if isinstance(weight, TiledWeight) else 0
    code = weight.kind if isinstance(weight, TiledWeight) and columns else None
    return {
        "GROUP_K": columns,
        "CODE": code,
        "BLOCK_N": config.block_n // (2 if act and act.gated else 1),
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "EVEN_K": weight.shape[-1] % config.block_k == 0,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": x.dtype == torch.float32,
        **({"ACT": act.kind, "LIMIT": act.limit, "ALPHA": act.alpha} if act else {}),
        **pdl_options(weight.device),
    }


def _split_constants(config: LinearConfig, squares: Tensor | None) -> dict[str, int]:
    """Return constants of a product that may be split along K, of rows with partial sums of
    squares."""
    parts = 1 if squares is None else squares.shape[1]
    return {
        "SPLIT_K": config.split_k,
        "PARTS": parts,
        "BLOCK_P": min(power_of_two(parts), PARTS_BLOCK),
    }


def _workspace(
    workspace: LinearWorkspace | None, n: int, rows: int, config: LinearConfig, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return partials and counters of a product: the workspace's, new ones, or None where K is
    unsplit."""
    if config.split_k == 1:
        return None, None
    partials, counters = workspace_sizes(n, rows, config)
    if workspace is None:
        empty = torch.empty(partials, dtype=torch.float32, device=device)
        return empty, torch.zeros(counters, dtype=torch.int32, device=device)
    assert workspace.partials.numel() >= partials and workspace.counters.numel() >= counters, (
        "workspace too small"
    )
    return workspace.partials, workspace.counters


def linear(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    workspace: LinearWorkspace | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    *,
    chunk: bool = False,
    tile_limits: TokenTileLimits = NARROW_TILES,
) -> tuple[Tensor, Tensor | None]:
    """Launch `Kernels.linear`, once for each piece of a weight; only one piece adds to a stream."""
    rows = x.shape[0]
    y = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
    pieces = pieces_of(weight)
    if len(pieces) > 1:
        assert residual is None
    squares_out = None
    first = 0
    for piece in pieces:
        columns = slice(first, first + piece.shape[0])
        squares_out = _linear_into(
            y[:, columns],
            x,
            piece,
            None if bias is None else bias[columns],
            workspace,
            norm,
            residual,
            chunk=chunk,
            tile_limits=tile_limits,
        )
        first = columns.stop
    return y, squares_out


def _linear_into(
    y: Tensor,
    x: Tensor,
    weight: Tensor | TiledWeight,
    bias: Tensor | None,
    workspace: LinearWorkspace | None,
    norm: Norm | None,
    residual: Tensor | None,
    *,
    chunk: bool,
    tile_limits: TokenTileLimits,
) -> Tensor | None:
    """Write a product into y [T, N], columns of contiguous rows.

    Return the squares of y onto a residual, a part for each tile of the weight's rows.
    """
    rows, k = x.shape
    n = weight.shape[0]
    config = _config(weight, x, NARROW_TILES if chunk else tile_limits)
    if chunk:
        operands = operands_of(weight)
        config = chunk_config(
            config,
            device_properties(x.device),
            step=config.block_k if has_pairs(weight) else 0,
            has_minima=operands.minima is not None,
            has_short_tiles=operands.upper is not None,
        )
    tiles = ceil_div(n, config.block_n)
    squares_out = None
    if residual is not None:
        squares_out = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    squares, epsilon = (None, 0.0) if norm is None else norm
    partials, counters = _workspace(
        workspace=workspace, n=n, rows=rows, config=config, device=x.device
    )
    linear_kernel[(ceil_div(rows, config.block_t), tiles, config.split_k)](
        operands_of(weight),
        x,
        y,
        bias,
        squares,
        residual,
        squares_out,
        partials,
        counters,
        rows,
        n,
        k,
        y.stride(0),
        epsilon,
        **_split_constants(config, squares),
        **launch_of(config, weight, x),
    )
    return squares_out


def norm_gate_up(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    workspace: LinearWorkspace | None,
    norm: Norm,
    act: Activation = SILU,
    *,
    tile_limits: TokenTileLimits = NARROW_TILES,
) -> Tensor:
    """Launch `Kernels.norm_gate_up`.

    A program holds gate rows and the up rows that belong to them. Gates and inputs of different
    forms are multiplied one by one, and rounded before their activation.
    """
    if isinstance(weight, StackedTiles):
        both = linear(x, weight, bias, workspace, norm, tile_limits=tile_limits)[0]
        return activate(both.float(), act).to(x.dtype)
    rows, k = x.shape
    n = weight.shape[0] // 2
    config = _config(weight, x, tile_limits, pair=True)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    partials, counters = _workspace(
        workspace=workspace, n=2 * n, rows=rows, config=config, device=x.device
    )
    tiles = ceil_div(2 * n, config.block_n)
    gate_up_kernel[(ceil_div(rows, config.block_t), tiles, config.split_k)](
        operands_of(weight),
        x,
        y,
        bias,
        norm.squares,
        partials,
        counters,
        rows,
        n,
        k,
        norm.epsilon,
        **_split_constants(config, norm.squares),
        **launch_of(config, weight, x, act),
    )
    return y


def _head(
    x: Tensor,
    weight: AnyWeight,
    n: int,
    logits: Tensor | None,
    draw: tuple[Any, ...],
    config: LinearConfig,
) -> None:
    """Launch the head's kernel, for logits or a draw, over the first n rows of weight."""
    rows, k = x.shape
    head_kernel[(ceil_div(rows, config.block_t), ceil_div(n, config.block_n))](
        operands_of(weight),
        x,
        logits,
        *draw,
        rows,
        n,
        k,
        **{**launch_of(config, weight, x), "enable_fp_fusion": False},
    )


def head_logits(
    x: Tensor, weight: AnyWeight, *, tile_limits: TokenTileLimits = NARROW_TILES
) -> Tensor:
    """Launch `Kernels.head_logits`; x and weight are contiguous."""
    n = weight.shape[0]
    logits = torch.empty(x.shape[0], n, dtype=torch.float32, device=x.device)
    config = replace(_config(weight, x, tile_limits), split_k=1)
    _head(
        x=x,
        weight=weight,
        n=n,
        logits=logits,
        draw=(None, None, None, 0, None, 1, None, 0),
        config=config,
    )
    return logits


def head_sample(
    x: Tensor,
    weight: AnyWeight,
    draw: Draw,
    ids: Tensor | None = None,
    *,
    tile_limits: TokenTileLimits = NARROW_TILES,
) -> tuple[Tensor, Tensor]:
    """Launch `Kernels.head_sample`; logits have the bits that `head_logits` stores."""
    rows = x.shape[0]
    device = x.device
    config = _config(
        weight, x, tile_limits, max_tile=TOKEN_TILES[-1] if ids is None else REGISTER_BOUND_TILE
    )
    config = replace(config, split_k=1)
    n = draw.usable_vocab if ids is None else weight.shape[0]
    tiles = ceil_div(n, config.block_n)
    ranks = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    window = rows // draw.seed.shape[0]
    _head(
        x=x,
        weight=weight,
        n=n,
        logits=None,
        draw=(ranks, *draw[:4], window, ids, draw.usable_vocab),
        config=config,
    )
    token = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    block = min(power_of_two(tiles), CHOICE_BLOCK)
    choose_kernel[(rows,)](
        ranks, token, finite, tiles, BLOCK=block, **pdl_options(x.device), num_warps=4
    )
    return token, finite
