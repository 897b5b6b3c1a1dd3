"""Tiny random checkpoints of the dense families beyond Llama and Qwen3, made of those by renaming.

Plain torch, safetensors and json; imports nothing from `spd`, as `tests.recipes.tiny`, whose tensors and
tokenizer these are. What a family has besides is drawn here, from (seed, tensor name) too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.recipes.tiny import LLAMA, QWEN3, write_json, write_tensors, write_tiny
from tests.recipes.tiny_changes import (
    MIXTRAL,
    Tensors,
    fused,
    packed_experts,
    renamed,
    unchanged,
    with_apart_gates,
    with_centred_norms,
    with_convolutions,
    with_fused_mlp,
    with_gemma_norms,
    with_glm4_norms,
    with_head_gates,
    with_mamba,
    with_narrow_values,
    with_post_norms_alone,
    with_routed_norms,
    with_shared_expert,
    with_shared_mlp,
    with_sides,
    with_single_blocks,
    with_sinks,
    with_whole_norms,
    without_output_bias,
)

WINDOW = 24
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 4.0}


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SPARSE = {"architecture": "Qwen3MoeForCausalLM", "tie": False, "extra": EXPERTS}


NEMOTRON: dict[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "layer_norm_epsilon": 1e-5},
    **{"hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4},
    **{"ssm_state_size": 24, "conv_kernel": 4, "use_conv_bias": True, "mlp_hidden_act": "relu2"},
    **{"time_step_min": 0.0, "use_bias": False, "mlp_bias": False, "attention_bias": False},
}
"""With `time_step_min` the library bounds steps of prompts, and of no other tokens: see that it does not."""
GRANITE_HYBRID = {
    **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 4, "mamba_d_state": 24, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "attention_bias": False},
    **{"position_embedding_type": "nope", "num_local_experts": 0, "shared_intermediate_size": 128},
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}
LFM2 = {
    **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "norm_eps": 1e-5, "conv_L_cache": 3},
    **{"block_ff_dim": 120, "block_multiple_of": 16, "full_attn_idxs": [2], "pad_token_id": 0},
}
GEMMA4 = {
    **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "sliding_window": WINDOW},
    **{"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 8.0, "global_head_dim": 32},
    **{"num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2},
    **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 320},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    },
}
GRANITE = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    **{"attention_multiplier": 0.2, "attention_bias": False},
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "partial_rotary_factor": 0.75,
    "pad_token_id": 0,
}
LONG_ORIGINAL = 256
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "mistral": (
        {"architecture": LLAMA, "tie": False},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
        unchanged,
    ),
    "qwen2": (
        {"architecture": LLAMA, "attention_bias": True},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
        without_output_bias,
    ),
    "phi3": ({"architecture": LLAMA, "tie": False}, {**PHI3, "sliding_window": WINDOW}, fused),
    "phi3_long": (
        {"architecture": LLAMA},
        {
            **PHI3,
            "original_max_position_embeddings": LONG_ORIGINAL,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.4, 2.0, 3.0],
                "long_factor": [float(2 + i) for i in range(6)],
            },
        },
        fused,
    ),
    "gemma2": (
        {"architecture": LLAMA},
        {
            **GEMMA,
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
        with_gemma_norms,
    ),
    "gemma3": (
        {"architecture": QWEN3, "rope": {"rope_theta": 1e6, **LINEAR}},
        {
            **GEMMA,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "sliding_window_pattern": 3,
            "rope_local_base_freq": 100.0,
        },
        with_gemma_norms,
    ),
    "gemma": (
        {"architecture": LLAMA, "kv_heads": 1},
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
        with_centred_norms,
    ),
    "arcee": (
        {"architecture": LLAMA, "tie": False, "rope": {"rope_theta": 1e4, **YARN}},
        {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"},
        renamed(gate_proj="none"),
    ),
    "olmo2": (
        {"architecture": LLAMA, "tie": False},
        {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "pad_token_id": 0},
        with_whole_norms,
    ),
    "glm": (
        {"architecture": LLAMA, "attention_bias": True, "tie": False},
        {
            **{"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True},
            **{"partial_rotary_factor": 0.5, "pad_token_id": 0},
        },
        with_fused_mlp,
    ),
    "cohere": (
        {"architecture": LLAMA},
        {
            **{"architectures": ["CohereForCausalLM"], "model_type": "cohere", "layer_norm_eps": 1e-5},
            **{"logit_scale": 0.7, "pad_token_id": 0},
        },
        renamed(post_attention_layernorm="none"),
    ),
    "ministral": (
        {"architecture": LLAMA, "tie": False},
        {
            **{"architectures": ["MinistralForCausalLM"], "model_type": "ministral"},
            **{"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
        },
        unchanged,
    ),
    "smollm3": (
        {"architecture": LLAMA},
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "no_rope_layers": [1, 0, 1, 0],
            "pad_token_id": 0,
        },
        unchanged,
    ),
    "olmo3": (
        {"architecture": LLAMA, "tie": False, "rope": {"rope_theta": 5e5, **YARN}},
        {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": WINDOW},
        with_whole_norms,
    ),
    "granite": (
        {"architecture": LLAMA},
        {**GRANITE, "architectures": ["GraniteForCausalLM"], "model_type": "granite"},
        unchanged,
    ),
    "granite_moe": (
        SPARSE,
        {
            **GRANITE,
            "architectures": ["GraniteMoeForCausalLM"],
            "model_type": "granitemoe",
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
        },
        packed_experts,
    ),
    "seed_oss": (
        {"architecture": LLAMA, "attention_bias": True, "tie": False},
        {
            "architectures": ["SeedOssForCausalLM"],
            "model_type": "seed_oss",
            "attention_bias": True,
            "attention_out_bias": False,
        },
        without_output_bias,
    ),
    "ministral3": (
        {"architecture": LLAMA, "tie": False},
        {
            "architectures": ["Ministral3ForCausalLM"],
            "model_type": "ministral3",
            "rope_theta": None,
            "rope_parameters": {
                **{**YARN, "original_max_position_embeddings": 64, "rope_theta": 1e4},
                **{"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
        unchanged,
    ),
    "glm4": (
        {"architecture": LLAMA, "attention_bias": True, "tie": False},
        {
            "architectures": ["Glm4ForCausalLM"],
            "model_type": "glm4",
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "pad_token_id": 0,
        },
        with_glm4_norms,
    ),
    "exaone4": (
        {"architecture": QWEN3, "tie": False},
        {
            "architectures": ["Exaone4ForCausalLM"],
            "model_type": "exaone4",
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
        with_post_norms_alone,
    ),
    "cohere2": (
        {"architecture": LLAMA},
        {
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "sliding_window": WINDOW,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "pad_token_id": 0,
        },
        renamed(post_attention_layernorm="none"),
    ),
    "gemma4": ({"architecture": QWEN3, "rope_style": "parameters"}, GEMMA4, with_sides),
    "gemma4_moe": (
        {"architecture": QWEN3, "rope_style": "parameters"},
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
        partial(with_sides, sparse=True),
    ),
    "muse_glimmer": (
        {"architecture": LLAMA, "tie": False, "rope_style": "parameters"},
        {
            **{"architectures": ["MuseGlimmerForCausalLM"], "model_type": "muse_glimmer_text"},
            **{"hidden_activation": "silu", "sliding_window": WINDOW, "layer_rope_theta": [0, 1e4, 1e4, 0]},
            **{"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
            **{"qk_scale_factor": 1.7, "output_multiplier": 0.7, "final_logit_softcapping": 8.0},
            **{"post_norm_eps": 1e-3, "pad_token_id": 0},
        },
        with_apart_gates,
    ),
    "gpt_oss": (
        {**SPARSE, "attention_bias": True, "heads": 4},
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "sliding_window": WINDOW,
            "num_local_experts": 8,
            "intermediate_size": 32,
            "rope_theta": 1e4,
            "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        with_sinks,
    ),
    "hunyuan": (
        {
            "architecture": QWEN3,
            "rope": {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
        {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"},
        renamed(q_norm="query_layernorm", k_norm="key_layernorm"),
    ),
    "hunyuan_moe": (
        {
            **SPARSE,
            "extra": {"num_experts": 8, "moe_intermediate_size": 32},
            "rope": {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
        {
            **{"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe"},
            **{"moe_topk": [3] * 4, "moe_intermediate_size": [32] * 4, "num_shared_expert": [1] * 4},
            **{"intermediate_size": 32, "pad_token_id": 0},
        },
        with_shared_mlp,
    ),
    "granite_hybrid": (
        {"architecture": LLAMA},
        {**GRANITE, **GRANITE_HYBRID, "residual_multiplier": 0.7},
        with_mamba,
    ),
    "granite_hybrid_moe": (
        SPARSE,
        {
            **{**GRANITE, **GRANITE_HYBRID, "position_embedding_type": "rope", "mamba_n_groups": 1},
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
            **{
                "shared_intermediate_size": 48,
                "layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 2,
            },
        },
        partial(with_mamba, groups=1),
    ),
    "nemotron_h": (
        {"architecture": LLAMA, "tie": False},
        NEMOTRON,
        partial(with_single_blocks, kinds="M*-M"),
    ),
    "nemotron_h_moe": (
        {
            **{"architecture": "Qwen3MoeForCausalLM", "tie": False},
            "extra": {**EXPERTS, "mlp_only_layers": [0, 1, 2]},
        },
        {
            **{**NEMOTRON, "hybrid_override_pattern": "M*-E", "n_routed_experts": 8, "n_group": 1},
            **{"moe_shared_expert_intermediate_size": 48, "topk_group": 1, "routed_scaling_factor": 1.5},
        },
        partial(with_single_blocks, kinds="M*-E"),
    ),
    "nemotron_h_latent": (
        {
            **{"architecture": "Qwen3MoeForCausalLM", "tie": False},
            "extra": {**EXPERTS, "mlp_only_layers": [0, 1, 2]},
        },
        {
            **{**NEMOTRON, "hybrid_override_pattern": "M*-E", "n_routed_experts": 8, "n_group": 1},
            **{"moe_shared_expert_intermediate_size": 48, "topk_group": 1, "routed_scaling_factor": 2.5},
            **{"moe_latent_size": 24, "mtp_hybrid_override_pattern": "*E"},
        },
        partial(with_single_blocks, kinds="M*-E", latent=24),
    ),
    "lfm2": ({"architecture": QWEN3, "intermediate": 80}, LFM2, with_convolutions),
    "lfm2_moe": (
        {"architecture": "Qwen3MoeForCausalLM", "extra": {**EXPERTS, "mlp_only_layers": [0]}, "tie": False},
        {
            **{"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "norm_eps": 1e-5},
            **{"num_dense_layers": 1, "routed_scaling_factor": 1.5, "tie_embedding": False},
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        with_convolutions,
    ),
    "mixtral": (
        SPARSE,
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 8,
            "intermediate_size": 32,
        },
        renamed(**MIXTRAL),
    ),
    "step3": (
        {**SPARSE, "rope_style": "parameters", "extra": {**EXPERTS, "mlp_only_layers": [0]}},
        {
            **{"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "share_expert_dim": 48},
            **{"sliding_window": WINDOW, "moe_num_experts": 8, "moe_top_k": 3, "moe_layers_enum": "1,2,3"},
            **{"moe_router_scaling_factor": 1.5, "rope_parameters": None},
            **{"rope_theta": [1e5, 200.0, 200.0, 1e5], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5]},
            **{"swiglu_limits": [0.0, 0.0, 0.6, 0.0], "swiglu_limits_shared": [0.7, 0.0, 0.5, 0.0]},
            **{"attention_other_setting": {"num_attention_heads": 6}},
            "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")],
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0},
                "original_max_position_embeddings": 64,
            },
        },
        with_head_gates,
    ),
    "mimo_v2": (
        {**SPARSE, "kv_heads": 1, "rope_style": "parameters", "extra": {**EXPERTS, "mlp_only_layers": [0]}},
        {
            **{"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"},
            **{"v_head_dim": 10, "sliding_window": WINDOW, "n_routed_experts": 8},
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
                for kind, base in (("full_attention", 1e5), ("sliding_attention", 200.0))
            },
        },
        with_narrow_values,
    ),
    "minimax_m2": (
        SPARSE,
        {
            **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "rotary_dim": 8},
            **{"num_local_experts": 8, "intermediate_size": 32, "scoring_func": "sigmoid"},
            **{"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True},
            "shared_intermediate_size": 0,
        },
        with_routed_norms,
    ),
    "qwen2_moe": (
        {**SPARSE, "attention_bias": True},
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "qkv_bias": True,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
        },
        with_shared_expert,
    ),
    "gemma3_listed": (
        {"architecture": QWEN3},
        {
            **GEMMA,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_theta": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
            },
        },
        with_gemma_norms,
    ),
}


def write_dense(folder: Path, family: str, **options: Any) -> Path:
    """Write one checkpoint of a family, of four layers; options are `write_tiny`'s, and `config`: keys of
    config.json on top. Returns its folder."""
    shape, keys, change = FAMILIES[family]
    extra = options.pop("config", {})
    write_tiny(folder, **{"layers": 4, **shape, **options})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    named = {"num_local_experts", "moe_num_experts"} & keys.keys()
    for key in ("attention_bias", "mlp_bias", *(("num_experts",) if named else ())):
        config.pop(key, None)
    if {"layer_norm_eps", "norm_eps", "layer_norm_epsilon"} & keys.keys():
        config.pop("rms_norm_eps")
    write_json(path, {**config, **keys, **extra})
    write_tensors(folder, change(load_file(folder / "model.safetensors")))
    return folder


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_CONVERTED = [f"model.layers.*.{name}" for name in ("self_attn", "mlp.router")]
NOT_CONVERTED += ["model.embed_tokens", "lm_head"]


def mxfp4(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [E, N, K / 32, 16], the first of two low, and scales [E, N, K / 32] near values [E, N, K]."""
    groups = wide.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    values = torch.cat((E2M1, -E2M1))
    codes = (groups[..., None] / exponent.exp2()[..., None, None] - values).abs().argmin(-1)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).byte(), (exponent + 127).byte()


def write_mxfp4(folder: Path, **options: Any) -> Path:
    """Write a gpt-oss as it is published: its experts in MXFP4. Returns its folder."""
    write_dense(folder, "gpt_oss", **options)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4(tensors.pop(name).mT)
    write_tensors(folder, tensors)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    how = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    write_json(folder / "config.json", {**config, "quantization_config": how})
    return folder
