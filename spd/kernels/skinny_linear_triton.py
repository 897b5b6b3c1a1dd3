# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton form of `skinny_linear`: one launch an operation, two for the draw; all tensors contiguous.

`config` overrides the choices of `skinny_config`, for those who measure them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from spd.kernels.launch import Signature, ceil_div, power_of_two
from spd.kernels.skinny_config import LinearConfig, config_for, paired, unsplit, workspace_sizes
from spd.kernels.skinny_kernels_triton import (
    choose_kernel,
    embed_kernel,
    gate_up_kernel,
    head_kernel,
    linear_kernel,
    rms_norm_rows_kernel,
)
from spd.kernels.skinny_linear import LinearWorkspace, capability_of

PARTS_BLOCK = 128
"""Partial sums of squares a program holds for every row."""
COPY_BLOCK = 2048
"""Values a program of the row-wise kernels moves."""
CHOICE_BLOCK = 2048
"""Tiles that the last step of the draw compares at once."""


@cache
def _config(n: int, k: int, itemsize: int, device: torch.device) -> LinearConfig:
    return config_for(n, k, itemsize, capability_of(device))


def _constants(config: LinearConfig, k: int, parts: int) -> dict[str, Any]:
    """Constants of a product; `parts` is how many partial sums of squares a row of x has."""
    return {
        "BLOCK_N": config.block_n,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "SPLIT_K": config.split_k,
        "EVEN_K": k % config.block_k == 0,
        "PARTS": parts,
        "BLOCK_P": min(power_of_two(parts), PARTS_BLOCK),
        "PDL": False,
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
    weight: Tensor,
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
    config = config or _config(n, k, weight.element_size(), weight.device)
    tiles = ceil_div(n, config.block_n)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    squares_out = None
    if residual is not None:
        squares_out = torch.empty(rows, tiles, dtype=torch.float32, device=x.device)
    partials, counters = _workspace(workspace, n, rows, config, x.device)
    linear_kernel[(ceil_div(rows, config.block_t), tiles, config.split_k)](
        weight,
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
        **_constants(config, k, 1 if squares is None else squares.shape[1]),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y, squares_out


def embed(token_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """See `skinny_linear.embed`."""
    rows, h = token_ids.shape[0], table.shape[1]
    block = min(power_of_two(h), COPY_BLOCK)
    parts = ceil_div(h, block)
    x = torch.empty(rows, h, dtype=table.dtype, device=table.device)
    squares = torch.empty(rows, parts, dtype=torch.float32, device=table.device)
    embed_kernel[(rows, parts)](token_ids, table, x, squares, h, BLOCK_H=block, PDL=False, num_warps=4)
    return x, squares


def linear(
    x: Tensor,
    weight: Tensor,
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
    weight: Tensor,
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
    weight: Tensor,
    bias: Tensor | None,
    workspace: LinearWorkspace | None = None,
    *,
    config: LinearConfig | None = None,
) -> Tensor:
    """See `skinny_linear.norm_gate_up`; a program holds gate rows and the up rows that belong to them."""
    rows, k = x.shape
    n = weight.shape[0] // 2
    config = paired(config or _config(2 * n, k, weight.element_size(), weight.device), 2 * n)
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    partials, counters = _workspace(workspace, 2 * n, rows, config, x.device)
    constants = _constants(config, k, squares.shape[1]) | {"BLOCK_N": config.block_n // 2}
    gate_up_kernel[(ceil_div(rows, config.block_t), ceil_div(2 * n, config.block_n), config.split_k)](
        weight,
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
        **constants,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y


def linear_residual(
    x: Tensor,
    weight: Tensor,
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
        PDL=False,
        num_warps=4,
    )
    return y


def _head(
    x: Tensor,
    weight: Tensor,
    n: int,
    logits: Tensor | None,
    draw: tuple[Tensor | int | None, ...],
    config: LinearConfig,
) -> None:
    """Launch the one kernel that both forms of the head share, over the first n rows of weight."""
    rows, k = x.shape
    head_kernel[(ceil_div(rows, config.block_t), ceil_div(n, config.block_n))](
        weight,
        x,
        logits,
        *draw,
        rows,
        n,
        k,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        BLOCK_K=config.block_k,
        EVEN_K=k % config.block_k == 0,
        PDL=False,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=False,
    )


def head_logits(x: Tensor, weight: Tensor, *, config: LinearConfig | None = None) -> Tensor:
    """See `skinny_linear.head_logits`."""
    n, k = weight.shape
    logits = torch.empty(x.shape[0], n, dtype=torch.float32, device=x.device)
    config = unsplit(config or _config(n, k, weight.element_size(), weight.device))
    _head(x, weight, n, logits, (None, None, None, 0, None, 1), config)
    return logits


def head_sample(
    x: Tensor,
    weight: Tensor,
    usable_vocab: int,
    seed: Tensor,
    first: Tensor,
    step: int,
    temperature: Tensor,
    *,
    config: LinearConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """See `skinny_linear.head_sample`; the logits are the very bits that `head_logits` stores."""
    rows, device = x.shape[0], x.device
    config = unsplit(config or _config(*weight.shape, weight.element_size(), weight.device))
    tiles = ceil_div(usable_vocab, config.block_n)
    ranks = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    draw = (ranks, seed, first, step, temperature, rows // seed.shape[0])
    _head(x, weight, usable_vocab, None, draw, config)
    token = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    block = min(power_of_two(tiles), CHOICE_BLOCK)
    choose_kernel[(rows,)](ranks, token, finite, tiles, BLOCK=block, PDL=False, num_warps=4)
    return token, finite


def _product_signature(n: int, k: int, dtype: str, parts: int, residual: bool) -> Signature:
    """One product of the weight [n, k], with squares of x in `parts` or, where 0, without."""
    config = config_for(n, k, 2, (9, 0))
    types = dict.fromkeys(("w", "x", "y"), f"*{dtype}") | {"epsilon": "fp32"}
    types |= dict.fromkeys(("rows", "n", "k"), "i32")
    types |= {"squares": "*fp32"} if parts else {}
    types |= {"residual": f"*{dtype}", "squares_out": "*fp32"} if residual else {}
    types |= {"partials": "*fp32", "counters": "*i32"} if config.split_k > 1 else {}
    names = ("bias", "squares", "residual", "squares_out", "partials", "counters")
    absent = {name: None for name in names if name not in types}
    constants = _constants(config, k, max(1, parts)) | absent
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return Signature(linear_kernel, types, constants, options, unspecialized=("rows", "epsilon"))


def _gate_up_signature(n: int, k: int, dtype: str, parts: int) -> Signature:
    config = paired(config_for(n, k, 2, (9, 0)), n)
    types = dict.fromkeys(("w", "x", "y"), f"*{dtype}") | {"squares": "*fp32", "epsilon": "fp32"}
    types |= dict.fromkeys(("rows", "n", "k"), "i32")
    types |= {"partials": "*fp32", "counters": "*i32"} if config.split_k > 1 else {}
    absent = {name: None for name in ("bias", "partials", "counters") if name not in types}
    constants = _constants(config, k, parts) | {"BLOCK_N": config.block_n // 2} | absent
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return Signature(gate_up_kernel, types, constants, options, unspecialized=("rows", "epsilon"))


def _head_signature(n: int, k: int, dtype: str, outputs: dict[str, str]) -> Signature:
    config = config_for(n, k, 2, (9, 0))
    types = {"w": f"*{dtype}", "x": f"*{dtype}"} | outputs | dict.fromkeys(("rows", "n", "k"), "i32")
    names = ("logits", "ranks", "seed", "position", "temperature")
    constants: dict[str, Any] = {name: None for name in names if name not in types}
    shared = _constants(config, k, 1)
    constants |= {name: shared[name] for name in ("BLOCK_N", "BLOCK_T", "BLOCK_K", "EVEN_K", "PDL")}
    types |= {"step": "i32", "window": "i32"}
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    return Signature(head_kernel, types, constants, options, unspecialized=("rows", "step", "window"))


def _row_signatures() -> dict[str, Signature]:
    """The kernels that work on a row each."""
    tiles, four = ceil_div(151936, 128), {"num_warps": 4}
    choose = {"ranks": "*i64", "token": "*i64", "finite": "*i1", "tiles": "i32"}
    embed = {"token_ids": "*i64", "table": "*bf16", "x": "*bf16", "squares": "*fp32", "h": "i32"}
    norm = {"x": "*bf16", "squares": "*fp32", "weight": "*bf16", "y": "*bf16", "k": "i32", "epsilon": "fp32"}
    block = {"BLOCK": min(power_of_two(tiles), CHOICE_BLOCK), "PDL": False}
    norm_blocks = {"PARTS": 128, "BLOCK_P": 128, "BLOCK_K": COPY_BLOCK, "PDL": False}
    return {
        "choose": Signature(choose_kernel, choose, block, four, unspecialized=("tiles",)),
        "embed": Signature(embed_kernel, embed, {"BLOCK_H": COPY_BLOCK, "PDL": False}, four),
        "rms_norm_rows": Signature(rms_norm_rows_kernel, norm, norm_blocks, four, unspecialized=("epsilon",)),
    }


def signatures() -> dict[str, Signature]:
    """The products of an 8B model and a 0.6B one by their weights' shapes, the head, and the rest."""
    sample = {"ranks": "*i64", "seed": "*i64", "position": "*i64", "temperature": "*fp32"}
    found = _row_signatures()
    for dtype in ("bf16", "fp16"):
        for size, parts, qkv, out, gate_up, down in (
            ("8b", 128, (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
            ("0.6b", 64, (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
        ):
            found[f"qkv_{size}_{dtype}"] = _product_signature(*qkv, dtype, parts, False)
            found[f"out_{size}_{dtype}"] = _product_signature(*out, dtype, 0, True)
            found[f"gate_up_{size}_{dtype}"] = _gate_up_signature(*gate_up, dtype, parts)
            found[f"down_{size}_{dtype}"] = _product_signature(*down, dtype, 0, True)
        found[f"head_logits_{dtype}"] = _head_signature(151936, 4096, dtype, {"logits": "*fp32"})
        found[f"head_sample_{dtype}"] = _head_signature(151936, 4096, dtype, sample)
    return found
