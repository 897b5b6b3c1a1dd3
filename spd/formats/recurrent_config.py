"""What `config.json` says of layers that keep a state or the latest inputs, beside those of `block_config`.

Source: the configurations of `lfm2`, `lfm2_moe` and `granitemoehybrid` in Hugging Face transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spd.formats.block_config import (
    KINDS,
    LINEAR,
    MAX_DELTA_DIM,
    MAX_RANK,
    MAX_TAPS,
    MAX_WIDTH,
    DeltaConfig,
    listed_kinds,
)
from spd.formats.json_file import Fields


@dataclass(frozen=True)
class ConvConfig:
    """Short convolutions between two gates, and which layers they are."""

    kernel: int  # inputs that the convolution sees
    layers: tuple[bool, ...]


def lfm2_keys(fields: Fields) -> dict[str, object]:
    """What `lfm2` says in keys of its own: a width of which the MLP is made, and tables that are one."""
    key = "block_ff_dim" if "block_ff_dim" in fields else "intermediate_size"
    inner = fields.integer(key, 1, MAX_WIDTH)
    if fields.boolean("block_auto_adjust_ff_dim", False):
        step = fields.integer("block_multiple_of", 1, MAX_WIDTH, 256)
        inner = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * inner / 3))
        inner = -(-inner // step) * step
    tied = fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings", True))
    return {"intermediate_size": inner, "tie_word_embeddings": tied}


def read_conv(fields: Fields, num_layers: int) -> ConvConfig:
    """Of `lfm2`: the layers' kinds, or the numbers of those that attend."""
    key, known = "layer_types", (KINDS[0], "conv")
    layers = listed_kinds(fields, num_layers, known, key)
    if layers is None:
        key = "full_attn_idxs"
        attending = fields.integers(key, 0, num_layers - 1)
        layers = [layer not in attending for layer in range(num_layers)]
    fields.require(not all(layers), key, f"no layer is {KINDS[0]}: convolutions alone are not supported")
    fields.require(not fields.boolean("conv_bias", False), "conv_bias", "true is not supported")
    return ConvConfig(fields.integer("conv_L_cache", 2, MAX_TAPS, 3), tuple(layers))


def granite_keys(fields: Fields) -> dict[str, object]:
    """What `granitemoehybrid` says in keys of its own: older kinds of layers, and whether positions count."""
    width = fields.integer("shared_intermediate_size", 1, MAX_WIDTH, 1024)
    found: dict[str, object] = {"shared_expert_intermediate_size": width}
    if not fields.integer("num_local_experts", 0, 1 << 14, 8):
        found["intermediate_size"] = width
    if fields.get("position_embedding_type") != "rope":
        fields.choice("position_embedding_type", ("rope", "nope"), "nope")
        found["no_rope_layers"] = [0] * fields.integer("num_hidden_layers", 1, 1 << 14)
    return found


def read_mamba(fields: Fields, num_layers: int) -> DeltaConfig:
    """Of `granitemoehybrid`: Mamba-2 layers, in both spellings of their list."""
    key = next((key for key in ("layer_types", "layers_block_type") if key in fields), "layer_types")
    names = fields.get(key)
    if isinstance(names, list):
        older = {"mamba": LINEAR, "attention": KINDS[0]}
        fields = Fields(fields.where, {**fields.values, key: [older.get(str(n), n) for n in names]})
    linear = listed_kinds(fields, num_layers, (KINDS[0], LINEAR), key)
    why = f"no layer is {KINDS[0]}: a model of recurrent layers alone is not supported"
    fields.require(linear is not None and not all(linear), key, why)
    heads = fields.integer("mamba_n_heads", 1, MAX_RANK, 128)
    groups = fields.integer("mamba_n_groups", 1, heads, 1)
    fields.require(heads % groups == 0, "mamba_n_groups", f"{groups} does not divide {heads} heads")
    inner = fields.integer("mamba_expand", 1, 64, 2) * fields.integer("hidden_size", 1, MAX_WIDTH)
    size = inner // heads
    if fields.get("mamba_d_head") != "auto":
        size = fields.integer("mamba_d_head", 1, MAX_DELTA_DIM, size)
    fields.require(size * heads == inner, "mamba_d_head", f"{heads} heads of {size} are not {inner} elements")
    fields.require(not fields.boolean("mamba_proj_bias", False), "mamba_proj_bias", "true is not supported")
    unlimited = fields.get("time_step_limit") in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    fields.require(unlimited, "time_step_limit", "steps with limits are not supported")
    return DeltaConfig(
        fields.integer("mamba_d_conv", 2, MAX_TAPS, 4),
        groups,
        heads,
        fields.integer("mamba_d_state", 1, MAX_DELTA_DIM, 256),
        size,
        tuple(linear or ()),
        corrects=False,
        conv_bias=fields.boolean("mamba_conv_bias", True),
    )
