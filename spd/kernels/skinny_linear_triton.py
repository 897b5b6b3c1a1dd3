# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `skinny_linear`: one launch an operation, two for the draw; all tensors contiguous.

`config` overrides the choices of `skinny_config`, for those who measure them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from spd.kernels.launch import ceil_div, overlap, power_of_two
from spd.kernels.skinny_config import (
    NAMED_TILE,
    LinearConfig,
    config_for,
    paired,
    token_tile,
    unsplit,
    with_tile,
    workspace_sizes,
)
from spd.kernels.skinny_kernels_triton import (
    gate_up_kernel,
    head_kernel,
    linear_kernel,
)
from spd.kernels.skinny_linear import AnyWeight, LinearWorkspace, ScaledWeight, capability_of
from spd.kernels.skinny_rows_triton import choose_kernel, embed_kernel, rms_norm_rows_kernel

PARTS_BLOCK = 128
"""Partial sums of squares a program holds for every row."""
COPY_BLOCK = 2048
"""Values a program of the row-wise kernels moves."""
CHOICE_BLOCK = 2048
"""Tiles that the last step of the draw compares at once."""


@cache
def _cached_config(
    n: int, k: int, itemsize: int, device: torch.device, tile: int, pair: bool
) -> LinearConfig:
    capability = capability_of(device)
    config = config_for(n, k, itemsize, capability)
    return with_tile(paired(config, n) if pair else config, tile, itemsize, capability)


def _config(weight: AnyWeight, x: Tensor, *, pair: bool = False, widest: int = 64) -> LinearConfig:
    """The choices for a weight, gate and up rows together if it is a pair, and the tile for x's rows."""
    tile = min(widest, token_tile(x.shape[0], x.element_size()))
    return _cached_config(*weight.shape, _values(weight).element_size(), weight.device, tile, pair)


def _values(weight: AnyWeight) -> Tensor:
    return weight.values if isinstance(weight, ScaledWeight) else weight


