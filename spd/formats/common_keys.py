"""Keys of `config.json` in all families: their other names, their defaults, their supported values.

Source: the configurations of Hugging Face transformers, versions 4 and 5, and of published
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from spd.formats.block_config import ATTENTION_KINDS
from spd.formats.family_keys import FamilyKeys
from spd.formats.json_file import Fields

_COMMON_DEFAULTS: Mapping[str, object] = {
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Values of absent keys, in families whose rows have no others."""
_FAMILY_ONLY_KEYS = frozenset(
    [
        "attention_multiplier",
        "attention_value_scale",
        "attn_logit_softcapping",
        "embedding_multiplier",
        "final_logit_softcapping",
        "first_k_dense_replace",
        "hidden_activation",
        "logit_scale",
        "logits_scaling",
        "max_window_layers",
        "n_group",
        "no_rope_layer_interval",
        "no_rope_layers",
        "norm_topk_prob",
        "query_pre_attn_scalar",
        "residual_multiplier",
        "routed_scaling_factor",
        "shared_expert_intermediate_size",
        "sliding_window_pattern",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "swiglu_limits",
        "swiglu_limits_shared",
        "topk_group",
    ]
)
"""Keys that are read only in families whose rows have them."""
KEY_ALIASES = {
    "rms_norm_eps": ("norm_eps", "layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon"),
    "num_key_value_heads": ("num_attention_groups",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("top_k_experts", "moe_k", "moe_top_k", "moe_topk"),
    "routed_scaling_factor": ("moe_router_scaling_factor",),
    "n_shared_experts": ("moe_num_shared_experts",),
    "shared_expert_intermediate_size": (
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    ),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index"),
    "decoder_sparse_step": ("moe_layer_interval",),
    "linear_conv_kernel_dim": ("mamba_d_conv", "conv_kernel"),
    "linear_num_key_heads": ("mamba_n_groups", "n_groups"),
    "linear_num_value_heads": ("mamba_n_heads", "mamba_num_heads"),
    "linear_key_head_dim": ("mamba_d_state", "ssm_state_size"),
    "linear_value_head_dim": ("mamba_d_head", "mamba_head_dim"),
    "mamba_conv_bias": ("use_conv_bias",),
    "layer_types": ("layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern"),
    "logit_scale": ("output_multiplier",),
    "dtype": ("torch_dtype",),
}
"""Other names of keys, by the name that is read here; two names of one key may not disagree."""
_SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "use_bidirectional_attention": (False, "vision"),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "output_gate_type": ("silu", "swish"),
    "time_step_limit": ([0.0, inf], [0.0, {"__float__": "Infinity"}]),
    "moe_layer_num_skipped": (0,),
    "moe_router_activation": ("sigmoid",),
    "qk_norm_type": ("per_layer",),
    "att_impl_type": ("GQA",),
    "yarn_only_types": ([ATTENTION_KINDS[0]],),
    **dict.fromkeys(
        ("attn_output_gate", "add_swa_attention_sink_bias", "use_expert_bias"), (True,)
    ),
    **dict.fromkeys(
        ("use_head_wise_attn_gate", "use_moe", "use_mixed_mlp_moe", "zero_centered"), (True,)
    ),
    **dict.fromkeys(("use_routing_bias", "use_moe_router_bias", "norm_expert_weight"), (True,)),
    **dict.fromkeys(("attention_out_bias", "conv_bias", "mamba_proj_bias", "use_bias"), (False,)),
    **dict.fromkeys(("add_full_attention_sink_bias", "sink", "use_cla"), (False,)),
    **dict.fromkeys(("compression_config", "mamba_dt_limit"), ()),
}
"""Values that keys of the forward pass may have, in all families."""
_NULL_IS_NONE = (
    "sliding_window",
    "attention_value_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Keys whose null means that there is none; null of any other key counts as absent."""


def canonical_fields(fields: Fields, family: FamilyKeys) -> Fields:
    """Return a configuration in the keys that are read here, with the family's defaults."""
    fields = fields.with_canonical_keys(KEY_ALIASES)
    read_keys = fields.values.keys() - (_FAMILY_ONLY_KEYS - family.defaults.keys())
    values = {key: fields.get(key) for key in read_keys if key in fields or key in _NULL_IS_NONE}
    defaults = {**_COMMON_DEFAULTS, **family.defaults}
    fields = Fields(fields.where, {**defaults, **values}, fields.file_keys)
    return fields.with_values(family.canonical_keys(fields)) if family.canonical_keys else fields


def refuse_unsupported(fields: Fields, family: FamilyKeys) -> None:
    """Refuse values of known keys that change the forward pass in an unknown way."""
    supported = dict(_SUPPORTED_VALUES)
    for key, value in family.required_values.items():
        supported[key] = (value,)
    if "hidden_activation" in fields:
        supported.pop("hidden_act", None)  # Gemma's code ignores it
    fields.refuse_unsupported_values(supported)
