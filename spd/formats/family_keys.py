"""Each family's `config.json`: its keys, their defaults, and the values that they may have.

A row names every key that the family's files may leave out. Source: the configurations of Hugging
Face transformers, versions 4 and 5, and of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from spd.formats import canonical_keys as canonical
from spd.formats import experts_config as experts
from spd.formats.block_config import (
    CONV_KINDS,
    RECURRENT_KINDS,
    SINGLE_BLOCK_KINDS,
    ExpertsConfig,
    RecurrentConfig,
)
from spd.formats.json_file import Fields
from spd.formats.layer_kinds import read_recurrent


@dataclass(frozen=True)
class FamilyKeys:
    """The keys of one family's configuration, and how they are read."""

    model_type: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of absent keys, where there are files without them.

    A family with windows, partial rotation or shared caches has the key of it.
    """
    experts: ExpertsConfig | None = None
    """Constants of experts that no key has."""
    canonical_keys: Callable[[Fields], Mapping[str, object]] | None = None
    """Returns canonical values of keys that only this family has."""
    required_values: Mapping[str, object] = field(default_factory=dict)
    """The only value that a key may have."""
    experts_key: str | None = None
    """A key without which there are no experts."""
    read_recurrent: Callable[[Fields, int], RecurrentConfig] | None = None
    """Reads the recurrent layers; arguments: the file's keys, the number of layers."""
    is_latent: bool = False
    """True if attention is latent."""
    local_theta_key: str | None = None
    """The key of the rotary base of sliding layers, where they rotate in another way."""
    global_no_rope: bool = False
    """True if layers of full attention do not rotate, in models with sliding layers."""
    other_model_types: tuple[str, ...] = ()
    """Other model types of the same text model."""


