"""Rewriting of keys that only one family's `config.json` has: a function for each such family.

Each takes a file's keys, with the family's defaults for absent ones, and returns values of
canonical keys that replace them. Source: the configurations of these families in Hugging Face
transformers 5 and in published checkpoints.
"""

from __future__ import annotations

import re

from spd.formats.block_config import (
    ATTENTION_KINDS,
    MAX_EXPERTS,
    MAX_PERIOD,
    MAX_POSITIONS,
    MAX_RANK,
    MAX_WIDTH,
    MLP_KINDS,
    SINGLE_BLOCK_KINDS,
    SLIDING_HEAD_KEYS,
)
from spd.formats.json_file import Fields
from spd.formats.layer_kinds import SWIGLU_LIMIT_KEYS, read_layer_kinds


def lfm2_keys(fields: Fields) -> dict[str, object]:
    """Return the MLP's width, derived from the file's, and whether the head is the embedding."""
    width_key = "block_ff_dim" if "block_ff_dim" in fields else "intermediate_size"
    width = fields.integer(width_key, 1, MAX_WIDTH)
    if fields.boolean("block_auto_adjust_ff_dim", False):
        step = fields.integer("block_multiple_of", 1, MAX_WIDTH, 256)
        factor = fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0)
        width = int(factor * int(2 * width / 3))
        width = -(-width // step) * step
    tied = fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings"))
    return {"intermediate_size": width, "tie_word_embeddings": tied}


def granite_keys(fields: Fields) -> dict[str, object]:
    """Return the MLP's width without experts, that of a value head, and which layers rotate."""
    values: dict[str, object] = {}
    if not fields.get("num_experts"):
        values["intermediate_size"] = fields.get("shared_expert_intermediate_size")
    if fields.get("linear_value_head_dim") in (None, "auto"):
        expansion = fields.integer("mamba_expand", 1, 64, 2)
        width = expansion * fields.integer("hidden_size", 1, MAX_WIDTH)
        heads = fields.integer("linear_num_value_heads", 1, MAX_RANK)
        values["linear_value_head_dim"] = width // heads
    if fields.choice("position_embedding_type", ("rope", "nope"), "nope") == "nope":
        values["no_rope_layers"] = [0] * fields.integer("num_hidden_layers", 1, MAX_PERIOD)
    return values


def minimax_keys(fields: Fields) -> dict[str, object]:
    """Return the share of a head that rotates, of which the file has the number of dimensions."""
    head_dim = fields.even_integer("head_dim", 1024)
    rotary_dim = fields.optional_integer("rotary_dim", 2, 1024)
    return {} if rotary_dim is None else {"partial_rotary_factor": rotary_dim / head_dim}


def hunyuan_keys(fields: Fields) -> dict[str, object]:
    """Return the numbers of experts, which the file lists for each layer, equal in all of them.

    A shared expert is as wide as an MLP.
    """
    values: dict[str, object] = {}
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert"):
        by_layer = fields.get(key)
        if isinstance(by_layer, list) and by_layer:
            agrees = all(value == by_layer[0] for value in by_layer)
            fields.require(agrees, key, "differs among layers")
            values[key] = by_layer[0]
    uniform = fields.with_values(values)
    width = uniform.integer("intermediate_size", 1, MAX_WIDTH)
    shared = uniform.integer("num_shared_expert", 0, 64, 1)
    return {**values, "shared_expert_intermediate_size": width * shared}


def mimo_keys(fields: Fields) -> dict[str, object]:
    """Return key heads and window of sliding layers; refuse a file without kinds of layers."""
    key_heads = fields.integer("num_key_value_heads", 1, MAX_RANK)
    local_key = SLIDING_HEAD_KEYS[1]
    values: dict[str, object] = {local_key: fields.get(local_key) or 2 * key_heads}
    for key, older_key in (
        ("layer_types", "hybrid_layer_pattern"),
        ("mlp_layer_types", "moe_layer_freq"),
    ):
        fields.require(key in fields or older_key in fields, older_key, "is missing")
    if "sliding_window_size" in fields:  # it counts the positions before a row's own
        values["sliding_window"] = 1 + fields.integer("sliding_window_size", 0, MAX_POSITIONS)
    return values


def step_keys(fields: Fields) -> dict[str, object]:
    """Return values by layer without those of MTP layers, and the rotation by kinds of layers.

    The lists of `step3p5` have entries for MTP layers behind those of the model's layers.
    """
    layers = fields.integer("num_hidden_layers", 1, MAX_PERIOD)
    lists = {key: value[:layers] for key, value in fields.values.items() if isinstance(value, list)}
    for key in SWIGLU_LIMIT_KEYS:
        if key in lists:
            lists[key] = [limit or 0.0 for limit in lists[key]]
    values: dict[str, object] = {**lists}
    cut = fields.with_values(lists)
    if "mlp_layer_types" not in cut:
        values["mlp_layer_types"] = _step_mlp_kinds(cut, layers)
    local = cut.optional_nested("attention_other_setting") or Fields(cut.where, {})
    local_heads = cut.get("num_sliding_attention_heads") or local.get("num_attention_heads")
    values[SLIDING_HEAD_KEYS[0]] = local_heads
    kinds = read_layer_kinds(cut, layers, ATTENTION_KINDS) or [ATTENTION_KINDS[0]] * layers
    if "partial_rotary_factors" in lists and "rope_theta" not in lists and "rope_theta" in cut:
        values["rope_theta"] = [cut.get("rope_theta")] * layers
        cut = fields.with_values(values)
    if "rope_theta" in values:
        values |= {
            "rope_parameters": _step_rotation(cut, kinds),
            "rope_theta": None,
            "rope_scaling": None,
        }
    return {**values, "layer_types": kinds}


def _step_mlp_kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kind of each layer's MLP; the file has numbers of the sparse ones.

    They stand in a list or in a text.
    """
    key = "moe_layers_enum"
    if isinstance(fields.get(key), list):
        sparse = set(fields.integers(key, 0, MAX_RANK))
    else:
        sparse = {int(number) for number in re.findall(r"\d+", fields.text(key, ""))}
    sparse = sparse or set(range(3, layers))
    return [MLP_KINDS[layer in sparse] for layer in range(layers)]


def _step_rotation(fields: Fields, kinds: list[str]) -> dict[str, dict[str, object]]:
    """Return the rotary parameters of each kind of layers, which the file lists by layer."""
    layers = len(kinds)
    key = "partial_rotary_factors"
    bases = fields.numbers("rope_theta", layers, 1.0, 1e12)
    shares = fields.numbers(key, layers, 0.0, 1.0) if key in fields else (1.0,) * layers
    by_kind: dict[str, dict[str, object]] = {}
    for kind, base, share in zip(kinds, bases, shares, strict=True):
        parameters: dict[str, object] = {"rope_theta": base, "partial_rotary_factor": share}
        agrees = by_kind.setdefault(kind, parameters) == parameters
        fields.require(agrees, "rope_theta", "differs among layers of one kind")
    scaling = fields.optional_nested("rope_scaling")
    if scaling is not None and ATTENTION_KINDS[0] in by_kind:
        by_kind[ATTENTION_KINDS[0]].update(scaling.values)
    return by_kind


def muse_keys(fields: Fields) -> dict[str, object]:
    """Return the factor of scores, and which layers rotate: those whose base is above 0."""
    layers = fields.integer("num_hidden_layers", 1, MAX_PERIOD)
    theta = "layer_rope_theta"
    slides = [bool((layers - 1 - layer) % 4) for layer in range(layers)]
    bases = fields.numbers(theta, layers, 0.0, 1e12) if theta in fields else slides
    is_uniform = len({base for base in bases if base}) <= 1
    fields.require(is_uniform, theta, "differs among layers that turn, which is not supported")
    factor = fields.number("qk_scale_factor", 1e-6, 1e6, 3.87)
    values: dict[str, object] = {
        "attention_multiplier": factor * fields.even_integer("head_dim", 1024) ** -0.5,
        "no_rope_layers": [int(base > 0) for base in bases],
    }
    if "layer_types" not in fields:
        values["layer_types"] = [ATTENTION_KINDS[is_sliding] for is_sliding in slides]
    return values


def nemotron_keys(fields: Fields) -> dict[str, object]:
    """Return the number of layers, which the kinds imply, and no experts where no layer has any.

    No layer rotates.
    """
    kinds = read_layer_kinds(fields, None, SINGLE_BLOCK_KINDS)
    if kinds is None:
        raise fields.field_error("layer_types", "is missing")
    experts = fields.integer("num_experts", 1, MAX_EXPERTS) if "moe" in kinds else None
    return {
        "num_hidden_layers": len(kinds),
        "no_rope_layers": [0] * len(kinds),
        "num_experts": experts,
    }
