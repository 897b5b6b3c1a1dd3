# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The skinny kernels as they are compiled ahead of time: the shapes of an 8B and a 0.6B model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spd.kernels.launch import AT_ONCE, Signature, ceil_div, power_of_two
from spd.kernels.skinny_config import (
    NAMED_TILE,
    TOKEN_TILE,
    LinearConfig,
    config_for,
    paired,
    unsplit,
    with_tile,
)
from spd.kernels.skinny_kernels_triton import gate_up_kernel, head_kernel, linear_kernel
from spd.kernels.skinny_linear import SCALE_COLUMNS, SCALE_ROWS
from spd.kernels.skinny_linear_triton import CHOICE_BLOCK, COPY_BLOCK, constants_of, groups_of
from spd.kernels.skinny_rows_triton import choose_kernel, embed_kernel, rms_norm_rows_kernel


def _described(
    kernel: Any, config: LinearConfig, k: int, parts: int, types: dict[str, str], whole: dict[str, Any]
) -> Signature:
    """A product's kernel with the arguments in types, none of the others, and the constants in `whole`."""
    types = types | dict.fromkeys(("rows", "n", "k"), "i32")
    if "partials" in kernel.arg_names and config.split_k > 1:
        types |= {"partials": "*fp32", "counters": "*i32"}
    constants = constants_of(config, k, parts) | groups_of(None) | {"PDL": True} | whole
    constants = {name: constants.get(name) for name in kernel.arg_names if name not in types}
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    return Signature(kernel, types, constants, options, unspecialized=("rows", "epsilon", "step", "window"))


GROUPS = {
    None: groups_of(None),
    "i8": groups_of(None),
    "fp8e4nv": {"GROUP_N": SCALE_ROWS, "GROUP_K": SCALE_COLUMNS},
}
"""Rows and columns that share a scale, by the type of the weight's values."""


def _layer_signatures(
    dtype: str,
    tile: int,
    hidden: int,
    qkv: int,
    out: int,
    inner: int,
    eight: str | None = None,
    *,
    device: tuple[int, int],
    gelu: bool = False,
) -> dict[str, Signature]:
    """A layer's products: qkv [qkv, hidden], out [hidden, out], gate_up [2 * inner, hidden] and down.

    `eight` names the type of weights that are kept in eight bits.
    """
    size = 1 if eight else 2
    product = dict.fromkeys(("w", "x", "y"), f"*{dtype}") | {"epsilon": "fp32"}
    if eight:
        product |= {"w": f"*{eight}", "scale": "*fp32"}
    normed = product | {"squares": "*fp32"} | ({"columns": f"*{dtype}"} if eight == "fp8e4nv" else {})
    added = product | {"residual": f"*{dtype}", "squares_out": "*fp32"}
    found = {}
    for name, n, k, types in (("out", hidden, out, added), ("down", hidden, inner, added)):
        config = with_tile(config_for(n, k, size, device), tile, size, device)
        found[name] = _described(linear_kernel, config, k, 1, types, GROUPS[eight])
    parts = ceil_div(hidden, config.block_n)
    config = with_tile(config_for(qkv, hidden, size, device), tile, size, device)
    found["qkv"] = _described(linear_kernel, config, hidden, parts, normed, GROUPS[eight])
    config = paired(config_for(2 * inner, hidden, size, device), 2 * inner)
    config = with_tile(config, tile, size, device)
    half = {"BLOCK_N": config.block_n // 2, "GELU": gelu}
    found["gate_up"] = _described(gate_up_kernel, config, hidden, parts, normed, half | GROUPS[eight])
    return found


def _head_signatures(
    dtype: str, tile: int, vocab: int, hidden: int, device: tuple[int, int]
) -> dict[str, Signature]:
    """The head's logits, its draw, and the draw of a head that knows some ids only."""
    config = with_tile(config_for(vocab, hidden, 2, device), tile, 2, device)
    types = dict.fromkeys(("w", "x"), f"*{dtype}") | dict.fromkeys(("step", "window"), "i32")
    draw = {"ranks": "*i64", "seed": "*i64", "position": "*i64", "temperature": "*fp32"}
    named = with_tile(config, min(tile, NAMED_TILE), 2, device)
    return {
        name: _described(head_kernel, unsplit(chosen), hidden, 1, types | outputs, {})
        for name, chosen, outputs in (
            ("head_logits", config, {"logits": "*fp32"}),
            ("head_sample", config, draw),
            ("head_sample_ids", named, draw | {"ids": "*i64", "usable": "i32"}),
        )
    }


def _row_signatures() -> dict[str, Signature]:
    """The kernels that work on a row each."""
    tiles, four = ceil_div(151936, config_for(151936, 4096, 2, (9, 0)).block_n), {"num_warps": 4}
    choose = {"ranks": "*i64", "token": "*i64", "finite": "*i1", "tiles": "i32"}
    embed = {"token_ids": "*i64", "table": "*bf16", "x": "*bf16", "squares": "*fp32", "h": "i32"}
    norm = {"x": "*bf16", "squares": "*fp32", "weight": "*bf16", "y": "*bf16", "k": "i32", "epsilon": "fp32"}
    block = {"BLOCK": min(power_of_two(tiles), CHOICE_BLOCK), "PDL": True}
    norm_blocks = {"PARTS": 64, "BLOCK_P": 64, "BLOCK_K": COPY_BLOCK, "PDL": True}
    return {
        "choose": Signature(choose_kernel, choose, block, four, unspecialized=("tiles",)),
        "embed": Signature(embed_kernel, embed, {"BLOCK_H": COPY_BLOCK, "SCALE": None, "PDL": True}, four),
        "rms_norm_rows": Signature(rms_norm_rows_kernel, norm, norm_blocks, four, unspecialized=("epsilon",)),
    }


def signatures(capability: tuple[int, int] = (9, 0)) -> dict[str, Signature]:
    """The products of an 8B and a 0.6B model, an 8B's for up to 64 rows, its head, and the row kernels."""
    found = _row_signatures()
    for dtype in ("bf16", "fp16"):
        groups = {
            "8b": _layer_signatures(dtype, TOKEN_TILE, 4096, 6144, 4096, 12288, device=capability)
            | _head_signatures(dtype, TOKEN_TILE, 151936, 4096, capability),
            "0.6b": _layer_signatures(dtype, TOKEN_TILE, 1024, 4096, 2048, 3072, device=capability),
        }
        if dtype == "bf16":
            for eight in ("i8", "fp8e4nv"):
                groups[f"8b_{eight}"] = _layer_signatures(
                    dtype, TOKEN_TILE, 4096, 6144, 4096, 12288, eight, device=capability
                )
            groups["8b_wide"] = _layer_signatures(dtype, 64, 4096, 6144, 4096, 12288, device=capability)
            gelu = _layer_signatures(dtype, TOKEN_TILE, 3584, 8192, 4096, 14336, device=capability, gelu=True)
            groups["9b_gelu"] = {"gate_up": gelu["gate_up"]}
            groups["8b_wide"] |= _head_signatures(dtype, 64, 151936, 4096, capability)
        for group, members in groups.items():
            found |= {f"{name}_{group}_{dtype}": signature for name, signature in members.items()}
    for name in ("qkv_8b", "gate_up_8b", "head_sample_8b"):
        after = found[f"{name}_bf16"]
        found[f"{name}_at_once_bf16"] = replace(after, constants=after.constants | {"PDL": AT_ONCE})
    return found
