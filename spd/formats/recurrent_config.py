"""What `config.json` says of layers that keep a state or the latest inputs, beside those of `block_config`.

Source: `lfm2`, `lfm2_moe`, `granitemoehybrid` and `nemotron_h` of Hugging Face transformers 5.
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
    found["num_local_experts"] = fields.integer("num_local_experts", 0, 1 << 14, 8)
    if not found["num_local_experts"]:
        found["intermediate_size"] = width
    if fields.get("position_embedding_type") != "rope":
        fields.choice("position_embedding_type", ("rope", "nope"), "nope")
        found["no_rope_layers"] = [0] * fields.integer("num_hidden_layers", 1, 1 << 14)
    return found


def _listed(fields: Fields, known: tuple[str, ...]) -> tuple[str, list[str]]:
    """The key of the list of layers' kinds, and the list, with older names of kinds as newer ones."""
    key = next((key for key in ("layer_types", "layers_block_type") if key in fields), "layer_types")
    names = fields.get(key)
    fields.require(isinstance(names, list), key, "is not a list of names")
    assert isinstance(names, list)
    older = {"mamba": LINEAR, "attention": KINDS[0]}
    each = (Fields(fields.where, {key: older.get(str(name), name)}) for name in names)
    found = [kind.choice(key, known) for kind in each]
    for needed in known[:2]:
        why = f"no layer is {needed}: a model without is not supported"
        fields.require(needed in found, key, why)
    return key, found


def read_mamba(fields: Fields, num_layers: int, *, single: bool = False) -> DeltaConfig:
    """Of `granitemoehybrid`, and of `nemotron_h` by `nemotron_keys`, whose layers have a single block."""
    key, kinds = _listed(fields, (KINDS[0], LINEAR, *(SINGLE if single else ())))
    fields.require(len(kinds) == num_layers, key, f"is not a list of {num_layers} names, one a layer")
    heads = fields.integer("mamba_n_heads", 1, MAX_RANK, 128)
    groups = fields.integer("mamba_n_groups", 1, heads, 1)
    fields.require(heads % groups == 0, "mamba_n_groups", f"{groups} does not divide {heads} heads")
    inner = fields.integer("mamba_expand", 1, 64, 2) * fields.integer("hidden_size", 1, MAX_WIDTH)
    size = inner // heads
    if fields.get("mamba_d_head") != "auto":
        size = fields.integer("mamba_d_head", 1, MAX_DELTA_DIM, size)
    why = f"{heads} heads of {size} are not {inner} elements"
    fields.require(single or size * heads == inner, "mamba_d_head", why)
    unlimited = fields.get("time_step_limit") in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    fields.require(unlimited, "time_step_limit", "steps with limits are not supported")
    fields.require(not fields.boolean("mamba_proj_bias", False), "mamba_proj_bias", "true is not supported")
    return DeltaConfig(
        fields.integer("mamba_d_conv", 2, MAX_TAPS, 4),
        groups,
        heads,
        fields.integer("mamba_d_state", 1, MAX_DELTA_DIM, 256),
        size,
        tuple(kind == LINEAR for kind in kinds),
        corrects=False,
        conv_bias=fields.boolean("mamba_conv_bias", True),
        single=tuple(kinds) if single else (),
    )


SINGLE = ("mlp", "moe")
_PATTERN = {"M": LINEAR, "*": KINDS[0], "-": "mlp", "E": "moe"}
_NEMOTRON = {
    **{"mamba_n_heads": ("mamba_num_heads", 128), "mamba_d_head": ("mamba_head_dim", 64)},
    **{"mamba_n_groups": ("n_groups", 8), "mamba_d_state": ("ssm_state_size", 128)},
    **{"mamba_d_conv": ("conv_kernel", 4), "mamba_conv_bias": ("use_conv_bias", True)},
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", 7688),
}
"""What others call what `nemotron_h` has keys of its own for, and what an absent one counts as."""


def nemotron_keys(fields: Fields) -> dict[str, object]:
    """What `nemotron_h` says in keys of its own: the layers' kinds as letters or names, sizes of Mamba-2."""
    found: dict[str, object] = {
        key: fields.get(own) if own in fields else usual for key, (own, usual) in _NEMOTRON.items()
    }
    known = (KINDS[0], LINEAR, *SINGLE)
    if "hybrid_override_pattern" in fields:
        letters = fields.text("hybrid_override_pattern")
        strange = next((letter for letter in letters if letter not in _PATTERN), None)
        fields.require(
            strange is None, "hybrid_override_pattern", f"{strange!r} is not one of {', '.join(_PATTERN)}"
        )
        named = [_PATTERN[one] for one in letters]
        _, listed = _listed(fields, known) if "layers_block_type" in fields else ("", named)
        fields.require(listed == named, "layers_block_type", "disagrees with hybrid_override_pattern")
        fields = Fields(fields.where, {**fields.values, "layer_types": named})
    _, kinds = _listed(fields, known)
    if "moe" in kinds:
        fields.integer("n_routed_experts", 1, 1 << 14)
    fields.choice("mlp_hidden_act", ("relu2",), "relu2")
    fields.choice("mamba_hidden_act", ("silu",), "silu")
    for key in ("use_bias", "mlp_bias"):
        fields.require(not fields.boolean(key, False), key, "true is not supported")
    fields.require("mamba_dt_limit" not in fields, "mamba_dt_limit", "limits on time steps are not supported")
    fields.require(
        "moe_latent_size" not in fields, "moe_latent_size", "experts in a smaller space are not supported"
    )
    found |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    return (
        found | ({} if "moe" in kinds else {"n_routed_experts": None}) | {"no_rope_layers": [0] * len(kinds)}
    )