def operands_of(weight: AnyWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The first arguments of every product's kernel: values, scales, factors of the columns."""
    if isinstance(weight, ScaledWeight):
        return weight.values, weight.scales, weight.columns
    return weight, None, None


def groups_of(weight: AnyWeight | None) -> dict[str, int]:
    rows, columns = weight.groups if isinstance(weight, ScaledWeight) else (1, 0)
    return {"GROUP_N": rows, "GROUP_K": columns}


def _fuses(x: Tensor) -> bool:
    """Whether multiply-adds may be fused: where tiles have one size, and float32 products consist of them.
    Else which pairs meet in a thread, and so are fused, would follow from the tile."""
    return x.dtype == torch.float32


def constants_of(config: LinearConfig, k: int, parts: int) -> dict[str, Any]:
    """Constants of a product; `parts` is how many partial sums of squares a row of x has."""
    return {
        "BLOCK_N": config.block_n,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "EVEN_K": k % config.block_k == 0,
        "PARTS": parts,
        "BLOCK_P": min(power_of_two(parts), PARTS_BLOCK),
    }


def _workspace(
    given: LinearWorkspace | None, n: int, rows: int, config: LinearConfig, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Partials and counters for a product: those given, fresh ones, or none where K is not split."""
    if config.split_k == 1:
        return None, None
    partials, counters = workspace_sizes(n, rows, config)
    if given is None:
        empty = torch.empty(partials, dtype=torch.float32, device=device)
        return empty, torch.zeros(counters, dtype=torch.int32, device=device)
    if given.partials.numel() < partials or given.counters.numel() < counters:
        raise ValueError(
            f"workspace too small for {rows} rows of {n}: needs {partials} partials, {counters} counters"
        )
    return given.partials, given.counters


def _product(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    squares: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    workspace: LinearWorkspace | None,
    config: LinearConfig | None,
) -> tuple[Tensor, Tensor | None]:
    """y, and its squares where there is a residual."""
    rows, k = x.shape
    n = weight.shape[0]
    config = config or _config(weight, x)
    tiles = ceil_div(n, config.block_n)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    squares_out = None
    if residual is not None:
        squares_out = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    partials, counters = _workspace(workspace, n, rows, config, x.device)
    linear_kernel[(ceil_div(rows, config.block_t), tiles, config.split_k)](
        *operands_of(weight),
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
        epsilon,
        **constants_of(config, k, 1 if squares is None else squares.shape[1]),
        **groups_of(weight),
        **overlap(x.device),
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=_fuses(x),
    )
    return y, squares_out


def embed(token_ids: Tensor, table: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """See `skinny_linear.embed`."""
    rows, h = token_ids.shape[0], table.shape[1]
    block = min(power_of_two(h), COPY_BLOCK)
    parts = ceil_div(h, block)
    x = torch.empty(rows, h, dtype=table.dtype, device=table.device)
    squares = torch.empty(rows, parts, dtype=torch.float32, device=table.device)
    embed_kernel[(rows, parts)](
        token_ids, table, x, squares, h, SCALE=scale, BLOCK_H=block, **overlap(x.device), num_warps=4
    )
    return x, squares


def linear(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    workspace: LinearWorkspace | None = None,
    *,
    config: LinearConfig | None = None,
) -> Tensor:
    """See `skinny_linear.linear`."""
    return _product(x, weight, bias, None, 0.0, None, workspace, config)[0]


def norm_linear(
    x: Tensor,
    squares: Tensor,
    epsilon: float,
    weight: AnyWeight,
    bias: Tensor | None,
    workspace: LinearWorkspace | None = None,
    *,
    config: LinearConfig | None = None,
) -> Tensor:
    """See `skinny_linear.norm_linear`; the factor meets the float32 sums."""
    return _product(x, weight, bias, squares, epsilon, None, workspace, config)[0]


def norm_gate_up(
    x: Tensor,
    squares: Tensor,
    epsilon: float,
    weight: AnyWeight,
    bias: Tensor | None,
    workspace: LinearWorkspace | None = None,
    gelu: bool = False,
    *,
    config: LinearConfig | None = None,
) -> Tensor:
    """See `skinny_linear.norm_gate_up`; a program holds gate rows and the up rows that belong to them."""
    rows, k = x.shape
    n = weight.shape[0] // 2
    config = paired(config, 2 * n) if config else _config(weight, x, pair=True)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    partials, counters = _workspace(workspace, 2 * n, rows, config, x.device)
    constants = constants_of(config, k, squares.shape[1]) | {"BLOCK_N": config.block_n // 2}
    gate_up_kernel[(ceil_div(rows, config.block_t), ceil_div(2 * n, config.block_n), config.split_k)](
        *operands_of(weight),
        x,
        y,
        bias,
        squares,
        partials,
        counters,
        rows,
        n,
        k,
        epsilon,
        GELU=gelu,
        **constants,
        **groups_of(weight),
        **overlap(x.device),
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=_fuses(x),
    )
    return y


def linear_residual(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    residual: Tensor,
    workspace: LinearWorkspace | None = None,
    *,
    config: LinearConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """See `skinny_linear.linear_residual`; squares have a part for each tile of the weight's rows."""
    y, squares = _product(x, weight, bias, None, 0.0, residual, workspace, config)
    assert squares is not None
    return y, squares


def rms_norm_rows(x: Tensor, squares: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `skinny_linear.rms_norm_rows`."""
    rows, k = x.shape
    block, parts = min(power_of_two(k), COPY_BLOCK), squares.shape[1]
    y = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    rms_norm_rows_kernel[(rows, ceil_div(k, block))](
        x,
        squares,
        weight,
        y,
        k,
        epsilon,
        PARTS=parts,
        BLOCK_P=power_of_two(parts),
        BLOCK_K=block,
        **overlap(x.device),
        num_warps=4,
    )
    return y


def _head(
    x: Tensor,
    weight: AnyWeight,
    n: int,
    logits: Tensor | None,
    draw: tuple[Tensor | int | None, ...],
    config: LinearConfig,
) -> None:
    """Launch the one kernel that both forms of the head share, over the first n rows of weight."""
    rows, k = x.shape
    head_kernel[(ceil_div(rows, config.block_t), ceil_div(n, config.block_n))](
        *operands_of(weight),
        x,
        logits,
        *draw,
        rows,
        n,
        k,
        **groups_of(weight),
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        EVEN_K=k % config.block_k == 0,
        **overlap(x.device),
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=False,
    )


def head_logits(x: Tensor, weight: AnyWeight, *, config: LinearConfig | None = None) -> Tensor:
    """See `skinny_linear.head_logits`."""
    n = weight.shape[0]
    logits = torch.empty(x.shape[0], n, dtype=torch.float32, device=x.device)
    config = unsplit(config or _config(weight, x))
    _head(x, weight, n, logits, (None, None, None, 0, None, 1, None, 0), config)
    return logits


def head_sample(
    x: Tensor,
    weight: AnyWeight,
    usable_vocab: int,
    seed: Tensor,
    first: Tensor,
    step: int,
    temperature: Tensor,
    ids: Tensor | None = None,
    *,
    config: LinearConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """See `skinny_linear.head_sample`; the logits are the very bits that `head_logits` stores."""
    rows, device = x.shape[0], x.device
    # Noise of ids that do not lie beside each other takes registers of its own.
    config = unsplit(config or _config(weight, x, widest=64 if ids is None else NAMED_TILE))
    n = usable_vocab if ids is None else weight.shape[0]
    tiles = ceil_div(n, config.block_n)
    ranks = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    draw = (ranks, seed, first, step, temperature, rows // seed.shape[0], ids, usable_vocab)
    _head(x, weight, n, None, draw, config)
    token = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    block = min(power_of_two(tiles), CHOICE_BLOCK)
    choose_kernel[(rows,)](ranks, token, finite, tiles, BLOCK=block, **overlap(x.device), num_warps=4)
    return token, finite