CAUSAL = {
    "Llama": FamilyKeys("llama"),
    "Mistral": FamilyKeys(
        "mistral",
        defaults={"max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    ),
    "Phi3": FamilyKeys("phi3", defaults={"partial_rotary_factor": 1.0, "sliding_window": None}),
    "Qwen2": FamilyKeys(
        "qwen2",
        defaults={"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        other_model_types=("qwen2_5_vl", "qwen2_5_vl_text"),
    ),
    "Qwen3": FamilyKeys(
        "qwen3",
        defaults={"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        other_model_types=("qwen3_vl_text",),
    ),
    "Qwen3Moe": FamilyKeys(
        "qwen3_moe", defaults={"norm_topk_prob": False}, experts=experts.SOFTMAX_EXPERTS
    ),
    "Arcee": FamilyKeys(
        "arcee", defaults={"hidden_act": "relu2"}, required_values={"hidden_act": "relu2"}
    ),
    "Gemma": FamilyKeys(
        "gemma",
        defaults={"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True},
        required_values={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "Gemma2": FamilyKeys(
        "gemma2",
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
    ),
    "Gemma3": FamilyKeys(
        "gemma3_text",
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "head_dim": 256,
            "sliding_window": 4096,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
        },
        local_theta_key="rope_local_base_freq",
    ),
    "DeepseekV2": FamilyKeys(
        "deepseek_v2",
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
        },
        experts=experts.SOFTMAX_EXPERTS,
        required_values={"norm_topk_prob": False, "attention_bias": False},
        is_latent=True,
    ),
    "DeepseekV3": FamilyKeys(
        "deepseek_v3",
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
        },
        experts=experts.SIGMOID_EXPERTS,
        required_values={"attention_bias": False},
        is_latent=True,
    ),
    "Glm4Moe": FamilyKeys(
        "glm4_moe",
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
        },
        experts=experts.SIGMOID_EXPERTS,
    ),
    "Glm4MoeLite": FamilyKeys(
        "glm4_moe_lite",
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        experts=experts.SIGMOID_EXPERTS,
        required_values={"attention_bias": False},
        is_latent=True,
    ),
    "MiMo": FamilyKeys("mimo"),
    "Lfm2": FamilyKeys(
        "lfm2",
        defaults={
            "rope_theta": 1_000_000.0,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": True,
        },
        canonical_keys=canonical.lfm2_keys,
        read_recurrent=partial(read_recurrent, kinds=CONV_KINDS),
    ),
    "Lfm2Moe": FamilyKeys(
        "lfm2_moe",
        defaults={
            "rope_theta": 1_000_000.0,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 2,
        },
        experts=experts.LFM2_EXPERTS,
        canonical_keys=canonical.lfm2_keys,
        read_recurrent=partial(read_recurrent, kinds=CONV_KINDS),
    ),
    "Qwen3Next": FamilyKeys(
        "qwen3_next",
        defaults={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "partial_rotary_factor": 0.25,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        experts=experts.SHARED_GATE_EXPERTS,
        read_recurrent=partial(read_recurrent, kinds=RECURRENT_KINDS, interleaved=True),
    ),
    "Qwen3_5": FamilyKeys(
        "qwen3_5_text",
        defaults={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "partial_rotary_factor": 0.25,
        },
        read_recurrent=partial(read_recurrent, kinds=RECURRENT_KINDS),
    ),
    "Qwen3_5Moe": FamilyKeys(
        "qwen3_5_moe_text",
        defaults={
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "partial_rotary_factor": 0.25,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        experts=experts.SHARED_GATE_EXPERTS,
        read_recurrent=partial(read_recurrent, kinds=RECURRENT_KINDS),
    ),
    "Ernie4_5": FamilyKeys("ernie4_5", defaults={"rope_theta": 500_000.0}),
    "Ernie4_5_Moe": FamilyKeys(
        "ernie4_5_moe",
        defaults={"rope_theta": 500_000.0, "first_k_dense_replace": 1},
        experts=experts.ERNIE_EXPERTS,
    ),
    "SmolLM3": FamilyKeys(
        "smollm3",
        defaults={
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
        },
    ),
    "Olmo2": FamilyKeys("olmo2"),
    "Olmo3": FamilyKeys(
        "olmo3",
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0},
        local_theta_key="rope_theta",
    ),
    "Granite": FamilyKeys(
        "granite",
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "GraniteMoe": FamilyKeys(
        "granitemoe",
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        experts=experts.SOFTMAX_EXPERTS,
    ),
    "GraniteMoeHybrid": FamilyKeys(
        "granitemoehybrid",
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
            "mamba_conv_bias": True,
            "num_experts": 8,
            "shared_expert_intermediate_size": 1024,
        },
        experts=experts.GRANITE_EXPERTS,
        canonical_keys=canonical.granite_keys,
        experts_key="num_experts",
        read_recurrent=partial(read_recurrent, kinds=RECURRENT_KINDS, uses_delta_rule=False),
    ),
    "NemotronH": FamilyKeys(
        "nemotron_h",
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "head_dim": 128,
            "shared_expert_intermediate_size": 7688,
            "mamba_conv_bias": True,
        },
        experts=experts.NEMOTRON_EXPERTS,
        canonical_keys=canonical.nemotron_keys,
        required_values={"mlp_bias": False},
        experts_key="num_experts",
        read_recurrent=partial(read_recurrent, kinds=SINGLE_BLOCK_KINDS, uses_delta_rule=False),
    ),
    "SeedOss": FamilyKeys("seed_oss", defaults={"attention_bias": True, "head_dim": 128}),
    "Ministral": FamilyKeys(
        "ministral", defaults={"sliding_window": 4096, "sliding_window_pattern": 1024}
    ),
    "Ministral3": FamilyKeys(
        "ministral3",
        defaults={
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-05,
            "sliding_window": None,
            "head_dim": 128,
        },
    ),
    "Glm": FamilyKeys(
        "glm", defaults={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}
    ),
    "Glm4": FamilyKeys(
        "glm4", defaults={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}
    ),
    "Exaone4": FamilyKeys(
        "exaone4",
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
        global_no_rope=True,
    ),
    "Cohere": FamilyKeys(
        "cohere",
        defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "rope_theta": 500_000.0},
        required_values={"use_qk_norm": False},
    ),
    "Cohere2": FamilyKeys(
        "cohere2",
        defaults={
            "tie_word_embeddings": True,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        global_no_rope=True,
    ),
    "Gemma4": FamilyKeys(
        "gemma4_text",
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 0,
        },
        experts=experts.SOFTMAX_EXPERTS,
        experts_key="enable_moe_block",
        local_theta_key="rope_local_base_freq",
        other_model_types=("gemma4_unified_text",),
    ),
    "Gemma4Unified": FamilyKeys(
        "gemma4_text",
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 0,
        },
        experts=experts.SOFTMAX_EXPERTS,
        experts_key="enable_moe_block",
        local_theta_key="rope_local_base_freq",
        other_model_types=("gemma4_unified_text",),
    ),
    "MuseGlimmer": FamilyKeys(
        "muse_glimmer_text",
        defaults={
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 2048,
            "sliding_window_pattern": 4,
            "hidden_activation": "silu",
            "attention_bias": False,
            "head_dim": 128,
            "post_norm_eps": 1e-08,
            "final_logit_softcapping": 20.0,
            "logit_scale": 0.19611613513818404,
        },
        canonical_keys=canonical.muse_keys,
        required_values={"hidden_activation": "silu", "attention_bias": False},
    ),
    "GptOss": FamilyKeys(
        "gpt_oss",
        defaults={
            "attention_bias": True,
            "rope_theta": 150_000.0,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        experts=experts.GPT_OSS_EXPERTS,
    ),
    "HunYuanDenseV1": FamilyKeys("hunyuan_v1_dense", defaults={"alpha": None}),
    "HunYuanMoEV1": FamilyKeys(
        "hunyuan_v1_moe",
        defaults={"alpha": None, "num_experts_per_tok": 1, "shared_expert_intermediate_size": None},
        experts=experts.SOFTMAX_EXPERTS,
        canonical_keys=canonical.hunyuan_keys,
        required_values={"use_qk_norm": True},
    ),
    "Mixtral": FamilyKeys(
        "mixtral",
        defaults={"rope_theta": 1_000_000.0, "sliding_window": None},
        experts=experts.SOFTMAX_EXPERTS,
    ),
    "MiniMaxM2": FamilyKeys(
        "minimax_m2",
        defaults={"rope_theta": 5_000_000.0, "head_dim": 128, "partial_rotary_factor": 1.0},
        experts=experts.MINIMAX_EXPERTS,
        canonical_keys=canonical.minimax_keys,
        required_values={"use_qk_norm": True, "shared_expert_intermediate_size": 0},
    ),
    "MiMoV2Flash": FamilyKeys(
        "mimo_v2_flash",
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "rope_theta": 5_000_000.0,
            "swa_rope_theta": 10000.0,
            "head_dim": 192,
            "sliding_window": 129,
            "v_head_dim": 128,
            "sliding_window_pattern": 6,
            "partial_rotary_factor": 0.334,
            "attention_value_scale": 0.707,
            "swa_num_attention_heads": None,
            "swa_num_key_value_heads": None,
        },
        experts=experts.SIGMOID_EXPERTS,
        canonical_keys=canonical.mimo_keys,
        local_theta_key="swa_rope_theta",
    ),
    "Step3p5": FamilyKeys(
        "step3p5",
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-05,
            "head_dim": 128,
            "partial_rotary_factor": 1.0,
            "sliding_window": 512,
            "sliding_window_pattern": 4,
            "shared_expert_intermediate_size": 1280,
            "swa_num_attention_heads": None,
            "swa_num_key_value_heads": None,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "query_pre_attn_scalar": None,
        },
        experts=experts.SIGMOID_EXPERTS,
        canonical_keys=canonical.step_keys,
        local_theta_key="rope_theta",
    ),
    "Qwen2Moe": FamilyKeys(
        "qwen2_moe",
        defaults={
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "norm_topk_prob": False,
            "attention_bias": True,
            "shared_expert_intermediate_size": 5632,
        },
        experts=experts.SHARED_GATE_EXPERTS,
        required_values={"qkv_bias": True},
    ),
}
"""Families by their architectures, without ForCausalLM.

Each file has max_position_embeddings and rms_norm_eps, unless it is the text part of another model.
The last of `sliding_window_pattern` layers has full attention.
"""
